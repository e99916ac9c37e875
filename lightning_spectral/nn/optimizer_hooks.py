"""Optimizer hooks that change the gradients of sharded layers just before a step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_spectral.arguments import Number, check_fields, flag
from lightning_spectral.errors import check_is
from lightning_spectral.functional.checks import has_values
from lightning_spectral.functional.spectra import (
    TAU,
    effective_lr_factors,
    frobenius_decay_products,
    weight_lr_factors,
)
from lightning_spectral.nn.layers.terms import SingularTerms, sharded_layers

Factors = list[tuple[nn.Parameter, Tensor]]  # of the gradients of parameters


@dataclass(frozen=True)
class EffectiveLRClip:
    r"""Optimizer hook that multiplies the gradients of both vectors of term i by :math:`\min(1, \tau/\omega_i)`.

    It acts before momentum. For plain SGD, with or without momentum, this is exactly a smaller learning rate for the
    term; with optimizers that rescale gradients by their own history it has less effect or none.

    Args:
        tau: Largest effective learning rate, in units of the nominal one, at least 1; ``float("inf")`` changes nothing.

    Reference:
        Korzhenkov & Louizos (2024), section 3.3; the paper uses tau = 10.

    Example:
        >>> from lightning_spectral.nn import SpectralShardedLinear
        >>> layer = SpectralShardedLinear(2, 2, num_terms=2, bias=False)
        >>> layer.load_terms(torch.eye(2), torch.eye(2), torch.tensor([1.0, 20.0]))
        >>> optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
        >>> handle = EffectiveLRClip(tau=10.0).register(optimizer, layer)
        >>> layer(torch.ones(1, 2)).sum().backward()
        >>> layer.u.grad
        tensor([[ 1., 20.],
                [ 1., 20.]])
        >>> optimizer.step()
        >>> layer.u.grad
        tensor([[ 1., 10.],
                [ 1., 10.]])
    """

    tau: float

    def __post_init__(self) -> None:
        check_fields(self, tau=TAU)

    def register(self, optimizer: Optimizer, module: nn.Module) -> RemovableHandle:
        """Attach the hook for the sharded layers of ``module``; ``handle.remove()`` detaches it.

        Parameters that this optimizer does not step are left unchanged: another one may step them, with its own hook.
        """
        layers, stepped = sharded_layers(module).values(), _stepped(optimizer)

        def act(*_: Any) -> None:
            for layer in layers:
                _scale_gradients(_of_both_vectors(layer, effective_lr_factors(layer.omega, self.tau)), stepped)

        return optimizer.register_step_pre_hook(act)


@dataclass(frozen=True)
class FrobeniusDecay:
    r"""Optimizer hook that adds the gradient of :math:`\frac{\lambda}{2}\|U\Omega V\|_F^2` for each sharded layer.

    It decays the effective weight, as ``weight_decay`` decays a dense one; decaying u and v separately would not.

    Args:
        coefficients: Lambda for each dotted layer name, looked up in every step; layers that are not named, or have 0,
            do not decay.
        decoupled: Take a separate step along the penalty's gradient, scaled by the learning rate as in AdamW, instead
            of adding it to the gradients that the optimizer rescales.

    Reference:
        Khodak et al. (2021); Korzhenkov & Louizos (2024), section 3.3.
    """

    coefficients: Mapping[str, float]
    decoupled: bool = False

    def __post_init__(self) -> None:
        check_fields(self, decoupled=flag)
        check_is("coefficients", self.coefficients, Mapping)
        for name, coefficient in self.coefficients.items():
            if not isinstance(name, str):
                raise TypeError(f"`coefficients` maps names of layers to numbers, got the key {name!r}.")
            Number(at_least=0)(f"coefficients[{name!r}]", coefficient)

    def register(self, optimizer: Optimizer, module: nn.Module) -> RemovableHandle:
        """Attach the hook for the named sharded layers of ``module``; ``handle.remove()`` detaches it."""
        act = decaying(self.coefficients, self.decoupled, optimizer, sharded_layers(module))
        return optimizer.register_step_pre_hook(act)


def decaying(
    coefficients: Mapping[str, float], decoupled: bool, optimizer: Optimizer, layers: Mapping[str, SingularTerms]
) -> Callable[..., None]:
    """What `FrobeniusDecay` does before each step."""
    named = [(name, layers[name]) for name in coefficients]
    group_of = {id(p): group for group in optimizer.param_groups for p in group["params"]}

    @torch.no_grad()
    def act(*_: Any) -> None:
        for name, layer in named:
            if (decay := coefficients[name]) == 0.0:
                continue
            moves: Factors = []  # of both factors, which are read before either moves
            products = frobenius_decay_products(layer.u, layer.omega if layer.multiplies else None, layer.v)
            for factor, product in zip((layer.u, layer.v), products, strict=True):
                if factor.grad is None or (group := group_of.get(id(factor))) is None:
                    continue
                if decoupled:
                    moves.append((factor, torch.mm(*product) * (decay * group["lr"])))
                else:  # an optimizer that maximises reverses the sign of gradients
                    exact = (matrix.to(factor.grad) for matrix in product)  # of a step within autocast, too
                    factor.grad.addmm_(*exact, alpha=-decay if group.get("maximize") else decay)
            for factor, move in moves:
                factor.sub_(move)

    return act


class TermRates:
    """Scales the gradients of each term's vectors by a factor of at most 1 that is fixed for a client's turn.

    The factor is the smaller of two: `effective_lr_factors` with ``clip_tau`` bounds the learning rate of the vectors,
    and `weight_lr_factors` with ``clip_weight_lr`` that of the weight, both in units of the nominal one. It acts just
    before a step, before momentum.
    """

    def __init__(self, layers: Iterable[SingularTerms], clip_tau: float, clip_weight_lr: float) -> None:
        self.clip_tau = clip_tau
        self.clip_weight_lr = clip_weight_lr
        self._layers = list(layers)
        self._scaled: Factors = []

    @torch.no_grad()
    def start_client(self) -> None:
        """Compute the factors of the terms that the layers hold now, and look which multipliers are all 1."""
        self._scaled = []
        if not self._layers:
            return
        omegas = [layer.omega for layer in self._layers]
        sizes, omega = [len(own) for own in omegas], torch.cat(omegas)  # of all layers, which starts fewer kernels
        factors = self.factors(omega)
        # without values, the largest terms count as too large, and multipliers as small
        looks: list[list[bool]] = [[self.clip_weight_lr < math.inf, True] for _ in sizes]
        if has_values(omega):
            flags = torch.stack([factors < 1.0, omega != 1.0]).cpu()  # read from the device at once
            looks = [own.any(1).tolist() for own in torch.split(flags, sizes, dim=1)]
        for layer, own, (is_too_fast, multiplies) in zip(self._layers, torch.split(factors, sizes), looks, strict=True):
            layer.multiplies = multiplies
            if is_too_fast:  # on a GPU all gradients are scaled at once, by factors of their shapes
                both = _of_both_vectors(layer, own)
                self._scaled += both if own.is_cpu else [(p, factor.expand_as(p).clone()) for p, factor in both]

    def factors(self, omega: Tensor) -> Tensor:
        """The factor of each term that the layers hold, one layer after another, of all multipliers likewise."""
        # Both vectors of a drawn term have equal length, so v stands in for a u without some of its rows, whose norm
        # would allow too long a step.
        rights: list[Tensor] = [layer.v for layer in self._layers]
        lefts = [layer.u if layer.has_all_rows else layer.v.T for layer in self._layers]
        squares_u, squares_v = torch._foreach_mul(lefts, lefts), torch._foreach_mul(rights, rights)
        squares = torch.cat([own.sum(0) for own in squares_u]) + torch.cat([own.sum(1) for own in squares_v])
        of_weight = weight_lr_factors(squares, omega, self.clip_weight_lr)
        return torch.minimum(effective_lr_factors(omega, self.clip_tau), of_weight)

    def acting(self, optimizer: Optimizer) -> Callable[[], None]:
        """What to do before each step; parameters that this optimizer does not step are left unchanged."""
        stepped = _stepped(optimizer)
        return lambda: _scale_gradients(self._scaled, stepped)


def _of_both_vectors(layer: SingularTerms, factors: Tensor) -> Factors:
    return [(layer.u, factors), (layer.v, factors[:, None])]


def _stepped(optimizer: Optimizer) -> set[int]:
    return {id(p) for group in optimizer.param_groups for p in group["params"]}


@torch.no_grad()
def _scale_gradients(factors: Iterable[tuple[nn.Parameter, Tensor]], stepped: set[int]) -> None:
    scaled = [(p.grad, own) for p, own in factors if p.grad is not None and id(p) in stepped]
    if scaled:
        torch._foreach_mul_(*map(list, zip(*scaled, strict=True)))
