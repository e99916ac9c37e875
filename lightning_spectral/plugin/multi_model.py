"""MultiModelModule: several models, trained by the same clients under one Trainer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

from lightning_spectral.arguments import Whole
from lightning_spectral.errors import check_is
from lightning_spectral.participation import Population, Sampler
from lightning_spectral.plugin.checkpoint_files import handle_whole_files
from lightning_spectral.plugin.checks import (
    check_datamodule,
    check_member,
    check_same_everywhere,
    check_stage,
    check_trainer,
)
from lightning_spectral.plugin.client_parallel import log_options
from lightning_spectral.plugin.data import FederatedDataModule
from lightning_spectral.plugin.fixed_arguments import arguments_of
from lightning_spectral.plugin.host import Host, Seat
from lightning_spectral.plugin.member import Member
from lightning_spectral.plugin.module import FederatedModule
from lightning_spectral.plugin.multi_model_checks import PROCESSORS, check_models, plain_unavailable
from lightning_spectral.plugin.multi_model_data import MultiModelDataModule
from lightning_spectral.plugin.multi_model_hooks import MultiModelHooks
from lightning_spectral.plugin.round_boundaries import with_boundaries
from lightning_spectral.plugin.round_hooks import RoundProgress
from lightning_spectral.plugin.run_config import config_of
from lightning_spectral.plugin.sampler_checks import check_over_selection
from lightning_spectral.plugin.trainer_checks import check_clipping, check_own_optimizers
from lightning_spectral.protocol.per_client import PerClient, assign, check_num_entries, check_per_client


class MultiModelModule(MultiModelHooks, Host):
    r"""Trains several models on one population of clients; in each round a sampler decides who trains which model.

    Client i has :math:`B_i` processors, each of which trains one model or none in a round. The server adds
    :math:`\sum \frac{d_{i,s}}{B_i\, p_{s|(i,b)}} \Delta_{i,s}` over those that trained; its expectation is the update
    of all clients. If two processors of a client draw the same model, the client trains it once, for both.

    Each model keeps its own module, algorithm, server optimizer, schedule, partition and evaluation data. The names of
    its metrics begin with its own: ``words/fl/loss``, ``words/accuracy``. A model that no client draws in a round keeps
    its weights bit for bit and reports 0 as ``fl/clients``.

    Args:
        models: A `FederatedModule` for each model, by name, without ``clients_per_round``.
        participation: Draws who trains what, e.g. ``LossVarianceReduced(active=12)``.
        processors: Number of processors per client: one number for all clients, the share of clients with each number,
            ``{3: 0.25, 2: 0.5, 1: 0.25}``, or one number for each client.
        unavailable: Models that a client cannot train although it has data, by client: ``{7: ["words"]}``.
        seed: Seed of the draws, and of which clients have how many processors.

    Raises:
        TypeError: If a model is not a `FederatedModule`, or ``participation`` is not a sampler.
        ValueError: If there is no model, a name cannot be part of a metric's name, a model has a participation of its
            own, or two models share weights; at set-up, if no client can train a model, or there are fewer processors
            than the sampler asks for.

    Reference:
        Zhang et al. (2024), Towards optimal heterogeneous client sampling in multi-model federated learning.

    Example:
        >>> from lightning_spectral.participation import LossVarianceReduced
        >>> class LitLine(pl.LightningModule):
        ...     def __init__(self, width):
        ...         super().__init__()
        ...         self.line = nn.Linear(width, 1)
        ...     def training_step(self, batch, batch_idx):
        ...         return self.line(batch[0]).square().mean()
        ...     def configure_optimizers(self):
        ...         return torch.optim.SGD(self.parameters(), lr=0.1)
        >>> model = MultiModelModule(
        ...     {"words": FederatedModule(LitLine(3)), "images": FederatedModule(LitLine(4))},
        ...     participation=LossVarianceReduced(active=4),
        ...     processors={2: 0.5, 1: 0.5},
        ... )
        >>> list(model.members)
        ['words', 'images']
    """

    def __init__(
        self,
        models: Mapping[str, FederatedModule],
        *,
        participation: Sampler,
        processors: PerClient[int] = 1,
        unavailable: Mapping[int, Sequence[str]] | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        check_models(models)
        check_is("participation", participation, Sampler)
        self.automatic_optimization = False
        self.models = nn.ModuleDict(models)
        self.participation = participation
        self.processors = check_per_client("processors", processors, PROCESSORS)
        self.unavailable = plain_unavailable({} if unavailable is None else unavailable, models)
        self.seed: int = Whole()("seed", seed)
        self._limit, self._sampled = 1.0, None
        self._default_dtype = torch.get_default_dtype()
        self._rounds, self._resumed = RoundProgress(), None
        self._take_seats()
        hparams = {name: dict(member.module.hparams) for name, member in self.members.items()}
        self.save_hyperparameters({"federation": self.settings(), "user_module": hparams})
        self._fix(arguments_of(MultiModelModule.__init__))

    def _take_seats(self) -> None:
        """Make the models part of this federation; they may have been fitted alone or in another one since."""
        for name, member in self.members.items():
            member.seat = Seat(name, self, key=name if len(self.models) > 1 else "")

    @property
    def members(self) -> Mapping[str, Member]:
        """The models by name."""
        return cast(Mapping[str, Member], dict(self.models.items()))

    @property
    def multi_data(self) -> MultiModelDataModule:
        """The data module of the run."""
        return check_datamodule(self.trainer, MultiModelDataModule)

    def data_of(self, name: str) -> FederatedDataModule:
        """The data of one model's clients.

        Raises:
            ValueError: If there is no data for it.
        """
        modules = self.multi_data.modules
        if modules.keys() != self.members.keys():
            raise ValueError(
                f"The models are {sorted(self.members)}, and there is data for {sorted(modules)}; give each model data "
                "under its own name."
            )
        return modules[name]

    def population(self) -> Population:
        """Which client can train which model, and with how many processors."""
        directories = [self.clients_of(name, member.algorithm) for name, member in self.members.items()]
        num_clients = self.multi_data.num_clients
        check_num_entries("processors", self.processors, num_clients)
        processors = assign(self.processors, num_clients, self.seed, "processors")
        counts = torch.tensor([int(processors.of(client)) for client in range(num_clients)])
        available = torch.stack([self.available_for(name) for name in self.members], dim=1)
        return Population(torch.stack([clients.sizes for clients in directories], dim=1), counts, available)

    def available_for(self, name: str) -> Tensor:
        """Whether each client can train a model, if it has examples of it."""
        num_clients = self.multi_data.num_clients
        if unknown := [client for client in self.unavailable if client >= num_clients]:
            raise ValueError(f"`unavailable` names clients {unknown}, and there are {num_clients}; ids begin at 0.")
        available = torch.ones(num_clients, dtype=torch.bool)
        available[[client for client, missing in self.unavailable.items() if name in missing]] = False
        return available

    def settings(self) -> dict[str, Any]:
        """All settings in plain nested dictionaries, as loggers show them."""
        own = config_of(self, ("participation", "processors", "unavailable", "seed"))
        return {**own, "models": {name: cast(FederatedModule, m).settings() for name, m in self.members.items()}}

    def configuration(self) -> dict[str, str | int]:
        """The settings that must match for a checkpoint to be resumed, apart from the data."""
        own: dict[str, str | int] = {
            "participation": repr(self.participation),
            "processors": repr(self.processors),
            "unavailable": repr(self.unavailable),
            "seed": self.seed,
        }
        parts = {name: cast(FederatedModule, member).configuration() for name, member in self.members.items()}
        return own | {f"{name}: {key}": value for name, part in parts.items() for key, value in part.items()}

    def _data_or_none(self, name: str) -> FederatedDataModule | None:
        datamodule = self.trainer.datamodule  # type: ignore[attr-defined]
        return self.data_of(name) if isinstance(datamodule, MultiModelDataModule) else None

    def configure_callbacks(self) -> list[pl.Callback]:
        """The users' callbacks, then the round's boundaries that the Trainer does not have yet."""
        check_clipping(self.trainer)
        configured = [member.module.configure_callbacks() for member in self.members.values()]
        own = [callback for found in configured for callback in (found if isinstance(found, Iterable) else [found])]
        return with_boundaries(self.trainer, own)

    def prepare_data(self) -> None:
        """Call the users' hooks."""
        for member in self.members.values():
            member.trainer = self.trainer
            member.module.prepare_data()

    def setup(self, stage: str) -> None:
        """Call the users' hooks; for a fit, check everything that can be checked before training."""
        if stage == "predict":
            self.predict_step()  # refuses, here before Lightning looks for data
        self._take_seats()
        for member in self.members.values():
            member.trainer = self.trainer  # Lightning attaches itself to direct children only
            member.module.setup(stage)
            check_stage(stage, member.module)
        if stage == "fit":
            self._rounds, self._resumed = RoundProgress(), None
            check_trainer(self.trainer)
            check_own_optimizers(self)
            for name, member in self.members.items():
                data = self.data_of(name)
                check_member(member.module, data, self.participation, member.faults, member.local_hooks)
                check_over_selection(member.conditions, absolute=member.absolute)
                member.conditions.check(data.num_clients, self._usual_size)
        handle_whole_files(self.trainer)
        self.move_batches()

    def teardown(self, stage: str) -> None:
        """Drop the engines, and call the users' hooks."""
        for member in self.members.values():
            cast(FederatedModule, member).teardown(stage)

    def configure_optimizers(self) -> Any:
        """Return each model's server optimizer and the user's own optimizers, model by model."""
        optimizers: list[Any] = []
        schedulers: list[dict[str, Any]] = []
        for name, member in self.members.items():
            member.seat.first_optimizer = len(optimizers)
            own, schedules = member.make_optimizers()
            optimizers += own
            schedulers += [{"scheduler": s.scheduler, "name": f"{name}/{s.name or 'lr'}"} for s in schedules]
        return optimizers, schedulers

    def on_fit_start(self) -> None:
        """Check that all processes are set up for the same run, and begin it for every model."""
        self._default_dtype = torch.get_default_dtype()
        check_same_everywhere(self.processes, self.full_configuration())
        for member in self.members.values():
            member.begin_fit(self._resumed is not None)

    def log(self, name: str, value: Any, *args: Any, **options: Any) -> None:
        """Log a value, without a warning that it is not synchronised: it is the same in all processes."""
        super().log(name, value, *args, **{**options, **log_options(self)})
