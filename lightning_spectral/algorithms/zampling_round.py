"""What the server of Zampling holds: probabilities between rounds, running means within one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from lightning_spectral.nn.own_types import keeping_type
from lightning_spectral.nn.zampling.compressed import CompressedWeight
from lightning_spectral.protocol.cohort import Cohort
from lightning_spectral.sums import MeanBits, MeanChange

GRID = 2.0**24  # probabilities are multiples of 1 / GRID, so that float32 adds and subtracts them exactly


class ZamplingState(nn.Module):
    """What the server of Zampling holds between rounds.

    Attributes:
        probs: Probabilities p, shape ``(n,)``, float32.
        seed: The seed from which Q is drawn.
        weights: The weights that are compressed.
    """

    def __init__(self, probs: Tensor, seed: int, weights: Sequence[CompressedWeight]) -> None:
        super().__init__()
        self.weights = tuple(weights)
        self.probs = nn.Parameter(on_grid(probs))
        self.seed = seed

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> ZamplingState:
        """Move to another device, but stay in float32, whatever the Trainer's precision: the grid needs it."""
        super()._apply(keeping_type(fn), recurse)  # type: ignore[no-untyped-call]
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


def check_weights(state: ZamplingState, weights: Sequence[CompressedWeight]) -> None:
    """Raise ``ValueError`` unless the probabilities were drawn for the weights that are compressed now."""
    if changed := sorted({weight.name for weight in set(state.weights) ^ set(weights)}):
        raise ValueError(
            f"Zampling's probabilities were drawn when the module was wrapped, and {', '.join(changed)} changed since: "
            "parameters were frozen, unfrozen, added or removed. Do that first, build layers in `__init__` rather than "
            "in `setup`, and wrap the module anew in a FederatedModule, which draws new probabilities."
        )


def own_state(state: nn.Module | None) -> ZamplingState:
    """The state of an algorithm, as that of Zampling."""
    assert isinstance(state, ZamplingState)
    return state


def on_grid(probs: Tensor) -> Tensor:
    """The nearest probabilities on the grid, in float32."""
    return ((probs.double().clamp(0.0, 1.0) * GRID).round() / GRID).float()
