"""What the server of Zampling holds: probabilities between rounds, running means within one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from lightning_spectral.protocol.bit_sum import MeanBits
from lightning_spectral.protocol.cohort import Cohort
from lightning_spectral.protocol.statistics import MeanChange

GRID = 2.0**24  # probabilities are multiples of 1 / GRID, so that float32 adds and subtracts them exactly


class ZamplingState(nn.Module):
    """What the server of Zampling holds between rounds.

    Attributes:
        probs: Probabilities p, shape ``(n,)``, float32.
        seed: The seed from which Q is drawn.
    """

    def __init__(self, probs: Tensor, seed: int) -> None:
        super().__init__()
        self.probs = nn.Parameter(on_grid(probs))
        self.seed = seed

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> ZamplingState:
        """Move to another device, but stay in float32, whatever the Trainer's precision: the grid needs it."""
        device = fn(self.probs.detach()).device
        self.probs.data = self.probs.detach().to(device)
        return self


@dataclass(frozen=True, eq=False)
class ZamplingRound:
    """One open round of Zampling.

    Attributes:
        cohort: The clients that take part.
        tensors: What every client is sent: probabilities and dense tensors, by name.
        probs: The probabilities as they arrive at clients, after rounding, shape ``(n,)``.
        bits: Running mean of the clients' bits.
        dense: Running mean of the changes of dense tensors.
    """

    cohort: Cohort
    tensors: Mapping[str, Tensor]
    probs: Tensor
    bits: MeanBits
    dense: MeanChange


def own_state(state: nn.Module | None) -> ZamplingState:
    """The state of an algorithm, as that of Zampling."""
    assert isinstance(state, ZamplingState)
    return state


def on_grid(probs: Tensor) -> Tensor:
    """The nearest probabilities on the grid, in float32."""
    return ((probs.double().clamp(0.0, 1.0) * GRID).round() / GRID).float()
