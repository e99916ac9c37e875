"""What a federation needs: of whatever runs it, a Trainer or a test, and of what a user has chosen."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_spectral.algorithms import Algorithm
from lightning_spectral.client.local_hooks import LocalHook
from lightning_spectral.client.local_task import LocalTrainer
from lightning_spectral.participation import Population, Sampler, UniformParticipation
from lightning_spectral.plugin.callbacks.round_callback import RoundCallback
from lightning_spectral.plugin.host import Trained
from lightning_spectral.protocol.records import RoundSummary, WorkUnit
from lightning_spectral.protocol.stage_clock import Profile
from lightning_spectral.server.client_directory import ClientDirectory
from lightning_spectral.server.executor import Executor
from lightning_spectral.server.optimizers import FedOptimizer
from lightning_spectral.server.processes import Processes
from lightning_spectral.server.run import Figure, Run
from lightning_spectral.server.update_norms import MaxUpdateNorm
from lightning_spectral.simulation import Conditions

ServerOptimizer = FedOptimizer | Callable[[Iterable[nn.Parameter]], Optimizer]


class Runtime(Protocol):
    """Whatever runs a federation's rounds."""

    @property
    def trainer(self) -> Any:
        """The Trainer, for callbacks."""

    @property
    def round_idx(self) -> int:
        """The current round, from 0."""

    @property
    def processes(self) -> Processes:
        """The processes that train the clients of a round."""

    @property
    def averages_are_set(self) -> bool:
        """Whether something else than clients sets the running averages of normalisation layers."""

    @property
    def profile(self) -> Profile:
        """Maps the name of a stage of a round to a context manager that records the block."""

    def round_callbacks(self) -> list[RoundCallback]:
        """The callbacks of rounds, in the order in which they act."""

    def until_told(self, units: Iterable[WorkUnit]) -> Iterator[WorkUnit]:
        """Yield the units whose turns may begin: none once the process was told to end."""

    def step(self, servers: Sequence[Optimizer]) -> None:
        """Step server optimizers, all of whose gradients exist."""

    def log(self, summaries: Sequence[RoundSummary]) -> None:
        """Log a finished round of all models."""


class Plan(Protocol):
    """What a user has chosen for a federation as a whole: who takes part, and who could."""

    seed: int
    participation: UniformParticipation | Sampler | None

    def population(self) -> Population:
        """Which client can train which model."""

    def data_of(self, name: str) -> Any:
        """The `ServerData` of one model's clients."""

    def clients_of(self, name: str, algorithm: Algorithm) -> ClientDirectory:
        """What is known of one model's clients, with the capacities that an algorithm gives them."""


class Owner(Trained, Protocol):
    """What a user has chosen for one model, and the executor of its clients."""

    local_epochs: int
    local_hooks: tuple[LocalHook, ...]
    server_optimizer: ServerOptimizer | None
    update_bound: MaxUpdateNorm | None
    conditions: Conditions

    @property
    def device(self) -> torch.device:
        """Device of the module."""

    def make_executor(self, run: Run) -> Executor:
        """Create the executor that runs the device half of a run's rounds."""

    def make_local_executor(self, run: Run, local_trainer: LocalTrainer = ...) -> Executor:
        """Create an executor that trains clients one after another, in this process."""

    def zero_grad(self) -> None:
        """Drop the gradients of the server's parameters."""


def is_absolute(participation: UniformParticipation | Sampler | None) -> bool:
    """Whether coefficients of units are used as they are, which holds for those of an unbiased sampler."""
    return isinstance(participation, Sampler) and not participation.normalize


def figure_of(participation: UniformParticipation | Sampler | None) -> Figure:
    """The figure on which a sampler is based."""
    return participation.figure if isinstance(participation, Sampler) else ""
