"""Scores in place of weights: each step draws new weights Qz, and gradients go to the scores."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lightning_spectral.functional.zampling import InfluenceMatrix, Link, draw_bits
from lightning_spectral.nn.own_types import at_least_float32, keeping_float32
from lightning_spectral.nn.zampling.compressed import CompressedWeight

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
        self._sites = tuple(_take_out(module, [weight.name for weight in weights]))
        self.dtype = first.dtype  # of the weights; scores have at least 32 bits, so that bits are drawn without bias
        self.scores = nn.Parameter(
            torch.zeros(matrix.num_columns, dtype=at_least_float32(first.dtype), device=first.device)
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
        z = self.draw_bits(generator) if self.sampled else self.probs
        self.put(self.combine(z))

    def combine(self, z: Tensor) -> tuple[Tensor, ...]:
        """Weights Qz, through which gradients reach the scores."""
        weights: tuple[Tensor, ...] = _Expand.apply(self.scores, z.to(self.scores.dtype), self)  # type: ignore[no-untyped-call]
        return weights

    def draw_bits(self, generator: torch.Generator | None) -> Tensor:
        return draw_bits(self.probs, generator)

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
        super()._apply(keeping_float32(fn), recurse)  # type: ignore[no-untyped-call]
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


def _take_out(module: nn.Module, names: Sequence[str]) -> list[tuple[nn.Module, str, int]]:
    """Replace parameters, wherever they are used, by plain tensors; return the place of each."""
    index_of = {id(module.get_parameter(name)): i for i, name in enumerate(names)}
    sites = [
        (owner, name, index_of[id(parameter)])
        for owner in module.modules()
        for name, parameter in owner._parameters.items()
        if id(parameter) in index_of
    ]
    for owner, name, _ in sites:
        value = owner._parameters.pop(name)
        assert value is not None
        setattr(owner, name, value.detach().new_zeros(()).expand(value.shape))  # until the first draw
    return sites
