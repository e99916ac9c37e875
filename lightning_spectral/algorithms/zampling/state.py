"""What the server of Zampling holds between rounds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from lightning_spectral.functional.zampling import InfluenceMatrix, draw_bits
from lightning_spectral.nn.own_types import keeping_type
from lightning_spectral.nn.zampling.compressed import CompressedWeight
from lightning_spectral.nn.zampling.sampled_weights import split_weights

GRID = 2.0**24  # probabilities are multiples of 1 / GRID, so that float32 adds and subtracts them exactly


class ZamplingState(nn.Module):
    """The probabilities, and the weights that follow from them.

    Attributes:
        probs: Probabilities p, shape ``(n,)``, float32.
        weights: The weights that are compressed.
        matrix: Q, whose rows follow from the run's seed.
    """

    def __init__(self, probs: Tensor, weights: Sequence[CompressedWeight], matrix: InfluenceMatrix) -> None:
        super().__init__()
        self.probs = nn.Parameter(on_grid(probs))
        self.weights = tuple(weights)
        self.matrix = matrix

    @torch.no_grad()
    def network(self, generator: torch.Generator | None = None) -> dict[str, Tensor]:
        """The compressed weights Qz for bits z that ``generator`` draws, by name; without one Qp, the expected ones."""
        probs = self.probs.detach()
        z = probs if generator is None else draw_bits(probs, generator).to(probs.dtype)
        parts = split_weights(self.matrix.expand(z), [weight.shape for weight in self.weights])
        return {weight.name: values for weight, values in zip(self.weights, parts, strict=True)}

    @torch.no_grad()
    def settle(self) -> None:
        """Bring probabilities back into [0, 1] and onto the grid, which a server optimizer may have left."""
        self.probs.copy_(on_grid(self.probs))

    def histograms(self) -> Mapping[str, Tensor]:
        return {"probs": self.probs}

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> ZamplingState:
        """Move to another device, but stay in float32, whatever the Trainer's precision: the grid needs it."""
        super()._apply(keeping_type(fn), recurse)  # type: ignore[no-untyped-call]
        return self


def on_grid(probs: Tensor) -> Tensor:
    """The nearest probabilities on the grid, in float32."""
    return ((probs.double().clamp(0.0, 1.0) * GRID).round() / GRID).float()
