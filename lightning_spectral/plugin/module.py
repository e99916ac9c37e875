"""FederatedModule: a user's LightningModule, trained on federated clients by a Lightning Trainer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from inspect import signature
from typing import Any

import lightning.pytorch as pl
import torch
from torch.optim import Optimizer

from lightning_spectral.algorithms import Algorithm, FedAvg
from lightning_spectral.arguments import Whole
from lightning_spectral.client.local_hooks import LocalHook
from lightning_spectral.errors import check_is
from lightning_spectral.participation import CLIENTS_PER_ROUND, Population, Sampler, UniformParticipation
from lightning_spectral.plugin.checks import check_datamodule, check_summable
from lightning_spectral.plugin.data import ServerData
from lightning_spectral.plugin.hooks import FederatedHooks, passed_on
from lightning_spectral.plugin.logs import forwarded_logging
from lightning_spectral.plugin.member import Member
from lightning_spectral.plugin.settings import as_config, config_of, described, shown_hparams
from lightning_spectral.plugin.user_hooks import (
    Host,
    check_user_module,
    for_evaluation_only,
)
from lightning_spectral.server.fault_policy import Faults, UpdateBound
from lightning_spectral.server.optimizers import AVERAGING, FedOptimizer
from lightning_spectral.server.privacy import ClientPrivacy
from lightning_spectral.server.secure_sums import SecureSums
from lightning_spectral.sharding import ShardingStrategy
from lightning_spectral.simulation import ClientDropout, Conditions, VirtualClock

CHOSEN = ("update_bound", "secure_sums", "privacy", "participation")  # shown only if they are
ServerOptimizer = FedOptimizer | Callable[[Iterable[torch.nn.Parameter]], Optimizer]


class FederatedModule(FederatedHooks, Member):
    """Trains your LightningModule on clients: a Trainer epoch is a communication round.

    Your ``training_step``, ``configure_optimizers``, ``self.log`` and metrics run on each client's sub-model; your
    ``validation_step`` and ``test_step`` run on the server's module, which is your module with dense weights.

    Args:
        module: Your LightningModule, used as it is. It holds the server's weights, so training updates it in place.
        algorithm: Decides what clients hold, e.g. `SpectralSharding`; `FedAvg` by default.
        clients_per_round: Size of each round's cohort, which is drawn uniformly.
        participation: A sampler that draws the cohort instead, e.g. ``LossVarianceReduced(active=10)``.
        local_epochs: Passes over a client's own data in a round; 0 trains nothing.
        server_optimizer: A function from the server's parameters to the optimizer that steps once per round on the
            pseudo-gradient, e.g. ``BoundedMomentum()``; ``None`` for plain averaging, whatever the algorithm.
        local_hooks: Hooks that act while clients train, in the order given: on gradients before each step, e.g.
            ``[ProximalTerm(0.01), GradientClip(1.0)]``, or on logits, e.g. `MaskedLogits`.
        seed: Seed of participation, keep ratios, terms, data order and dropout.
        faults: Which client faults end the run and which a round tolerates; ``None`` for `Faults()`.
        update_bound: Bound on each client's update: `MaxUpdateNorm` or `UsualUpdateNorm`; ``None`` for none.
        secure_sums: Lets the server have the sum of a round's updates alone; ``None`` for each update.
        privacy: Differential privacy of clients, `ClientPrivacy`, with ``participation=Uniform(...)``; ``None`` for
            none.
        dropout: Simulated dropout of clients; ``None`` for none.
        clock: Simulated duration of each client's turn, with deadline, over-selection and round length; ``None`` for
            none.

    Note:
        Each client starts with fresh optimizer state. The learning rate comes from your scheduler, read once per
        round. Floating-point buffers (BatchNorm's running statistics) are averaged over clients; other buffers keep
        the server's value, unless the algorithm's ``buffers`` say otherwise.

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
        FedAvg(buffers={}, ...)
    """

    data_type = ServerData

    def __init__(
        self,
        module: pl.LightningModule,
        *,
        algorithm: Algorithm | None = None,
        clients_per_round: int | None = None,
        participation: Sampler | None = None,
        local_epochs: int = 1,
        server_optimizer: ServerOptimizer | None = None,
        local_hooks: Sequence[LocalHook] = (),
        seed: int = 0,
        faults: Faults | None = None,
        update_bound: UpdateBound | None = None,
        secure_sums: SecureSums | None = None,
        privacy: ClientPrivacy | None = None,
        dropout: ClientDropout | None = None,
        clock: VirtualClock | None = None,
    ) -> None:
        super().__init__()
        _check_module(module)
        _check_server_optimizer(server_optimizer)
        _check_local_hooks(local_hooks)
        self.local_epochs: int = Whole(at_least=0)("local_epochs", local_epochs)
        self.clients_per_round = replace(CLIENTS_PER_ROUND, optional=True)("clients_per_round", clients_per_round)
        self.seed: int = Whole()("seed", seed)
        check_user_module(module)
        self.module = module
        self.algorithm: Algorithm = FedAvg() if algorithm is None else algorithm
        _check_algorithm(self.algorithm, module)
        self.participation: UniformParticipation | Sampler | None = participation
        if participation is not None:
            check_is("participation", participation, Sampler)
            if clients_per_round is not None:
                raise ValueError(
                    f"`clients_per_round={clients_per_round}` and `participation={participation!r}` both say who takes "
                    "part; leave one out."
                )
        elif self.clients_per_round is not None:  # otherwise a federation of several models decides
            self.participation = UniformParticipation(self.clients_per_round)
        self.server_optimizer = server_optimizer
        self.local_hooks = tuple(local_hooks)
        self.faults = Faults() if faults is None else faults
        kinds = {"faults": Faults, "update_bound": UpdateBound, "secure_sums": SecureSums, "privacy": ClientPrivacy}
        self.update_bound, self.secure_sums, self.privacy = update_bound, secure_sums, privacy
        for name, kind in kinds.items():
            if (given := getattr(self, name)) is not None:
                check_is(name, given, kind)
        if update_bound is not None:
            update_bound.check(self.algorithm)
        if secure_sums is not None:
            check_summable(self.algorithm, update_bound)
        if privacy is not None:
            privacy.check(self.algorithm, self.participation)
            if update_bound is not None or secure_sums is not None:
                raise ValueError(
                    "`privacy` lets the server shorten each update to its `clip`: give it without `update_bound` and "
                    "`secure_sums`."
                )
        self.conditions = Conditions(dropout, clock)
        self.state = self.algorithm.new_state(module, self.seed)
        self.log_suffix = ""  # what Lightning would append to names, for the model's several evaluation sets
        self._create_federation({"": self})
        self.save_hyperparameters({"federation": self.settings(), "user_module": shown_hparams(module)})
        self._fix(signature(FederatedModule).parameters)

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
        return check_datamodule(self.trainer, ServerData)

    def population(self) -> Population:
        sizes = self.clients_of("", self.algorithm).sizes
        if self.privacy is not None:
            sizes = sizes.sign()  # all weigh the same
        return Population(sizes[:, None], torch.ones_like(sizes))

    def settings(self) -> dict[str, Any]:
        """All settings in plain nested dictionaries, as loggers show them."""
        return {
            **config_of(self, ("algorithm", "local_epochs", "local_hooks", "seed", "faults")),
            **config_of(self, [n for n in CHOSEN if getattr(self, n) is not None]),
            "server_optimizer": as_config(self.server_optimizer or AVERAGING),
            **config_of(self.conditions, ("dropout", "clock")),
        }

    def configuration(self) -> dict[str, str | int]:
        return {
            "algorithm": repr(self.algorithm),
            "participation": repr(self.participation),
            "local_epochs": self.local_epochs,
            "server_optimizer": described(self.server_optimizer),
            "local_hooks": repr(list(self.local_hooks)),
            "seed": self.seed,
            "conditions": repr(self.conditions),
            **{name: repr(one) for name in CHOSEN[:-1] if (one := getattr(self, name)) is not None},
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
        if (data := self.data_or_none("")) is not None:
            for_evaluation_only(data, of=data)

    def log(self, name: str, value: Any, *args: Any, **options: Any) -> None:
        """Log a value; one of several models logs under its own name."""
        host: Any = self.part_of.plan
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
    name = type(server_optimizer).__name__
    if isinstance(server_optimizer, type) and not issubclass(server_optimizer, Optimizer):
        got = f"the class {server_optimizer.__name__}; write {server_optimizer.__name__}(...)"
    elif isinstance(server_optimizer, Optimizer):
        got = f"{name} of some parameters; write lambda parameters: torch.optim.{name}(parameters, lr=...)"
    elif server_optimizer is None or callable(server_optimizer):
        return
    else:
        got = (
            f"{server_optimizer!r}; leave it out for plain averaging, or write FedAvgM(lr=1.0, momentum=0.9), or "
            "lambda parameters: torch.optim.SGD(parameters, lr=1.0)"
        )
    raise TypeError(f"`server_optimizer` must be a function from parameters to an optimizer, got {got}.")


def _check_local_hooks(local_hooks: Any) -> None:
    if isinstance(local_hooks, LocalHook):
        raise TypeError(f"`local_hooks` must be a list, got one hook; write local_hooks=[{local_hooks!r}].")
    check_is("local_hooks", local_hooks, Sequence)
    for hook in local_hooks:
        if isinstance(hook, pl.Callback):
            name = type(hook).__name__
            raise TypeError(
                f"`local_hooks` act on devices, and {name} is a callback; write Trainer(callbacks=[{name}(...)])."
            )
        check_is("local_hooks", hook, LocalHook)


def _check_algorithm(algorithm: Any, module: pl.LightningModule) -> None:
    """Raise ``TypeError`` unless there is an algorithm, and ``ValueError`` if it cannot train the module."""
    is_class = isinstance(algorithm, type) and issubclass(algorithm, ShardingStrategy)
    if is_class or isinstance(algorithm, ShardingStrategy):
        strategy = f"{algorithm.__name__}(...)" if is_class else repr(algorithm)
        raise TypeError(
            f"`algorithm` must be an instance of Algorithm, got the strategy {strategy}; write "
            f"SpectralSharding(strategy={strategy})."
        )
    check_is("algorithm", algorithm, Algorithm)
    try:
        algorithm.check(module)
    except ValueError as error:
        if next(module.parameters(), None) is not None:
            raise
        name = type(module).__name__
        raise ValueError(
            f"{name} has no parameters yet, and {type(algorithm).__name__} needs to see them when {name} is wrapped; "
            "make its layers in `__init__`, rather than in `setup`."
        ) from error
