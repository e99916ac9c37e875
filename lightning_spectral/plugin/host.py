"""The interfaces of a federation and of its models for the rest of this package, and a federation's batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeGuard

import lightning.pytorch as pl
from torch import nn
from torch.optim import Optimizer

from lightning_spectral.algorithms import Algorithm
from lightning_spectral.protocol.work_unit import WorkUnit
from lightning_spectral.server.engine import Engine


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


class Host(Protocol):
    """The interface of the fitted module, which trains one model or several, for boundaries and data modules."""

    @property
    def current_epoch(self) -> int:
        """The round, from 0."""

    def share(self, round_idx: int) -> Share:
        """The clients that this process trains in a round."""

    def cut_cohort(self, limit: int | float) -> None:
        """Limit each cohort to a number of clients, or to a share of it."""

    def start_round(self, round_idx: int) -> None:
        """Open a round for its cohort."""

    def finish_round(self) -> None:
        """Close the round and step the server."""

    def abandon_round(self) -> None:
        """End a round that failed."""


class Trained(Protocol):
    """The interface of one model of a federation for callbacks, which are called once for each of them."""

    module: pl.LightningModule
    algorithm: Algorithm
    state: nn.Module | None
    seed: int

    @property
    def name(self) -> str:
        """The model's name; empty if there is only one."""

    @property
    def engine(self) -> Engine:
        """The engine that runs its rounds."""

    def build_engine(self, server: pl.LightningModule, algorithm: Algorithm) -> Engine:
        """Build another engine with the clients, the seed and the settings of the run."""

    def templates(self) -> list[Optimizer]:
        """The user's own optimizers, which never step: clients' optimizers are modelled on them."""

    def log(self, name: str, value: Any, *args: Any, **options: Any) -> None:
        """Log one value, as any LightningModule does."""

    def log_dict(self, dictionary: Mapping[str, Any], *args: Any, **options: Any) -> None:
        """Log several values."""


@dataclass
class Seat:
    """The place of a model in its federation.

    This is not a module, so that a model can refer to the federation that it is part of.

    Attributes:
        name: The model's name in metrics; empty if it is trained alone.
        federation: The module that Lightning fits, if it trains several models; ``None`` for the model itself.
        key: Name of the model in work units; empty if it is the only one.
        first_optimizer: Position of its server optimizer among the Trainer's.
        num_optimizers: Number of its optimizers: the server's and the templates.
        suffix: What Lightning would append to logged names, to say which of the model's several evaluation sets it is.
    """

    name: str = ""
    federation: Any = None
    key: str = ""
    first_optimizer: int = 0
    num_optimizers: int = 0
    suffix: str = ""


def is_host(module: nn.Module | None) -> TypeGuard[Host]:
    """Whether a module declares itself a `Host`, by its bases rather than by the names of its methods."""
    return Host in type(module).__mro__


def is_trained(module: nn.Module | None) -> TypeGuard[Trained]:
    """Whether a module declares itself `Trained`, which means one model, not several."""
    return Trained in type(module).__mro__
