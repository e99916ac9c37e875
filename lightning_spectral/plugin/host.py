"""How callbacks and data modules recognise a federation, and what they see as its batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from lightning_spectral.protocol.records import WorkUnit

WHERE = (
    "A round is one batch for the Trainer: the clients that train in it, `batch.units`, without examples and outputs. "
    "Hooks of your own LightningModule get each client's batches and outputs; a RoundCallback follows rounds and "
    "clients, and `trainer.callback_metrics['fl/loss']` has a round's loss once it has ended."
)


class Share:
    """The units whose turns one process takes in a round, which Lightning sees as a batch.

    This is a plain class, because Lightning looks for tensors in batches that are tuples or dataclasses, and rebuilds
    them.

    Args:
        round_idx: Communication round, from 0.
        everywhere: The units of each process, by rank, in the order of their turns.
        rank: Rank of this process.

    Attributes:
        units: The units of this process.
    """

    def __init__(self, round_idx: int, everywhere: Sequence[Sequence[WorkUnit]], rank: int = 0) -> None:
        self.round_idx = round_idx
        self.everywhere = tuple(map(tuple, everywhere))
        self.units = self.everywhere[rank]

    def __getitem__(self, key: Any) -> Any:
        """Say what this is to a callback that unpacks or indexes its batches."""
        raise TypeError(f"There is no `batch[{key!r}]`. {WHERE}")

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"There is no `batch.{name}`. {WHERE}")


class NoOutputs(dict[str, Any]):
    """The outputs of a round: none, which a callback that reads some is told."""

    def __missing__(self, key: str) -> Any:
        raise KeyError(f"There is no `outputs[{key!r}]`. {WHERE}")

    def copy(self) -> NoOutputs:
        """Lightning passes on a copy of what a step returns."""
        return self


class Host:
    """Marks the module that a Trainer fits, and which trains one model or several: `FederatedHooks`."""


def as_host(module: nn.Module | None, claim: str, otherwise: str = "") -> Any:
    """A `Host` as it is; raise ``TypeError`` for another module, with what needs one and another way out."""
    if isinstance(module, Host):
        return module
    raise TypeError(
        f"{claim}, but {type(module).__name__} trains on batches; wrap it: "
        f"FederatedModule(module, clients_per_round=...){otherwise}."
    )
