"""What callbacks and data modules see of a federation and of its models, and a federation's batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeGuard

import lightning.pytorch as pl
import torch
from torch import nn
from torch.optim import Optimizer

from lightning_spectral.algorithms import Algorithm
from lightning_spectral.client.local_hooks import LocalHook
from lightning_spectral.client.local_loop import LocalTrainer
from lightning_spectral.participation import Population, Sampler, UniformParticipation
from lightning_spectral.protocol.records import WorkUnit
from lightning_spectral.server.cohorts import ClientDirectory
from lightning_spectral.server.executor import Executor
from lightning_spectral.server.fault_policy import Faults, MaxUpdateNorm
from lightning_spectral.server.optimizers import FedOptimizer
from lightning_spectral.server.round import Engine
from lightning_spectral.simulation import Conditions

ServerOptimizer = FedOptimizer | Callable[[Iterable[nn.Parameter]], Optimizer]


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


class Trained(Protocol):
    """One model of a federation: callbacks are called once for each of them."""

    module: pl.LightningModule
    algorithm: Algorithm
    state: nn.Module | None
    seed: int
    faults: Faults
    local_epochs: int
    local_hooks: tuple[LocalHook, ...]
    server_optimizer: ServerOptimizer | None
    update_bound: MaxUpdateNorm | None
    conditions: Conditions

    @property
    def name(self) -> str:
        """The model's name; empty if it is trained alone."""

    @property
    def data(self) -> Any:
        """The `ServerData` of its clients."""

    @property
    def engine(self) -> Engine:
        """The engine that runs its rounds."""

    def build_engine(self, server: pl.LightningModule, algorithm: Algorithm) -> Engine:
        """Build another engine with the clients, the seed and the settings of the run; all clients report back."""

    @property
    def device(self) -> torch.device: ...

    def make_executor(self, engine: Engine) -> Executor: ...

    def make_local_executor(self, engine: Engine, local_trainer: LocalTrainer = ...) -> Executor: ...

    def zero_grad(self) -> None: ...

    def templates(self) -> list[Optimizer]:
        """The user's own optimizers, which step the parameters of clients while these train."""

    def log(self, name: str, value: Any, *args: Any, **options: Any) -> None: ...

    def log_dict(self, dictionary: Mapping[str, Any], *args: Any, **options: Any) -> None: ...


class Host(Protocol):
    """The module that a Trainer fits, which trains one model or several."""

    seed: int
    participation: UniformParticipation | Sampler | None

    @property
    def current_epoch(self) -> int:
        """The round, from 0."""

    @property
    def members(self) -> Mapping[str, Trained]:
        """The models by name."""

    def population(self) -> Population:
        """Which client can train which model."""

    def data_of(self, name: str) -> Any:
        """The `ServerData` of one model's clients."""

    def clients_of(self, name: str, algorithm: Algorithm) -> ClientDirectory:
        """What is known of one model's clients, with the capacities that an algorithm gives them."""

    def share(self, round_idx: int) -> Share:
        """The clients that this process trains in a round, and those of the others."""

    def cut_cohort(self, limit: int | float) -> None:
        """Begin a fit: limit each cohort to a number or a share of clients, Lightning's ``limit_train_batches``."""

    def start_round(self, round_idx: int) -> None:
        """Open the round of every model that some client trains, and call the round callbacks."""

    def finish_round(self) -> None:
        """Close the round, step the server on its pseudo-gradients, step the schedules and log the round."""

    def abandon_round(self) -> None:
        """End a round that failed; it has changed nothing at the server and can be repeated."""


def is_host(module: nn.Module | None) -> TypeGuard[Host]:
    """Whether a module declares itself a `Host`, by its bases rather than by the names of its methods."""
    return Host in type(module).__mro__


def as_host(module: nn.Module | None, claim: str, otherwise: str = "") -> Host:
    """A module as a `Host`; raise ``TypeError``, with what needs one and another way out, if it is none."""
    if is_host(module):
        return module
    raise TypeError(
        f"{claim}, but {type(module).__name__} trains on batches; wrap it: "
        f"FederatedModule(module, clients_per_round=...){otherwise}."
    )


def is_trained(module: nn.Module | None) -> TypeGuard[Trained]:
    """Whether a module declares itself `Trained`, which means one model, not several."""
    return Trained in type(module).__mro__
