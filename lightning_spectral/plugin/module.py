"""FederatedModule: a user's LightningModule, trained on federated clients by a Lightning Trainer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import lightning.pytorch as pl
import torch

from lightning_spectral.algorithms import Algorithm, FedAvg
from lightning_spectral.client.local_hooks import LocalHook
from lightning_spectral.errors import check_is
from lightning_spectral.participation import Population, Sampler, UniformParticipation
from lightning_spectral.plugin.checkpoint_files import handle_whole_files
from lightning_spectral.plugin.checkpoints import described
from lightning_spectral.plugin.checks import (
    check_datamodule,
    check_member,
    check_same_everywhere,
    check_stage,
    check_trainer,
)
from lightning_spectral.plugin.data import FederatedDataModule
from lightning_spectral.plugin.fixed_arguments import arguments_of
from lightning_spectral.plugin.host import Host, Seat
from lightning_spectral.plugin.member import Member, ServerOptimizer
from lightning_spectral.plugin.module_checks import (
    check_algorithm,
    check_module,
    check_settings,
    check_suits,
    plain_numbers,
    warn_of_compiled_in_place,
)
from lightning_spectral.plugin.round_boundaries import with_boundaries
from lightning_spectral.plugin.round_hooks import RoundProgress
from lightning_spectral.plugin.round_schedules import RoundSchedules
from lightning_spectral.plugin.run_config import as_config, config_of
from lightning_spectral.plugin.sampler_checks import check_over_selection
from lightning_spectral.plugin.saved_rounds import SavedRounds
from lightning_spectral.plugin.trainer_checks import check_clipping, check_own_optimizers
from lightning_spectral.plugin.user_hooks import check_user_module, spare_shares
from lightning_spectral.protocol.client_store import ClientStore
from lightning_spectral.protocol.frozen_base import FrozenBase
from lightning_spectral.server.fault_policy import Faults
from lightning_spectral.server.first_rounds import FirstRounds
from lightning_spectral.server.optimizers import FedAvgM
from lightning_spectral.simulation import ClientDropout, Conditions, VirtualClock


class FederatedModule(SavedRounds, Member, Host):
    """Trains your LightningModule on clients: a Trainer epoch is a communication round, and a batch is a client.

    Your ``training_step``, ``configure_optimizers``, ``self.log`` and metrics run on each client's sub-model; your
    ``validation_step`` and ``test_step`` run on the server's module, which is your module with dense weights.

    Args:
        module: Your LightningModule, used as it is. It holds the server's weights, so training updates it in place.
        algorithm: Decides what clients hold, e.g. `SpectralSharding`; `FedAvg` by default.
        clients_per_round: Size of each round's cohort, which is drawn uniformly.
        participation: A sampler that draws the cohort instead, e.g. ``LossVarianceReduced(active=10)``.
        local_epochs: Passes over a client's own data in a round; 0 trains nothing.
        client_engine: What runs a client's local epochs: ``"loop"``, which is fast, or ``"trainer"``, a quiet Trainer,
            for several optimizers, manual optimisation and hooks that the loop refuses.
        server_optimizer: A function from the server's parameters to the optimizer that steps once per round on the
            pseudo-gradient, e.g. ``FedAdam(lr=0.01)``; ``None`` for SGD with learning rate 1, which is plain averaging.
        local_hooks: Hooks that act while clients train, in the order given: on gradients before each step, e.g.
            ``[ProximalTerm(0.01), GradientClip(1.0)]``, or on logits, e.g. `MaskedLogits`.
        seed: Seed of participation, keep ratios, terms, data order and dropout.
        faults: Which client faults end the run and which a round tolerates; ``None`` for `Faults()`.
        dropout: Simulated dropout of clients; ``None`` for none.
        clock: Simulated duration of each client's turn, with deadline, over-selection and round length; ``None`` for
            none.

    Raises:
        TypeError: If ``module`` is not a ``lightning.pytorch.LightningModule``, or an argument has the wrong type.
        ValueError: If a count is out of range, or the module does something that federated training cannot honour.

    Note:
        Each client starts with fresh optimizer state. The learning rate comes from your scheduler, read once per
        round. Floating-point buffers (BatchNorm's running statistics) are averaged over clients; other buffers keep
        the server's value.

    Example:
        >>> class LitLine(pl.LightningModule):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.line = torch.nn.Linear(3, 1)
        ...     def training_step(self, batch, batch_idx):
        ...         x, y = batch
        ...         return (self.line(x).squeeze(1) - y).square().mean()
        ...     def configure_optimizers(self):
        ...         return torch.optim.SGD(self.parameters(), lr=0.1)
        >>> FederatedModule(LitLine(), clients_per_round=2).algorithm
        FedAvg(keep_buffers=())
    """

    def __init__(
        self,
        module: pl.LightningModule,
        *,
        algorithm: Algorithm | None = None,
        clients_per_round: int | None = None,
        participation: Sampler | None = None,
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
        check_settings(client_engine, server_optimizer, local_hooks)
        local_epochs, clients_per_round, seed = plain_numbers(local_epochs, clients_per_round, seed)
        check_user_module(module, client_engine)
        warn_of_compiled_in_place(module)
        self.automatic_optimization = False
        self.module = module
        self.algorithm: Algorithm = FedAvg() if algorithm is None else algorithm
        check_algorithm(self.algorithm)
        check_suits(self.algorithm, module)
        self.clients_per_round = clients_per_round
        self.participation = _participation(clients_per_round, participation)
        self.local_epochs = local_epochs
        self.client_engine = client_engine
        self.server_optimizer = server_optimizer
        self.local_hooks = tuple(local_hooks)
        self.seed = seed
        self.faults = Faults() if faults is None else faults
        check_is("faults", self.faults, Faults)
        self.conditions = Conditions(dropout, clock)
        self.schedules = RoundSchedules((), "")
        self.state = self.algorithm.new_state(module, seed)
        self.seat = Seat()
        self._limit, self._sampled = 1.0, None
        self._store, self._engine, self._first_rounds = ClientStore(), None, FirstRounds()
        self._frozen_base = FrozenBase()
        self._unreached = None
        self._decisions: Mapping[str, Any] = {}
        self._default_dtype = torch.get_default_dtype()
        self._rounds, self._resumed = RoundProgress(), None
        self.save_hyperparameters({"federation": self.settings(), "user_module": dict(module.hparams)})
        self._fix(arguments_of(FederatedModule.__init__))

    @property
    def members(self) -> Mapping[str, Member]:
        """The models by name: this module, the only one, has an empty name."""
        return {"": self}

    def data_of(self, name: str) -> FederatedDataModule:
        """The data module of the run."""
        return check_datamodule(self.trainer, FederatedDataModule)

    def population(self) -> Population:
        """The clients, each with one processor."""
        sizes = self.clients_of("", self.algorithm).sizes
        return Population(sizes[:, None], torch.ones_like(sizes))

    def settings(self) -> dict[str, Any]:
        """All settings in plain nested dictionaries, as loggers show them."""
        optimizer = FedAvgM(momentum=0.0) if self.server_optimizer is None else self.server_optimizer
        return {
            **config_of(self, ("algorithm", "local_epochs", "client_engine", "local_hooks", "seed", "faults")),
            **({} if self.participation is None else {"participation": as_config(self.participation)}),
            "server_optimizer": as_config(optimizer),
            **config_of(self.conditions, ("dropout", "clock")),
        }

    def configuration(self) -> dict[str, str | int]:
        """The settings that must match for a checkpoint to be resumed, apart from the data."""
        return {
            "algorithm": repr(self.algorithm),
            "participation": repr(self.participation),
            "local_epochs": self.local_epochs,
            "server_optimizer": described(self.server_optimizer),
            "local_hooks": repr(list(self.local_hooks)),
            "seed": self.seed,
            "conditions": repr(self.conditions),
        }

    def _data_or_none(self, name: str) -> FederatedDataModule | None:
        datamodule = self.trainer.datamodule  # type: ignore[attr-defined]
        return datamodule if isinstance(datamodule, FederatedDataModule) else None

    def configure_callbacks(self) -> list[pl.Callback]:
        """The user's callbacks, then the round's boundaries that the Trainer does not have yet."""
        check_clipping(self.trainer)  # here, because Lightning refuses it before `setup`, with its own message
        own = self.module.configure_callbacks()
        return with_boundaries(self.trainer, own if isinstance(own, Iterable) else [own])

    def prepare_data(self) -> None:
        """Call the user's hook."""
        self.module.prepare_data()

    def setup(self, stage: str) -> None:
        """Call the user's hook; for a fit, check everything that can be checked before training."""
        self.seat = Seat()  # alone now, even if it was one of several models before
        self.module.setup(stage)
        check_stage(stage, self.module)
        if stage == "fit":
            self._rounds, self._resumed = RoundProgress(), None
            check_trainer(self.trainer)
            check_own_optimizers(self)
            check_member(self.module, self.data, self.participation, self.faults, self.local_hooks)
            check_over_selection(self.conditions, absolute=self.absolute)
            self.conditions.check(self.data.num_clients, self._usual_size)
        handle_whole_files(self.trainer)
        spare_shares(self, of=self.module)
        if (data := self._data_or_none("")) is not None:
            spare_shares(data, of=data)

    def teardown(self, stage: str) -> None:
        """Drop the engine, and call the user's hook."""
        self._engine = None
        self.module.teardown(stage)

    def configure_optimizers(self) -> Any:
        """Return the server optimizer and the user's own, which determine clients' optimizers and learning rates."""
        optimizers, schedulers = self.make_optimizers()
        return optimizers, [{"scheduler": s.scheduler, "name": s.name} for s in schedulers]

    def on_fit_start(self) -> None:
        """Check that all processes are set up for the same run, and begin it."""
        self._default_dtype = torch.get_default_dtype()
        check_same_everywhere(self.processes, self.full_configuration())
        self.begin_fit(self._resumed is not None)


def _participation(clients_per_round: int | None, sampler: Sampler | None) -> UniformParticipation | Sampler | None:
    """Return who takes part in a round; ``None`` if a federation of several models decides that.

    Raises:
        ValueError: If both arguments are given.
        TypeError: If ``sampler`` is not a sampler.
    """
    if sampler is None:
        return None if clients_per_round is None else UniformParticipation(clients_per_round)
    check_is("participation", sampler, Sampler)
    if clients_per_round is not None:
        raise ValueError(
            f"`clients_per_round={clients_per_round}` and `participation={sampler!r}` both say who takes part; leave "
            "one out."
        )
    return sampler
