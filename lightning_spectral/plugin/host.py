"""What callbacks and data modules see of a federation and of its models, and a federation's batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeGuard

import lightning.pytorch as pl
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_spectral.algorithms import Algorithm
from lightning_spectral.protocol.records import WorkUnit
from lightning_spectral.server.fault_policy import Faults
from lightning_spectral.server.round import Engine

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


class Trained(Protocol):
    """One model of a federation, a `FederatedModule`: callbacks are called once for each of them."""

    name: str  # in metrics; empty if it is trained alone
    module: pl.LightningModule
    algorithm: Algorithm
    state: nn.Module | None
    seed: int
    faults: Faults

    @property
    def data(self) -> Any:
        """The `ServerData` of its clients."""

    @property
    def engine(self) -> Engine:
        """The engine that runs its rounds."""

    def own_model(self, client_id: int) -> Mapping[str, Tensor]:
        """The values of a client's own model that differ from the server's; none if it has no such model."""

    def build_engine(self, server: pl.LightningModule, algorithm: Algorithm) -> Engine:
        """Build another engine with the clients, the seed and the settings of the run; all clients report back."""

    def templates(self) -> list[Optimizer]:
        """The user's own optimizers, which step the parameters of clients while these train."""

    def log(self, name: str, value: Any, *args: Any, **options: Any) -> None: ...

    def log_dict(self, dictionary: Mapping[str, Any], *args: Any, **options: Any) -> None: ...


def is_host(module: object) -> bool:
    """Whether a module trains on clients, and not on batches."""
    return isinstance(module, Host)


def as_host(module: nn.Module | None, claim: str, otherwise: str = "") -> Any:
    """A `Host` as it is; raise ``TypeError`` for another module, with what needs one and another way out."""
    if is_host(module):
        return module
    raise TypeError(
        f"{claim}, but {type(module).__name__} trains on batches; wrap it: "
        f"FederatedModule(module, clients_per_round=...){otherwise}."
    )


def is_trained(module: nn.Module | None) -> TypeGuard[Trained]:
    """Whether a module declares itself `Trained`, which means one model, not several."""
    return Trained in type(module).__mro__
