"""Zampling in a module: the weights that are compressed, and the scores that take their place."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.conv import _ConvNd

from lightning_spectral.arguments import (
    Number,
    OneOf,
    Rule,
    Whole,
    as_patterns,
    check_fields,
    check_matches,
    flag,
    matches_any,
)
from lightning_spectral.errors import check_is
from lightning_spectral.functional.zampling import InfluenceMatrix, LayerRows, Link, Values, draw_bits
from lightning_spectral.nn.layers.terms import join
from lightning_spectral.nn.plan.layer_types import BY_NAME, has_gradient_hook, is_affine, qualified_name
from lightning_spectral.nn.torch_modules import keeping_type, weight_hooks
from lightning_spectral.protocol.rng import derived_generator, derived_seed

Init = Literal["he", "paper"]


def _one_factor(argument: str, value: Any) -> Any:
    if isinstance(value, Mapping | Sequence) and not isinstance(value, str):
        raise TypeError(
            f"`{argument}` is one number for all clients, got {value!r}: bits of different matrices cannot be averaged."
        )
    return Number(at_least=1, hint="it is the number of weights for each probability")(argument, value)


# The rules for the settings that `Zampling` shares with `Compression`, by the names that users know.
COMPRESSION: Mapping[str, Rule] = {
    "compression": _one_factor,
    "degree": Whole(at_least=1, optional=True),
    "init": OneOf(get_args(Init)),
    "sampled": flag,
    "values": OneOf(get_args(Values)),
    "memory": Whole(at_least=0),
    "gain": Number(above=0),
}
DOWNLINK_BITS = Whole(at_least=1, at_most=16, optional=True)


@dataclass(frozen=True)
class CompressedWeight:
    """One parameter that becomes some rows of Qz."""

    name: str  # the first one if it is tied
    shape: tuple[int, ...]
    fan_in: int  # inputs to each output of its layer; 2 for embeddings, whose initial variance is then 1

    @property
    def num_values(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Compression:
    """What determines Q except the module and the seed, as in `zample`; ``factor`` is its ``compression``."""

    factor: float
    degree: int | None = 10
    init: Init = "he"
    sampled: bool = True
    values: Values = "normal"
    exclude: Sequence[str] = ()
    memory: int = 2**30
    gain: float = 1.0

    def __post_init__(self) -> None:
        rules = dict(COMPRESSION)
        factor = rules.pop("compression")
        check_fields(self, factor=lambda _, value: factor("compression", value), exclude=as_patterns, **rules)
        if self.degree is None and self.factor != 1.0:
            raise ValueError(
                f"With `degree=None` each weight has a probability of its own, so `compression` must be 1, got "
                f"{self.factor!r}; give a degree, such as 10, to compress."
            )

    def variance(self, fan_in: int) -> float:
        """Variance of the entries of Q in the rows of a layer.

        With a gain of 1 the forward pass has weights of variance 2 / fan_in, because d entries are multiplied by values
        of mean square 1/2 (bits) or 1/3 (uniform probabilities). The paper prints the latter for both (Lemma 2.1).

        Example:
            >>> Compression(32, degree=10).variance(fan_in=100), Compression(32, init="paper").variance(100)
            (0.004, 0.006)
        """
        mean_square_inverse = 2 if self.sampled and self.init == "he" else 3
        return self.gain**2 * 2 * mean_square_inverse / ((self.degree or 1) * fan_in)

    def num_probs(self, weights: Sequence[CompressedWeight]) -> int:
        return math.ceil(sum(weight.num_values for weight in weights) / self.factor)

    def first_probs(self, weights: Sequence[CompressedWeight], seed: int) -> Tensor:
        """The probabilities that training starts from, uniform in [0, 1], shape ``(n,)``, float32."""
        generator = derived_generator(seed, "probabilities")
        return torch.rand(self.num_probs(weights), dtype=torch.float32, generator=generator)

    def matrix(self, weights: Sequence[CompressedWeight], seed: int) -> InfluenceMatrix:
        """Q, whose rows depend on the seed, the weight's name and n only."""
        layers = tuple(
            LayerRows(derived_seed(seed, "influence", w.name), w.num_values, math.sqrt(self.variance(w.fan_in)))
            for w in weights
        )
        return InfluenceMatrix(layers, self.num_probs(weights), self.degree, self.values, self.memory)

    def weights_of(self, module: nn.Module) -> tuple[CompressedWeight, ...]:
        """The parameters that are compressed: weights and biases of affine layers, and embeddings.

        Parameters that are frozen or have a gradient hook are left as they are. Parameters of normalisation layers, of
        parametrised layers and of modules unknown to this package are sent whole: a scale that should be near 1 cannot
        be a random number around 0.
        """
        check_is("module", module, nn.Module)
        named = dict(module.named_parameters(remove_duplicate=False))
        check_matches("exclude", self.exclude, named, "parameter")
        first_name = {id(p): name for name, p in module.named_parameters()}
        dense = {id(p) for name, p in named.items() if matches_any(name, self.exclude) or has_gradient_hook(p)}
        for part in module.modules():  # padding rows must stay zero, and sparse gradients do not form a vector
            if isinstance(part, nn.Embedding) and (part.padding_idx is not None or part.sparse):
                dense.add(id(part.weight))
        found: dict[str, CompressedWeight] = {}
        for path, owner in module.named_modules():
            if not (is_affine(owner) and not weight_hooks(owner)) and not isinstance(owner, nn.Embedding):
                continue
            fan_in: int | None = None
            for own_name, parameter in owner.named_parameters(recurse=False):
                name = join(path, own_name)
                if not parameter.requires_grad or id(parameter) in dense:
                    continue
                if parameter.ndim >= 2:
                    fan_in = _fan_in(owner, parameter)
                elif not (parameter.ndim == 1 and fan_in is not None and "bias" in own_name):
                    continue
                if not parameter.is_floating_point():
                    raise ValueError(
                        f"{name!r} is of type {parameter.dtype}; only floating-point weights can be compressed. "
                        "Keep it dense with `exclude=`."
                    )
                if getattr(getattr(type(owner), own_name, None), "fset", parameter) is None:
                    raise ValueError(
                        f"{name!r} is read through a property of {type(owner).__name__} without a setter, so it "
                        "cannot be replaced; keep it dense with `exclude=`."
                    )
                first = first_name[id(parameter)]
                found[first] = CompressedWeight(first, tuple(parameter.shape), fan_in)
        if not found:
            raise ValueError(
                f"{type(module).__name__} has no trainable weight of an affine layer to compress; unfreeze some."
            )
        return tuple(found.values())


def _fan_in(owner: nn.Module, weight: nn.Parameter) -> int:
    if isinstance(owner, nn.Embedding):
        return 2
    if qualified_name(owner) in BY_NAME:  # stored transposed
        return weight.shape[0]
    if isinstance(owner, _ConvNd) and owner.transposed:
        # An input reaches k outputs, s apart: an output has k / s inputs of each channel, on average.
        taps = math.prod(max(1.0, k / s) for k, s in zip(owner.kernel_size, owner.stride, strict=True))
        return math.ceil(weight.shape[0] / owner.groups * taps)
    return math.prod(weight.shape[1:])


@dataclass(frozen=True)
class Compressions(Sequence[float]):
    """The compressions that differ in their number of probabilities n, from the fewest to one for each of m weights.

    Example:
        >>> list(Compressions(num_weights=6, fewest=4))
        [1.5, 1.2, 1.0]
    """

    num_weights: int
    fewest: int

    def __len__(self) -> int:
        return max(0, self.num_weights - self.fewest + 1)

    def __getitem__(self, index: Any) -> Any:
        """The smallest factor for which m / factor, rounded up, is n."""
        num_probs = range(self.fewest, self.num_weights + 1)[index]
        factor = self.num_weights / num_probs
        while math.ceil(self.num_weights / factor) > num_probs:  # rounded down
            factor = math.nextafter(factor, math.inf)
        return factor


NAME = "_zampling"  # of this module within the one whose weights it computes


class SampledWeights(nn.Module):
    """Replaces some parameters of a module by values that it computes from scores.

    The parameters are removed from the module, of which this one becomes ``_zampling``. Plain tensors of the same names
    take their place, so that layers compute with them as before and gradients reach the scores, the one parameter,
    shape ``(n,)``. `draw` replaces them by a new sample.
    """

    scores: nn.Parameter

    def __init__(
        self,
        module: nn.Module,
        weights: Sequence[CompressedWeight],
        matrix: InfluenceMatrix,
        link: Link,
        sampled: bool = True,
    ) -> None:
        super().__init__()
        if hasattr(module, NAME):
            raise ValueError(f"{type(module).__name__} already has an attribute {NAME!r}: it was compressed before.")
        first = module.get_parameter(weights[0].name)
        self.shapes = tuple(weight.shape for weight in weights)
        self.matrix, self.link, self.sampled = matrix, link, sampled
        index_of = {id(module.get_parameter(weight.name)): i for i, weight in enumerate(weights)}
        self._sites = tuple(  # wherever the parameters are used: owner, name, and which of the weights it is
            (owner, name, index_of[id(parameter)])
            for owner in module.modules()
            for name, parameter in owner._parameters.items()
            if id(parameter) in index_of
        )
        for owner, name, _ in self._sites:
            value = owner._parameters.pop(name)
            assert value is not None
            setattr(owner, name, value.detach().new_zeros(()).expand(value.shape))  # until the first draw
        self.dtype = first.dtype  # of the weights; scores have at least 32 bits, so that bits are drawn without bias
        self.scores = nn.Parameter(
            torch.zeros(matrix.num_columns, dtype=torch.promote_types(first.dtype, torch.float32), device=first.device)
        )
        module.add_module(NAME, self)

    @property
    def probs(self) -> Tensor:
        """Probabilities of the scores, detached, shape ``(n,)``."""
        return self.link.probs(self.scores.detach())

    @torch.no_grad()
    def set_probs(self, probs: Tensor) -> None:
        self.scores.copy_(self.link.scores(probs.to(self.scores)))

    def forward(self, inputs: Any) -> Any:
        """Return the inputs: modules that call all of their children, such as `nn.Sequential`, also call this one."""
        return inputs

    def draw(self, generator: torch.Generator | None = None) -> None:
        """Give the module the weights of a new sample, drawn on the CPU, through which gradients reach the scores."""
        z = draw_bits(self.probs, generator) if self.sampled else self.probs
        self.put(self.combine(z))

    def combine(self, z: Tensor) -> tuple[Tensor, ...]:
        """Weights Qz, through which gradients reach the scores."""
        weights: tuple[Tensor, ...] = _Expand.apply(self.scores, z.to(self.scores.dtype), self)  # type: ignore[no-untyped-call]
        return weights

    def rest(self) -> None:
        """Detach the last sample, which frees the graph that leads from it to the scores."""
        for owner, name, _ in self._sites:
            setattr(owner, name, getattr(owner, name).detach())

    def put(self, weights: Sequence[Tensor]) -> None:
        for owner, name, i in self._sites:
            setattr(owner, name, weights[i])

    def split(self, flat: Tensor) -> tuple[Tensor, ...]:
        """Split all entries of the weights, shape ``(m,)``, into one tensor for each weight, of the weights' type."""
        return split_weights(flat.to(self.dtype), self.shapes)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> SampledWeights:
        self.dtype = fn(torch.zeros(0, dtype=self.dtype, device=self.scores.device)).dtype
        super()._apply(keeping_type(fn, at_least=torch.float32), recurse)  # type: ignore[no-untyped-call]
        return self


def split_weights(flat: Tensor, shapes: Sequence[tuple[int, ...]]) -> tuple[Tensor, ...]:
    """Cut one long vector into tensors of the given shapes, which share its memory."""
    ends = accumulate((torch.Size(shape).numel() for shape in shapes), initial=0)
    return tuple(flat[a:b].view(shape) for (a, b), shape in zip(pairwise(ends), shapes, strict=True))


class _Expand(torch.autograd.Function):
    """Forward w = Qz, and backward Q^T grad_w, from bits to scores as the link defines."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, z: Tensor, weights: SampledWeights) -> tuple[Tensor, ...]:
        ctx.weights = weights
        ctx.save_for_backward(scores)
        with torch.autocast(scores.device.type, enabled=False):
            return weights.split(weights.matrix.expand(z))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (scores,) = ctx.saved_tensors
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients]).to(scores.dtype)
        with torch.autocast(scores.device.type, enabled=False):
            of_bits = ctx.weights.matrix.pull_back(flat)
        return ctx.weights.link.gradient(scores, of_bits), None, None
