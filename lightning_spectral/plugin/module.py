"""FederatedModule: a user's LightningModule, trained federatedly by a Lightning Trainer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import is_dataclass, replace
from typing import Any, Literal, cast

import lightning.pytorch as pl
import torch
from torch import nn
from torch.optim import SGD, Optimizer

from lightning_spectral.algorithms import Algorithm, FedAvg
from lightning_spectral.client.local_hooks import LocalHook
from lightning_spectral.client.local_optimizer import check_optimizer, trainable_parameters
from lightning_spectral.errors import check_is
from lightning_spectral.participation import UniformParticipation
from lightning_spectral.plugin.build_engine import make_engine
from lightning_spectral.plugin.callbacks import Aggregation, RoundsAsSteps, SubmodelSampling, SVDRefresh, WandbRounds
from lightning_spectral.plugin.callbacks.round_callback import RoundCallback
from lightning_spectral.plugin.checkpoint_files import write_whole_files
from lightning_spectral.plugin.checkpoints import check_checkpoint, fit_turns, settle_progress
from lightning_spectral.plugin.checks import (
    check_clipping,
    check_module,
    check_same_everywhere,
    check_stage,
    check_trainer,
    warn_of_compiled_in_place,
)
from lightning_spectral.plugin.client_parallel import ClientParallelStrategy
from lightning_spectral.plugin.data import FederatedDataModule, check_no_client_is_empty
from lightning_spectral.plugin.precision import full_precision, scaled_by
from lightning_spectral.plugin.schedules import Schedule, read_optimizers
from lightning_spectral.plugin.server_hooks import ServerHooks
from lightning_spectral.plugin.stages import RoundStages, stage_profile
from lightning_spectral.plugin.user_hooks import BATCH_HOOKS, check_user_module, for_evaluation, is_overridden
from lightning_spectral.protocol.records import ClientTask, Download, IdleTask, RoundSummary
from lightning_spectral.protocol.rng import derived_generator
from lightning_spectral.protocol.weights import MOST_TERMS
from lightning_spectral.server.fault_policy import Faults
from lightning_spectral.server.metrics import round_metrics
from lightning_spectral.server.processes import Processes
from lightning_spectral.server.round import Engine
from lightning_spectral.server.scheduling import num_turns, predicted_work, turns
from lightning_spectral.simulation import ClientDropout, Conditions, VirtualClock

ServerOptimizer = Callable[[Iterable[nn.Parameter]], Optimizer]


class FederatedModule(ServerHooks):
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
        local_hooks: What acts on the gradients of clients before each of their steps, one after another, e.g.
            ``[ProximalTerm(0.01), GradientClip(1.0)]``.
        seed: Seed of participation, keep ratios, terms, data order and dropout.
        faults: What ends the run, and what a round goes on without; ``None`` for `Faults()`.
        dropout: Simulated clients that vanish; ``None`` for none.
        clock: Simulated duration of each client's turn: deadline, over-selection, length of a round; ``None`` for none.

    Raises:
        TypeError: If ``module`` is not a ``lightning.pytorch.LightningModule``.
        ValueError: If a count is out of range, or the module does what cannot be honoured.

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
        if client_engine not in ("loop", "trainer"):
            raise ValueError(f'`client_engine` must be "loop" or "trainer", got {client_engine!r}.')
        check_user_module(module, client_engine)
        warn_of_compiled_in_place(module)
        check_is("local_epochs", local_epochs, int)
        check_is("clients_per_round", clients_per_round, int)
        if local_epochs < 0:
            raise ValueError(f"`local_epochs` must be at least 0, got {local_epochs}.")
        if clients_per_round > MOST_TERMS:
            raise ValueError(f"`clients_per_round` must be at most {MOST_TERMS}, got {clients_per_round}.")
        if server_optimizer is not None and not callable(server_optimizer):
            raise TypeError(
                f"`server_optimizer` must be a function from parameters to an optimizer, got {server_optimizer!r}; "
                "leave it out for plain averaging, or write FedAvgM(lr=1.0, momentum=0.9), or "
                "lambda parameters: torch.optim.SGD(parameters, lr=1.0)."
            )
        check_is("local_hooks", local_hooks, Sequence)
        for hook in local_hooks:
            check_is("local_hooks", hook, LocalHook)
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
        self.schedules: list[Schedule] = []
        self._engine: Engine | None = None
        self._download: Download | None = None
        self._default_dtype = torch.get_default_dtype()
        self._finished_round = -1
        self._stop_after_round = False
        self.save_hyperparameters({"federation": self.configuration(), "user_module": dict(module.hparams)})

    def configuration(self) -> dict[str, str | int]:
        """What must be the same for a checkpoint to be resumed."""
        return {
            "algorithm": repr(self.algorithm),
            "participation": repr(self.participation),
            "local_epochs": self.local_epochs,
            "server_optimizer": _described(self.server_optimizer),
            "local_hooks": repr(list(self.local_hooks)),
            "seed": self.seed,
            "conditions": repr(self.conditions),
        }

    @property
    def data(self) -> FederatedDataModule:
        """The data module of the run."""
        datamodule = self.trainer.datamodule  # type: ignore[attr-defined]
        check_is("datamodule", datamodule, FederatedDataModule)
        return cast(FederatedDataModule, datamodule)

    @property
    def engine(self) -> Engine:
        """What runs the rounds; exists while fitting."""
        assert self._engine is not None, "the engine exists from `on_fit_start` on"
        return self._engine

    @property
    def download(self) -> Download:
        """What the client whose turn it is was sent."""
        assert self._download is not None, "SubmodelSampling sends before a client trains"
        return self._download

    @download.setter
    def download(self, download: Download) -> None:
        self._download = download

    @property
    def processes(self) -> Processes:
        """Who trains the clients of a round: several processes with ``strategy="client_parallel"``."""
        strategy = self.trainer.strategy
        return strategy.processes if isinstance(strategy, ClientParallelStrategy) else Processes()

    def cut_cohort(self, limit: int | float) -> None:
        """Let only so many clients of each cohort train, or such a share of it: Lightning's ``limit_train_batches``."""
        size = self.participation.clients_per_round
        self._cohort_size = min(size, limit) if isinstance(limit, int) else int(size * limit)
        if limit and not self._cohort_size:
            raise ValueError(f"limit_train_batches={limit} of {size} clients trains none; raise it.")

    def cohort(self, round_idx: int) -> list[int]:
        """Clients of a round: a pure function of the seed and the round."""
        with stage_profile(self.trainer, "plan"):
            generator = derived_generator(self.seed, "participation", round_idx)
            ids: list[int] = self.participation.cohort(self.data.num_clients, generator).tolist()
        return ids[: self._cohort_size]

    @property
    def num_turns(self) -> int:
        """Turns of every process in a round: one for each client in a single process, with idle ones in several."""
        return num_turns(self._cohort_size, self.processes.size)

    def turns(self, round_idx: int) -> list[int | None]:
        """Clients that this process trains in a round, in order; ``None`` for a turn in which it idles."""
        client_ids = self.cohort(round_idx)
        sizes = self.data.partition.sizes_of(client_ids)
        ratios = self.engine.keep_ratios[client_ids].tolist()
        work = [predicted_work(size, ratio) for size, ratio in zip(sizes, ratios, strict=True)]
        return turns(client_ids, work, self.processes.size)[self.processes.rank]

    def configure_callbacks(self) -> list[pl.Callback]:
        """The user's callbacks, then the round's boundaries, unless the Trainer already has one of the kind."""
        check_clipping(self.trainer)  # here, because Lightning refuses it in other words before `setup`
        own = self.module.configure_callbacks()
        boundaries = [RoundStages(), RoundsAsSteps(), SVDRefresh(), SubmodelSampling(), Aggregation(), WandbRounds()]
        present = tuple(type(b) for b in boundaries if any(isinstance(c, type(b)) for c in self._trainer_callbacks()))
        missing = [boundary for boundary in boundaries if not isinstance(boundary, present)]
        return [*(own if isinstance(own, Iterable) else [own]), *missing]

    def _trainer_callbacks(self) -> list[pl.Callback]:
        return list(self.trainer.callbacks)  # type: ignore[attr-defined]

    def prepare_data(self) -> None:
        """The user's hook."""
        self.module.prepare_data()

    def setup(self, stage: str) -> None:
        """The user's hook; for a fit, everything that can be refused is refused here."""
        self.module.setup(stage)
        check_stage(stage, self.module)
        if stage == "fit":
            self._finished_round, self._stop_after_round = -1, False
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
        """The user's hook."""
        self._engine = self._download = None
        self.module.teardown(stage)

    def configure_optimizers(self) -> Any:
        """The server optimizer, and the user's own, which clients' optimizers and learning rates follow."""
        several = self.client_engine == "trainer" and not self.module.automatic_optimization
        configured = self.module.configure_optimizers()
        templates, self.schedules = read_optimizers(configured, type(self.module).__name__, several=several)
        for template in templates:
            check_optimizer(template)
            self.algorithm.check_optimizer(template)
        parameters = trainable_parameters(templates)
        if not parameters:
            raise ValueError(
                f"{type(self.module).__name__} has no trainable parameter in its optimizer; unfreeze some."
            )
        server = SGD(parameters, lr=1.0) if self.server_optimizer is None else self.server_optimizer(parameters)
        return [server, *templates], [{"scheduler": s.scheduler, "name": s.name} for s in self.schedules]

    def on_fit_start(self) -> None:
        """The user's hook; then the engine, on the device."""
        self._default_dtype = torch.get_default_dtype()
        check_same_everywhere(self.processes, self._full_configuration())
        self.module.on_fit_start()
        self.module.zero_grad()  # what training before this fit left: the server has pseudo-gradients alone
        self._engine = make_engine(self, self.module, self.algorithm, self.conditions)

    def training_step(self, batch: ClientTask | IdleTask, batch_idx: int) -> None:
        """One client's local epochs, then `Aggregation`."""
        with full_precision(self.device, self._default_dtype):
            if self.engine.expects(batch):
                with self.engine.client_turn(batch):
                    self._train_client(batch)
            if self.trainer.is_last_batch:
                for callback in self._round_callbacks():
                    callback.on_cohort_end(self.trainer, self, batch.round_idx)

    def _train_client(self, task: ClientTask) -> None:
        result = self.engine.train(task, self.download)
        for callback in self._round_callbacks():
            callback.on_client_end(self.trainer, self, task, result)

    def start_round(self, round_idx: int, num_examples: Mapping[int, int]) -> None:
        """Open the round and tell those who listen."""
        self.engine.open_round(round_idx, num_examples)
        for callback in self._round_callbacks():
            callback.on_round_start(self.trainer, self, self.engine.round_state)

    def finish_round(self, summary: RoundSummary) -> None:
        """Step the server on the round's pseudo-gradient, move the schedules on, and report."""
        optimizers: Any = self.optimizers()
        server, local, *_ = optimizers
        with stage_profile(self.trainer, "apply"), scaled_by(None, self.trainer.precision_plugin):
            server.step()
        self.engine.server_moves = False
        self.module.zero_grad()  # of every parameter, also those that no optimizer has
        self._finished_round = summary.round_idx
        summary = replace(summary, diagnostics={**summary.diagnostics, "lr": float(local.param_groups[0]["lr"])})
        self._log_round(summary)
        for schedule in self.schedules:
            if not schedule.waits_for_metric:
                schedule.step(summary.round_idx)
        # last, so that a checkpoint that one of them writes, or that its failure leaves, holds all of the round
        for callback in self._round_callbacks():
            callback.on_round_end(self.trainer, self, summary)

    def _round_callbacks(self) -> list[RoundCallback]:
        return [callback for callback in self._trainer_callbacks() if isinstance(callback, RoundCallback)]

    def _log_round(self, summary: RoundSummary) -> None:
        metrics = round_metrics(summary)
        values = {name: torch.tensor(value, dtype=torch.float64) for name, value in metrics.items()}
        self.log_dict(values, on_step=False, on_epoch=True, batch_size=1)
        for name, entry in summary.logged.items():
            logger = None if entry.logger else False  # True would warn where there is no logger
            self.log(name, entry.value, entry.prog_bar, logger, on_step=False, on_epoch=True, batch_size=1)

    def on_train_batch_end(self, outputs: Any, batch: ClientTask | IdleTask, batch_idx: int) -> None:
        """A round once begun is finished: whoever wants to stop within it waits for its last client.

        Processes stop together: one that wants to is enough. Told to end by a signal, they end after any turn.
        """
        if isinstance(self.trainer.strategy, ClientParallelStrategy):
            self.trainer.strategy.end_if_told()
        if self.trainer.is_last_batch:
            stop = self.trainer.should_stop or self._stop_after_round
            self.trainer.should_stop = self.trainer.strategy.reduce_boolean_decision(stop, all=False)
        elif self.trainer.should_stop:
            self.trainer.should_stop, self._stop_after_round = False, True

    def on_train_epoch_end(self) -> None:
        """Schedules that wait for a metric have it now.

        Not in a run resumed from a checkpoint that validation wrote: metrics are not in checkpoints, and Lightning's
        own plateau schedulers skip that round too.
        """
        for schedule in self.schedules:
            if schedule.waits_for_metric and self._finished_round == self.current_epoch:
                schedule.step_on(self.trainer.callback_metrics, self.current_epoch)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """The user's hook; note the configuration, and let the progress count whole rounds.

        Raises:
            RoundError: If the server's step was interrupted: its weights are then those of no round.
        """
        if self._engine is not None:
            self._engine.check_server_rests()
        self.module.on_save_checkpoint(checkpoint)
        checkpoint["federation"] = self._full_configuration()
        checkpoint["federation_turns"] = self.num_turns
        if self._engine is not None:
            settle_progress(checkpoint, round_is_open=self._engine.round_is_open)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """The user's hook; a run can only be resumed as what it was.

        Raises:
            ValueError: If a fit is resumed from a checkpoint of another configuration.
        """
        if self._trainer is not None and self.trainer.state.fn == "fit":
            check_checkpoint(checkpoint, self._full_configuration())
            fit_turns(checkpoint, self.num_turns)
        self.module.on_load_checkpoint(checkpoint)

    def _full_configuration(self) -> dict[str, str | int]:
        data = self.trainer.datamodule  # type: ignore[attr-defined]
        if not isinstance(data, FederatedDataModule):  # evaluating with a loader of one's own
            return self.configuration()
        return {**self.configuration(), "batch_size": data.batch_size, "partition": data.partition.fingerprint()}


def _described(server_optimizer: ServerOptimizer | None) -> str:
    """The server optimizer with its settings, as far as they can be seen: those of a function cannot."""
    if server_optimizer is None or is_dataclass(server_optimizer):
        return repr(server_optimizer)
    return "a function, whose settings are not compared"
