"""A user's LightningModule, or several, trained on federated clients by a Lightning Trainer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import is_dataclass
from functools import partial
from inspect import signature
from types import MappingProxyType
from typing import Any, cast

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_spectral.algorithms import Algorithm, FedAvg, SpectralStart
from lightning_spectral.algorithms.base import ELSEWHERE, PLACES
from lightning_spectral.algorithms.filter import Plan, check_chain
from lightning_spectral.arguments import Whole, flag
from lightning_spectral.client.local_hooks import LocalHook
from lightning_spectral.errors import check_is, warn
from lightning_spectral.filters import Filter  # and all of them, for configs that name them
from lightning_spectral.filters.robust_rules import RobustRule
from lightning_spectral.participation import Population, Sampler, UniformParticipation
from lightning_spectral.plugin.callbacks.evaluation import SUFFIX
from lightning_spectral.plugin.data import MultiModelDataModule, ServerData
from lightning_spectral.plugin.hooks import FederatedHooks, passed_on
from lightning_spectral.plugin.logs import forwarded_logging
from lightning_spectral.plugin.member import Member
from lightning_spectral.plugin.settings import as_config, config_of, shown_hparams
from lightning_spectral.plugin.user_hooks import (
    BATCH_HOOKS,
    Host,
    Share,
    check_user_module,
    for_evaluation_only,
    is_overridden,
    replaced,
)
from lightning_spectral.protocol.buffer_rules import Rules, as_rules
from lightning_spectral.protocol.per_client import PerClient, assign, check_entries, check_num_entries
from lightning_spectral.server.fault_policy import FORGIVING, Faults, LeaveOut
from lightning_spectral.server.optimizers import AVERAGING, FedOptimizer
from lightning_spectral.sharding import ShardingStrategy
from lightning_spectral.simulation import ClientDropout, Conditions, VirtualClock

PROCESSORS = Whole(at_least=1, hint="leave out clients that train nothing")
BELONGS: Mapping[type, str] = MappingProxyType(  # how each kind of object is given to a federation
    {
        ShardingStrategy: "algorithm=SpectralSharding(strategy={})",
        Algorithm: "algorithm={}",
        FedOptimizer: "server_optimizer={}",
        LocalHook: "local_hooks=[{}]",
        RobustRule: "filters=[Robust({})]",
        Filter: "filters=[{}]",
        Sampler: "participation={}",
        Faults: "faults={}",
        LeaveOut: "faults=Faults(on_error={})",
        ClientDropout: "dropout={}",
        VirtualClock: "clock={}",
        SpectralStart: "algorithm=SpectralSharding(spectral_start={})",
        pl.Callback: "Trainer(callbacks=[{}])",
    }
)
MOVED = {  # arguments that belong elsewhere, or have other names
    "update_bound": "filters=[UsualUpdateNorm()]",
    "secure_sums": "filters=[SecureSums()]",
    "privacy": "filters=[ClientPrivacy(...)]",
    **{name: PLACES[name] for name in ("personal", "compression", "mu", "proximal_mu", "server_lr")},
    **{name: PLACES[name] for name in ("fraction_fit", "fraction_train")},
    "num_clients": "IIDPartitioner(num_clients=10) for all, clients_per_round=10 for those of a round",
    "cohort_size": PLACES["clients_per_round"],
    **dict.fromkeys(("epochs", "num_epochs"), PLACES["local_epochs"]),
    "server_momentum": PLACES["server_lr"],
    **ELSEWHERE,
}
ServerOptimizer = FedOptimizer | Callable[[Iterable[torch.nn.Parameter]], Optimizer]


class FederatedModule(FederatedHooks, Member):
    """Trains your LightningModule on clients: a Trainer epoch is a communication round.

    Your ``training_step``, ``configure_optimizers``, ``self.log`` and metrics run on each client's sub-model; your
    ``validation_step`` and ``test_step`` run on the server's module, which is your module with dense weights.

    Args:
        module: Your LightningModule, used as it is. It holds the server's weights, so training updates it in place.
        algorithm: Decides what clients hold, e.g. `SpectralSharding`; `FedAvg` by default.
        clients_per_round: Size of each round's cohort, which is drawn uniformly: a number, or, as 0.1, a share.
        participation: A sampler that draws the cohort instead, e.g. ``LossVarianceReduced(active=10)``.
        local_epochs: Passes over a client's data in a round: a number, ``{number: share of clients}`` or a list.
        local_steps: Instead of ``local_epochs``, batches on which a client trains in a round, in as many passes as that
            takes; likewise.
        server_optimizer: A function from the server's parameters to the optimizer that steps once per round on the
            pseudo-gradient, e.g. ``BoundedMomentum()``; ``None`` for plain averaging, whatever the algorithm.
        local_hooks: Hooks that act while clients train, in the order given: on gradients before each step, e.g.
            ``[ProximalTerm(0.01), GradientClip(1.0)]``, or on logits, e.g. `MaskedLogits`.
        seed: Seed of participation, keep ratios, terms, data order and dropout.
        faults: Which client faults end the run and which a round tolerates; ``None`` for `Faults()`, or, with
            `ClientPrivacy`, for none that ends it.
        filters: What happens to updates, whatever the algorithm, the one next to it first, e.g.
            ``[Personal(["head.*"]), TopK(0.1), SecureSums()]``; see the page on filters.
        buffers: What becomes of buffers, by patterns of their names: ``"mean"`` for the clients' average, the default
            for floating-point numbers; ``"min"`` or ``"max"`` for the clients' smallest or largest value of each entry;
            ``"server"`` to keep the server's value, the default for all others. The first pattern that matches counts.
        dropout: Simulated dropout of clients; ``None`` for none.
        clock: Simulated duration of each client's turn, with deadline and over-selection; ``None`` for none.
        capture: Whether clients' passes on a CUDA device are captured as graphs of kernels and replayed, with the bits
            of the passes themselves. This has not been run on a GPU yet.

    Note:
        Each client starts with fresh optimizer state. Your scheduler sets the learning rate, read once per round.

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
        FedAvg()
    """

    data_type, data_call, moved = ServerData, "FederatedDataModule(train, partitioner)", MOVED

    def __init__(
        self,
        module: pl.LightningModule,
        *,
        algorithm: Algorithm | None = None,
        clients_per_round: int | float | None = None,
        participation: Sampler | None = None,
        local_epochs: PerClient[int] = 1,
        local_steps: PerClient[int] | None = None,
        server_optimizer: ServerOptimizer | None = None,
        local_hooks: Sequence[LocalHook] = (),
        seed: int = 0,
        faults: Faults | None = None,
        filters: Sequence[Filter] = (),
        buffers: Rules | None = None,
        dropout: ClientDropout | None = None,
        clock: VirtualClock | None = None,
        capture: bool = False,
    ) -> None:
        super().__init__()
        _check_module(module)
        _check_server_optimizer(server_optimizer)
        _check_list("local_hooks", local_hooks, LocalHook)
        self.local_epochs = check_entries("local_epochs", local_epochs, Whole(at_least=0))
        self.local_steps = local_steps
        if local_steps is not None:
            hint = "to train nothing, write local_epochs=0"
            self.local_steps = check_entries("local_steps", local_steps, Whole(at_least=1, hint=hint))
            if self.local_epochs != 1:
                raise ValueError(
                    f"`local_epochs={local_epochs!r}` and `local_steps={local_steps!r}` both say how long clients "
                    "train; leave one out."
                )
        self.clients_per_round = clients_per_round
        self.seed: int = Whole()("seed", seed)
        check_user_module(module)
        self.module = module
        self.algorithm: Algorithm = FedAvg() if algorithm is None else algorithm
        _check_list("filters", filters, Filter)
        self.filters, self.buffer_rules = tuple(filters), as_rules("buffers", buffers or {})
        self.participation: UniformParticipation | Sampler | None = participation
        if participation is not None:
            _check_kind("participation", participation, Sampler)
            if clients_per_round is not None:
                raise ValueError(
                    f"`clients_per_round={clients_per_round}` and `participation={participation!r}` both say who takes "
                    "part; leave one out."
                )
        elif clients_per_round is not None:  # otherwise a federation of several models decides
            self.participation = UniformParticipation(clients_per_round)
            self.clients_per_round = self.participation.clients_per_round  # a plain number
        self.server_optimizer = server_optimizer
        self.local_hooks, self.capture = tuple(local_hooks), flag("capture", capture)
        known = self.algorithm, self.filters, self.participation, self.local_hooks
        plan = Plan(module, *known, buffers=self.buffer_rules)
        _check_algorithm(self.algorithm, plan)
        outlasts = any(each.outlasts_faults for each in self.filters)
        self.faults = (FORGIVING if outlasts else Faults()) if faults is None else faults
        _check_kind("faults", self.faults, Faults)
        if outlasts:
            self.faults.check_private()
        self.conditions = Conditions(dropout, clock)
        self.state = self.algorithm.new_state(module, self.seed)
        if self.state is not None:
            self.lasting.attach("algorithm", self.state)
        self.log_suffix = ""  # what Lightning would append to names, for the model's several evaluation sets
        self._create_federation({"": self})
        self.save_hyperparameters({"federation": self.settings(), "user_module": shown_hparams(module)})
        self._fix({*signature(FederatedModule).parameters, "buffer_rules"})

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of the server's parameters, and of those of the algorithm's state."""
        super().zero_grad(set_to_none)
        if self.state is not None:
            self.state.zero_grad(set_to_none)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Find the weights under the user's names where this is part of a larger module, such as an average.

        The state is in none of these, and stays as it is.
        """
        for name in [name for name in state_dict if name.startswith(prefix)]:
            state_dict[f"{prefix}module.{name.removeprefix(prefix)}"] = state_dict.pop(name)
        if self.state is not None:
            state_dict.update(self.state.state_dict(prefix=f"{prefix}state."))
        super()._load_from_state_dict(state_dict, prefix, *args)

    def data_of(self, name: str) -> ServerData:
        return cast(ServerData, self.datamodule)

    def population(self) -> Population:
        sizes = self.clients_of("", self.algorithm).sizes
        if any(each.equal_weights for each in self.filters):
            sizes = sizes.sign()
        return Population(sizes[:, None], torch.ones_like(sizes))

    def settings(self) -> dict[str, Any]:
        """All settings in plain nested dictionaries, as loggers show them."""
        return {
            **config_of(self, ("algorithm", "local_epochs", "local_hooks", "seed", "faults")),
            **{name: as_config(one) for name, one in self._chosen.items() if one},
            **({} if self.participation is None else config_of(self, ["participation"])),
            "server_optimizer": as_config(self.server_optimizer or AVERAGING),
            **config_of(self.conditions, ("dropout", "clock")),
        }

    @property
    def _chosen(self) -> dict[str, Any]:
        """Choices that are shown and compared only if there are any."""
        return {"filters": self.filters, "buffers": self.buffer_rules, "local_steps": self.local_steps}

    def configuration(self) -> dict[str, str | int]:
        server, epochs = self.server_optimizer, self.local_epochs
        is_seen = server is None or is_dataclass(server)
        return {
            "algorithm": repr(self.algorithm),
            "participation": repr(self.participation),
            "local_epochs": epochs if isinstance(epochs, int) else repr(epochs),
            "server_optimizer": repr(server) if is_seen else "a function, whose settings are not compared",
            "local_hooks": repr(list(self.local_hooks)),
            "seed": self.seed,
            "conditions": repr(self.conditions),
            **{name: repr(one) for name, one in self._chosen.items() if one},
        }

    predict_step = passed_on("predict_step", 2)
    on_predict_start = passed_on("on_predict_start")
    on_predict_end = passed_on("on_predict_end")
    on_predict_epoch_start = passed_on("on_predict_epoch_start")
    on_predict_epoch_end = passed_on("on_predict_epoch_end")
    on_predict_batch_start = passed_on("on_predict_batch_start", 2)
    on_predict_batch_end = passed_on("on_predict_batch_end", 3)

    @contextmanager
    def evaluating(self, args: tuple[Any, ...], position: int) -> Iterator[tuple[pl.LightningModule, tuple[Any, ...]]]:
        with forwarded_logging(self.module, self):
            yield self.module, args

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def move_batches(self) -> None:
        for_evaluation_only(self, of=self.module)
        for data in self.data_there.values():
            for_evaluation_only(data, of=data)

    def log(self, name: str, value: Any, *args: Any, **options: Any) -> None:
        """Log a value; one of several models logs under its own name."""
        host: Any = self.shared.plan
        if host is self:
            return super().log(name, value, *args, **options)
        suffix = self.log_suffix if options.pop("add_dataloader_idx", True) else ""
        host.log(f"{self.name}/{name}{suffix}", value, *args, add_dataloader_idx=False, **options)

    def __getattr__(self, name: str) -> Any:
        """Say where an attribute of the user's module is; if forwarded, it could be read here but not set."""
        try:
            return super().__getattr__(name)
        except AttributeError as error:
            own = self.__dict__.get("_modules", {}).get("module")  # not there yet in a module that is being copied
            if own is None or name.startswith("_") or not hasattr(own, name):
                raise
            raise AttributeError(f"{error}; that of your {type(own).__name__} is `.module.{name}`.") from None


class MultiModelModule(FederatedHooks):
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
        ValueError: If a name is not an identifier, a model has a participation of its own, or two models share weights;
            at set-up, if no client can train a model, or there are fewer processors than the sampler asks for.

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

    data_type = MultiModelDataModule
    data_call = "MultiModelDataModule({name: FederatedDataModule(...), ...})"

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
        _check_models(models)
        check_is("participation", participation, Sampler)
        self.models = nn.ModuleDict(models)
        self.participation = participation
        self.processors = check_entries("processors", processors, PROCESSORS)
        self.unavailable = _plain_unavailable({} if unavailable is None else unavailable, models)
        self.seed: int = Whole()("seed", seed)
        self._create_federation(models)
        hparams = {name: shown_hparams(member.module) for name, member in self.members.items()}
        self.save_hyperparameters({"federation": self.settings(), "user_module": hparams})
        self._fix(signature(MultiModelModule).parameters)

    def data_of(self, name: str) -> ServerData:
        modules: dict[str, ServerData] = self.datamodule.modules
        if modules.keys() != self.members.keys():
            raise ValueError(
                f"MultiModelModule needs data of the models {sorted(self.members)}, got {sorted(modules)}; give each "
                "model data under its own name."
            )
        return modules[name]

    def population(self) -> Population:
        directories = [self.clients_of(name, member.algorithm) for name, member in self.members.items()]
        num_clients = self.datamodule.num_clients
        check_num_entries("processors", self.processors, num_clients)
        processors = assign(self.processors, num_clients, self.seed, "processors")
        counts = torch.tensor([int(processors.of(client)) for client in range(num_clients)])
        available = torch.stack([self.available_for(name) for name in self.members], dim=1)
        return Population(torch.stack([clients.sizes for clients in directories], dim=1), counts, available)

    def available_for(self, name: str) -> Tensor:
        num_clients = self.datamodule.num_clients
        if unknown := [client for client in self.unavailable if client >= num_clients]:
            raise ValueError(
                f"Client ids in `unavailable` must be from 0 to {num_clients - 1}, got clients {unknown}; remove them."
            )
        available = torch.ones(num_clients, dtype=torch.bool)
        available[[client for client, missing in self.unavailable.items() if name in missing]] = False
        return available

    def settings(self) -> dict[str, Any]:
        own = config_of(self, ("participation", "processors", "unavailable", "seed"))
        return {**own, "models": {name: m.settings() for name, m in self.members.items()}}

    def configuration(self) -> dict[str, str | int]:
        names = ("participation", "processors", "unavailable")
        own: dict[str, str | int] = {**{name: repr(getattr(self, name)) for name in names}, "seed": self.seed}
        parts = {name: member.configuration() for name, member in self.members.items()}
        return own | {f"{name}: {key}": value for name, part in parts.items() for key, value in part.items()}

    def configure_callbacks(self) -> list[pl.Callback]:
        """Attach the Trainer to the models too: Lightning does so for direct children only."""
        if self.trainer.state.fn == "predict":
            self.predict_step()  # refuses, here before Lightning looks for data
        for member in self.members.values():
            member.trainer = self.trainer
        return super().configure_callbacks()

    def predict_step(self, *args: Any) -> Any:
        """Raise ``NotImplementedError``: Lightning does not say which model is meant."""
        name = next(iter(self.members))
        raise NotImplementedError(
            "`Trainer.predict` does not say which model is meant; give it one: "
            f"trainer.predict(model.models[{name!r}], loader)."
        )

    @contextmanager
    def evaluating(self, args: tuple[Any, ...], position: int) -> Iterator[tuple[pl.LightningModule, tuple[Any, ...]]]:
        name, own_index, count = self._loader(args[position] if len(args) > position else 0)
        member = self.members[name]
        suffix = f"{SUFFIX}{own_index}" if count > 1 else ""
        with replaced(member, log_suffix=suffix), forwarded_logging(member.module, member):
            yield member.module, (*args[:position], own_index)

    def _loader(self, index: int) -> tuple[str, int, int]:
        """The model of one of all evaluation loaders, the loader's index in it, and how many loaders it has."""
        loaders: list[tuple[str, int, int]] = self.datamodule.evaluated["test" if self.trainer.testing else "validate"]
        return loaders[index]

    def move_batches(self) -> None:
        """Let each model's own batch hooks act on its evaluation batches, those of its data module first."""
        whole = self.trainer.datamodule  # type: ignore[attr-defined]
        for hook in BATCH_HOOKS:
            if isinstance(whole, MultiModelDataModule) and is_overridden(whole, hook):
                raise ValueError(
                    f"`{type(whole).__name__}.{hook}` would not be told which model a batch is for; define it in the "
                    "FederatedDataModule of each model that needs it."
                )
            own = {name: member.module for name, member in self.members.items() if is_overridden(member.module, hook)}
            own |= {name: data for name, data in self.data_there.items() if is_overridden(data, hook)}
            if own:
                setattr(self, hook, partial(self._move, hook, own))

    def _move(self, hook: str, own: Mapping[str, Any], batch: Any, *args: Any) -> Any:
        """Call one model's batch hook, or Lightning's own if it has none; clients move batches while they train."""
        if isinstance(batch, Share):
            return batch
        name, own_index, _ = self._loader(args[-1])
        if name in own:
            return getattr(own[name], hook)(batch, *args[:-1], own_index)
        return getattr(super(), hook)(batch, *args)


def _check_module(module: Any) -> None:
    """Raise ``TypeError`` unless ``module`` is a LightningModule of the package ``lightning``, not yet federated."""
    if isinstance(module, pl.LightningModule):
        if isinstance(module, Host):
            raise TypeError(
                f"`module` must be your own LightningModule, got a {type(module).__name__}, which is federated "
                "already; train it as it is, or wrap its `.module` anew."
            )
        return
    if isinstance(getattr(module, "_orig_mod", None), pl.LightningModule):
        raise TypeError(
            "`module` is a compiled LightningModule, and clients need its hooks; compile what does the work inside it: "
            "self.net = torch.compile(net)."
        )
    if isinstance(module, type):
        raise TypeError(
            f"`module` must be a LightningModule, got the class {module.__name__}; write {module.__name__}(...)."
        )
    remedy = "wrap it in one, with `training_step` and `configure_optimizers`"
    if any(base.__module__.startswith("pytorch_lightning") for base in type(module).__mro__):
        remedy = (
            "it derives from `pytorch_lightning`, whose classes are other types than those of `lightning.pytorch`; "
            "change the import to `import lightning.pytorch as pl`"
        )
    raise TypeError(f"`module` must be a lightning.pytorch.LightningModule, got {type(module).__name__}: {remedy}.")


def _check_server_optimizer(server_optimizer: Any) -> None:
    _check_place("server_optimizer", server_optimizer, FedOptimizer)
    name = type(server_optimizer).__name__
    if isinstance(server_optimizer, type) and not issubclass(server_optimizer, Optimizer):
        got = f"the class {server_optimizer.__name__}; write {server_optimizer.__name__}(...)"
    elif isinstance(server_optimizer, Optimizer):
        got = f"{name} of some parameters; write lambda parameters: torch.optim.{name}(parameters, lr=...)"
    elif server_optimizer is None or callable(server_optimizer):
        if server_optimizer is torch.optim.SGD:
            warn(
                "`server_optimizer=torch.optim.SGD` has torch's default rate, a thousandth of averaging; write "
                "functools.partial(torch.optim.SGD, lr=1.0), or leave it out.",
                3,
            )
        return
    else:
        got = (
            f"{server_optimizer!r}; leave it out for plain averaging, or write FedAvgM(lr=1.0, momentum=0.9), or "
            "lambda parameters: torch.optim.SGD(parameters, lr=1.0)"
        )
    raise TypeError(f"`server_optimizer` must be a function from parameters to an optimizer, got {got}.")


def _check_place(argument: str, value: Any, expected: type) -> None:
    """Raise ``TypeError`` for what belongs elsewhere, and say where."""
    kind = value if isinstance(value, type) else type(value)
    place = next((place for base, place in BELONGS.items() if issubclass(kind, base)), None)
    if place is not None and not issubclass(kind, expected):
        made = f"{kind.__name__}(...)"
        rule = f"`{argument}` must be an instance of {expected.__name__}"
        raise TypeError(f"{rule}, got {made}; write {place.format(made)}.")


def _check_kind(argument: str, value: Any, expected: type) -> None:
    _check_place(argument, value, expected)
    check_is(argument, value, expected)


def _check_list(argument: str, values: Any, expected: type) -> None:
    """Raise ``TypeError`` unless an argument is a list of what it takes."""
    if isinstance(values, expected):
        raise TypeError(f"`{argument}` must be a list, got one entry; write {argument}=[{values!r}].")
    if isinstance(values, str):
        check_is(argument, values, expected)
    _check_kind(argument, values, Sequence)
    for each in values:
        _check_kind(argument, each, expected)


def _check_algorithm(algorithm: Any, plan: Plan) -> None:
    """Raise ``TypeError`` unless there is an algorithm, and ``ValueError`` if it cannot be part of the plan."""
    _check_kind("algorithm", algorithm, Algorithm)
    module = plan.module
    try:
        check_chain(plan)
        algorithm.check(plan)
    except ValueError as error:
        if next(module.parameters(), None) is not None:
            raise
        name = type(module).__name__
        raise ValueError(
            f"{name} has no parameters yet, and {type(algorithm).__name__} needs to see them when {name} is wrapped; "
            "make its layers in `__init__`, rather than in `setup`."
        ) from error


def _check_models(models: Any) -> None:
    """Check the models of a federation: their types, names and participation, and that they share no weights."""
    check_is("models", models, Mapping)
    taken = {*vars(nn.ModuleDict()), *dir(nn.ModuleDict), "fl"}
    if not models:
        raise ValueError("`models` is empty; give a FederatedModule for each model, by name.")
    for name, model in models.items():
        check_is(f"models[{name!r}]", model, FederatedModule)
        if not isinstance(name, str) or not name.isidentifier():
            raise ValueError(f"A model's name must be an identifier, as it begins those of its metrics, got {name!r}.")
        if name in taken:
            raise ValueError(f"A model cannot be named {name!r}, which has another meaning; give it another name.")
        if model.participation is not None:
            raise ValueError(
                f"MultiModelModule decides who trains which model, but {name!r} has {model.participation} of its own; "
                "leave out its `clients_per_round` and `participation`."
            )
        if alike := [type(each).__name__ for each in model.filters if each.equal_weights]:
            raise ValueError(
                f"{alike[0]} needs clients that weigh the same, and clients of {name!r} weigh what the sampling of "
                "several models makes of them; train it by itself, in a FederatedModule."
            )
    owner: dict[int, str] = {}
    for name, model in models.items():
        for tensor in {*model.module.parameters(), *model.module.buffers()}:
            other = owner.setdefault(id(tensor), name)
            if other != name:
                raise ValueError(
                    f"The models {other!r} and {name!r} share weights, so each would train the other's; give each "
                    "its own: copy.deepcopy(layer)."
                )


def _plain_unavailable(
    unavailable: Mapping[int, Sequence[str]], models: Mapping[str, Any]
) -> dict[int, tuple[str, ...]]:
    """Check which models clients cannot train, by client, and return them."""
    check_is("unavailable", unavailable, Mapping)
    client_id = Whole(at_least=0, hint="its keys are clients' ids")
    plain: dict[int, tuple[str, ...]] = {}
    for client, names in unavailable.items():
        client = client_id("unavailable", client)
        if isinstance(names, str) or not isinstance(names, Iterable):
            remedy = f"; write {{{client}: [{names!r}]}}" if isinstance(names, str) else ""
            raise TypeError(f"`unavailable` lists models of a client, got {names!r}{remedy}.")
        plain[client] = names = tuple(names)
        if unknown := [name for name in names if name not in models]:
            raise ValueError(f"`unavailable` names {unknown} for client {client}; the models are {sorted(models)}.")
    return plain
