"""FederatedModule: a user's LightningModule, trained federatedly by a Lightning Trainer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, cast

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers import WandbLogger
from lightning.pytorch.profilers import PassThroughProfiler
from lightning.pytorch.utilities import rank_zero_info
from torch import nn
from torch.optim import SGD, Optimizer

from lightning_spectral.algorithms import Algorithm, FedAvg
from lightning_spectral.client.local_hooks import LocalHook
from lightning_spectral.client.local_optimizer import check_optimizer, trainable_parameters
from lightning_spectral.errors import check_is
from lightning_spectral.participation import UniformParticipation
from lightning_spectral.plugin.build_engine import build_engine, sequential_executor
from lightning_spectral.plugin.callbacks import Aggregation, SubmodelSampling, SVDRefresh, WandbRounds
from lightning_spectral.plugin.checkpoint_files import write_whole_files
from lightning_spectral.plugin.checkpoints import check_checkpoint, described, fit_slots, settle_progress
from lightning_spectral.plugin.checks import (
    check_clipping,
    check_module,
    check_same_everywhere,
    check_settings,
    check_stage,
    check_trainer,
    warn_of_compiled_in_place,
)
from lightning_spectral.plugin.data import FederatedDataModule, check_no_client_is_empty
from lightning_spectral.plugin.host import Host
from lightning_spectral.plugin.round_counting import RoundsAsSteps
from lightning_spectral.plugin.round_hooks import RoundHooks
from lightning_spectral.plugin.schedules import RoundScheduler, read_optimizers
from lightning_spectral.plugin.stages import RoundStages
from lightning_spectral.plugin.user_hooks import BATCH_HOOKS, check_user_module, for_evaluation, is_overridden
from lightning_spectral.protocol.client_store import ClientStore
from lightning_spectral.server.broken_weights import suspecting_weights
from lightning_spectral.server.engine import Engine
from lightning_spectral.server.executor import Executor
from lightning_spectral.server.fault_policy import Faults
from lightning_spectral.server.first_rounds import FirstRounds
from lightning_spectral.server.run import Run
from lightning_spectral.server.turn import Turn
from lightning_spectral.simulation import ClientDropout, Conditions, VirtualClock

ServerOptimizer = Callable[[Iterable[nn.Parameter]], Optimizer]


class FederatedModule(RoundHooks, Host):
    """Trains your LightningModule on clients; one Trainer epoch is one communication round, one batch one client.

    Your ``training_step``, ``configure_optimizers``, ``self.log`` and metrics run on each client's sub-model; your
    ``validation_step`` and ``test_step`` run on the server's module, which is yours with dense weights.

    Args:
        module: Your LightningModule, unchanged. It holds the server's weights: train it and it is trained.
        algorithm: What clients hold: `FedAvg` (the default) or `SpectralSharding`.
        clients_per_round: Size of the cohort of each round, drawn uniformly.
        local_epochs: Passes over a client's own data in a round; 0 trains nothing.
        client_engine: What runs a client's local epochs: ``"loop"``, which is fast, or ``"trainer"``, a quiet Trainer,
            for several optimizers, manual optimisation and hooks that the loop refuses.
        server_optimizer: From the server's parameters to the optimizer that steps once per round on the
            pseudo-gradient, e.g. ``FedAdam(lr=0.01)``; ``None`` for SGD with learning rate 1, which is plain averaging.
        local_hooks: Hooks that act on the gradients of clients before each of their steps, one after another, e.g.
            ``[ProximalTerm(0.01), GradientClip(1.0)]``.
        seed: Seed of participation, keep ratios, terms, data order and dropout.
        faults: Which faults of clients end the run, and which a round tolerates; ``None`` for `Faults()`.
        dropout: Simulated dropout of clients; ``None`` for none.
        clock: Simulated duration of each client's turn: deadline, over-selection, length of a round; ``None`` for none.

    Raises:
        TypeError: If ``module`` is not a ``lightning.pytorch.LightningModule``.
        ValueError: If a count is out of range, or the module does something that federated training cannot honour.

    Note:
        Optimizer state is fresh for every client. The learning rate of a round is your scheduler's, read once per
        round. Floating-point buffers (BatchNorm's running statistics) are averaged over clients, others keep the
        server's value.

    Example:
        >>> class LitLine(pl.LightningModule):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.line = nn.Linear(3, 1)
        ...     def training_step(self, batch, batch_idx):
        ...         x, y = batch
        ...         return (self.line(x).squeeze(1) - y).square().mean()
        ...     def configure_optimizers(self):
        ...         return SGD(self.parameters(), lr=0.1)
        >>> FederatedModule(LitLine(), clients_per_round=2).algorithm
        FedAvg(keep_buffers=())
    """

    def __init__(
        self,
        module: pl.LightningModule,
        *,
        algorithm: Algorithm[Any] | None = None,
        clients_per_round: int,
        local_epochs: int = 1,
        client_engine: Literal["loop", "trainer"] = "loop",
        server_optimizer: ServerOptimizer | None = None,
        local_hooks: Sequence[LocalHook] = (),
        seed: int = 0,
        faults: Faults | None = None,
        dropout: ClientDropout | None = None,
        clock: VirtualClock | None = None,
    ) -> None:
        super().__init__()
        check_module(module)
        check_settings(local_epochs, clients_per_round, client_engine, server_optimizer, local_hooks)
        check_user_module(module, client_engine)
        warn_of_compiled_in_place(module)
        self.automatic_optimization = False
        self.module = module
        self.algorithm: Algorithm[Any] = FedAvg() if algorithm is None else algorithm
        check_is("algorithm", self.algorithm, Algorithm)
        self.algorithm.check(module)
        self.participation = UniformParticipation(clients_per_round)
        self.local_epochs = local_epochs
        self.client_engine = client_engine
        self.server_optimizer = server_optimizer
        self.local_hooks = tuple(local_hooks)
        self._cohort_size = clients_per_round
        self.seed = seed
        self.faults = Faults() if faults is None else faults
        check_is("faults", self.faults, Faults)
        self.conditions = Conditions(dropout, clock)
        self.schedulers: list[RoundScheduler] = []
        self.state = self.algorithm.start(module, seed)
        self._store = ClientStore()
        self._engine: Engine | None = None
        self._first_rounds = FirstRounds()
        self._turn: Turn | None = None
        self._default_dtype = torch.get_default_dtype()
        self._finished_round = -1
        self._stop_after_round = False
        self._resumed = False
        self.save_hyperparameters({"federation": self.configuration(), "user_module": dict(module.hparams)})

    def configuration(self) -> dict[str, str | int]:
        """What must be the same for a checkpoint to be resumed."""
        return {
            "algorithm": repr(self.algorithm),
            "participation": repr(self.participation),
            "local_epochs": self.local_epochs,
            "server_optimizer": described(self.server_optimizer),
            "local_hooks": repr(list(self.local_hooks)),
            "seed": self.seed,
            "conditions": repr(self.conditions),
        }

    def templates(self) -> list[Optimizer]:
        """The user's own optimizers: they never step, and clients' optimizers are modelled on them."""
        _, *templates = cast(list[Optimizer], self.optimizers(use_pl_optimizer=False))
        return templates

    def make_executor(self, run: Run) -> Executor:
        """Create what runs the device half of the rounds: by default clients train one after another, in this process.

        Override it to run them elsewhere, with an `Executor` that takes downloads and returns uploads.
        """
        return sequential_executor(self, run)

    def build_engine(self, server: pl.LightningModule, algorithm: Algorithm[Any]) -> Engine:
        """Build another engine with the clients, the seed and the settings of the run; all clients report back."""
        return build_engine(self, server, algorithm)

    def configure_callbacks(self) -> list[pl.Callback]:
        """The user's callbacks, then the round's boundaries, unless the Trainer already has one of the kind."""
        check_clipping(self.trainer)  # here, because Lightning refuses it in other words before `setup`
        own = self.module.configure_callbacks()
        boundaries = [*self._watchers(), RoundsAsSteps(), SVDRefresh(), SubmodelSampling(), Aggregation()]
        present = tuple(type(b) for b in boundaries if any(isinstance(c, type(b)) for c in self._trainer_callbacks()))
        missing = [boundary for boundary in boundaries if not isinstance(boundary, present)]
        return [*(own if isinstance(own, Iterable) else [own]), *missing]

    def _watchers(self) -> list[pl.Callback]:
        """Callbacks for this Trainer's profiler and loggers: only those that have work, since Lightning calls all."""
        profiled = not isinstance(self.trainer.profiler, PassThroughProfiler)  # type: ignore[attr-defined]
        at_wandb = any(isinstance(logger, WandbLogger) for logger in self.trainer.loggers)
        return [*([RoundStages()] if profiled else []), *([WandbRounds()] if at_wandb else [])]

    def _trainer_callbacks(self) -> list[pl.Callback]:
        return list(self.trainer.callbacks)  # type: ignore[attr-defined]

    def prepare_data(self) -> None:
        """Call the user's hook."""
        self.module.prepare_data()

    def setup(self, stage: str) -> None:
        """Call the user's hook; for a fit, check everything that can be checked before training."""
        self.module.setup(stage)
        check_stage(stage, self.module)
        if stage == "fit":
            self._finished_round, self._stop_after_round, self._resumed = -1, False, False
            check_trainer(self.trainer, self.module)
            self.participation.check(self.data.num_clients)
            self.conditions.check(self.data.num_clients, self.participation.clients_per_round)
            if self.faults.ends_run("no_data"):
                check_no_client_is_empty(self.data.partition)
            write_whole_files(self.trainer)
        for hook in BATCH_HOOKS:
            if is_overridden(self.module, hook):
                setattr(self, hook, for_evaluation(getattr(self.module, hook)))

    def teardown(self, stage: str) -> None:
        """Drop the engine, and call the user's hook."""
        self._engine = self._turn = None
        self.module.teardown(stage)

    def configure_optimizers(self) -> Any:
        """Return the server optimizer, and the user's own, which clients' optimizers and learning rates follow."""
        several = self.client_engine == "trainer" and not self.module.automatic_optimization
        configured = self.module.configure_optimizers()
        templates, self.schedulers = read_optimizers(configured, type(self.module).__name__, several=several)
        for template in templates:
            check_optimizer(template)
            self.algorithm.check_optimizer(template, self.module)
        parameters = trainable_parameters(templates)
        if not parameters:
            raise ValueError(
                f"{type(self.module).__name__} has no trainable parameter in its optimizer; unfreeze some."
            )
        if self.state is not None:
            parameters += [p for p in self.state.parameters() if p.requires_grad]
        server = SGD(parameters, lr=1.0) if self.server_optimizer is None else self.server_optimizer(parameters)
        return [server, *templates], [{"scheduler": s.scheduler, "name": s.name} for s in self.schedulers]

    def on_fit_start(self) -> None:
        """Call the user's hook, let the algorithm set the initial weights of a new run, and build the engine."""
        self._default_dtype = torch.get_default_dtype()
        check_same_everywhere(self.processes, self._full_configuration())
        self.module.on_fit_start()
        algorithm = self.algorithm.prepare(self.module)
        if not self._resumed:
            self._initialize(algorithm)
        self._first_rounds = FirstRounds(speaks=self.processes.rank == 0)
        self.zero_grad()  # of training before this fit: the server has pseudo-gradients only
        self._store.to(self.device)
        self._engine = build_engine(self, self.module, algorithm, self.state, self.conditions, self._store)

    def _initialize(self, algorithm: Algorithm[Any]) -> None:
        with suspecting_weights(self.module, 0):
            done = algorithm.initialize(self.module, self.processes)
        algorithm.settle(self.module, self.state)
        if done:
            rank_zero_info(done)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Call the user's hook, save the configuration, and make the progress count whole rounds.

        Raises:
            RoundError: If the server's step was interrupted: its weights are then those of no round.
        """
        if self._engine is not None:
            self._engine.check_server_rests()
        self.module.on_save_checkpoint(checkpoint)
        checkpoint["federation"] = self._full_configuration()
        checkpoint["federation_slots"] = self.num_slots
        if clients := self._store.state_dict():
            checkpoint["federation_clients"] = clients
        if self._engine is not None:
            settle_progress(checkpoint, round_is_open=self._engine.round_is_open)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Check that the configuration is unchanged, restore clients' state, and call the user's hook.

        Raises:
            ValueError: If a fit is resumed from a checkpoint of another configuration.
        """
        if self._trainer is not None and self.trainer.state.fn == "fit":
            check_checkpoint(checkpoint, self._full_configuration())
            fit_slots(checkpoint, self.num_slots)
            self._resumed = True
            self._store.load_state_dict(checkpoint.get("federation_clients", {}))
        self.module.on_load_checkpoint(checkpoint)

    def _full_configuration(self) -> dict[str, str | int]:
        data = self.trainer.datamodule  # type: ignore[attr-defined]
        if not isinstance(data, FederatedDataModule):  # evaluating with a loader of one's own
            return self.configuration()
        return {**self.configuration(), "batch_size": data.batch_size, "partition": data.partition.fingerprint()}
