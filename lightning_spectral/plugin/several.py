"""MultiModelModule: several models, trained by the same clients under one Trainer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from inspect import signature
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

from lightning_spectral.arguments import Whole
from lightning_spectral.errors import check_is
from lightning_spectral.participation import Population, Sampler
from lightning_spectral.plugin.callbacks.evaluation import SUFFIX
from lightning_spectral.plugin.checks import check_datamodule
from lightning_spectral.plugin.data import MultiModelDataModule, ServerData
from lightning_spectral.plugin.hooks import FederatedHooks
from lightning_spectral.plugin.logs import forwarded_logging
from lightning_spectral.plugin.module import FederatedModule
from lightning_spectral.plugin.settings import config_of, shown_hparams
from lightning_spectral.plugin.user_hooks import BATCH_HOOKS, Share, is_overridden
from lightning_spectral.protocol.per_client import PerClient, assign, check_num_entries, check_per_client


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
        self.processors = check_per_client("processors", processors, PROCESSORS)
        self.unavailable = _plain_unavailable({} if unavailable is None else unavailable, models)
        self.seed: int = Whole()("seed", seed)
        self._create_federation(models)
        hparams = {name: shown_hparams(member.module) for name, member in self.members.items()}
        self.save_hyperparameters({"federation": self.settings(), "user_module": hparams})
        self._fix(signature(MultiModelModule).parameters)

    @property
    def multi_data(self) -> MultiModelDataModule:
        return check_datamodule(self.trainer, MultiModelDataModule)

    def data_of(self, name: str) -> ServerData:
        modules = self.multi_data.modules
        if modules.keys() != self.members.keys():
            raise ValueError(
                f"MultiModelModule needs data of the models {sorted(self.members)}, got {sorted(modules)}; give each "
                "model data under its own name."
            )
        return modules[name]

    def population(self) -> Population:
        """Which client can train which model."""
        directories = [self.clients_of(name, member.algorithm) for name, member in self.members.items()]
        num_clients = self.multi_data.num_clients
        check_num_entries("processors", self.processors, num_clients)
        processors = assign(self.processors, num_clients, self.seed, "processors")
        counts = torch.tensor([int(processors.of(client)) for client in range(num_clients)])
        available = torch.stack([self.available_for(name) for name in self.members], dim=1)
        return Population(torch.stack([clients.sizes for clients in directories], dim=1), counts, available)

    def available_for(self, name: str) -> Tensor:
        num_clients = self.multi_data.num_clients
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
        member.log_suffix = f"{SUFFIX}{own_index}" if count > 1 else ""
        try:
            with forwarded_logging(member.module, member):
                yield member.module, (*args[:position], own_index)
        finally:
            member.log_suffix = ""

    def _loader(self, index: int) -> tuple[str, int, int]:
        """The model of one of all evaluation loaders, the loader's index in it, and how many loaders it has."""
        return self.multi_data.evaluated("test" if self.trainer.testing else "validate")[index]

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
            data = {name: self.data_or_none(name) for name in self.members}
            own |= {name: one for name, one in data.items() if one is not None and is_overridden(one, hook)}
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


PROCESSORS = Whole(at_least=1, hint="leave out clients that train nothing")


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
        if model.privacy is not None:
            raise ValueError(f"`privacy` is for one model, but {name!r} is one of several; leave it out.")
        if model.participation is not None:
            raise ValueError(
                f"MultiModelModule decides who trains which model, but {name!r} has {model.participation} of its own; "
                "leave out its `clients_per_round` and `participation`."
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
