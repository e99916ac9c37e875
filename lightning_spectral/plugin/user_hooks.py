"""What a user's hooks and callbacks get of a federation, and which hooks are honoured, and where they run and log."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from types import MappingProxyType
from typing import Any, TypeVar

import lightning.pytorch as pl
from torch import nn
from torch.nn.parameter import is_lazy

from lightning_spectral.algorithms import Algorithm
from lightning_spectral.participation import Population, Sampler, UniformParticipation
from lightning_spectral.participation.cohorts import ClientDirectory
from lightning_spectral.protocol.records import WorkUnit

T = TypeVar("T")

WHERE = (
    "A round is one batch for the Trainer: the clients that train in it, `batch.units`, without examples and outputs. "
    "Hooks of your own LightningModule get each client's batches and outputs; a RoundCallback follows rounds and "
    "clients, and `trainer.callback_metrics['fl/loss']` has a round's loss once it has ended."
)


class Share:
    """The units whose turns one process takes in a round, which Lightning sees as a batch.

    A plain class, because Lightning looks for tensors in batches that are tuples or dataclasses, and rebuilds them.

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

    def __getitem__(self, key: Any) -> Any:
        """Say what this is to a callback that unpacks or indexes its batches."""
        raise TypeError(f"There is no `batch[{key!r}]`. {WHERE}")

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"There is no `batch.{name}`. {WHERE}")


class NoOutputs(dict[str, Any]):
    """The outputs of a round: none, which a callback that reads some is told."""

    def __missing__(self, key: str) -> Any:
        raise KeyError(f"There is no `outputs[{key!r}]`. {WHERE}")

    def copy(self) -> NoOutputs:
        """Lightning passes on a copy of what a step returns."""
        return self


class Host:
    """The module that a Trainer fits, and which trains one model or several: `FederatedHooks`."""

    seed: int
    participation: UniformParticipation | Sampler | None

    def data_of(self, name: str) -> Any:
        """Return the `ServerData` of one model's clients."""
        raise NotImplementedError

    def clients_of(self, name: str, algorithm: Algorithm) -> ClientDirectory:
        """What is known of one model's clients, with the capacities that an algorithm gives them."""
        raise NotImplementedError

    def population(self) -> Population:
        """Which client can train which model."""
        raise NotImplementedError


def as_host(module: nn.Module | None, claim: str, otherwise: str = "") -> Any:
    """A `Host` as it is; raise ``TypeError`` for another module, with what needs one and another way out."""
    if isinstance(module, Host):
        return module
    raise TypeError(
        f"{claim}, but {type(module).__name__} trains on batches; wrap it: "
        f"FederatedModule(module, clients_per_round=...){otherwise}."
    )


# Hooks of a client's local steps run while the module is that client: see `client.local_loop`. The hooks below cannot.
REFUSED_HOOKS: Mapping[str, str] = MappingProxyType(
    {
        "lr_scheduler_step": "schedulers step once per round; remove the override",
        "configure_model": "sub-models are made from the finished module; build its layers in `__init__`",
        "configure_sharded_model": "sub-models are made from the finished module; build its layers in `__init__`",
        "training_epoch_end": "it is gone from Lightning 2; use `on_train_epoch_end`, and keep outputs yourself",
        "validation_epoch_end": "it is gone from Lightning 2; use `on_validation_epoch_end`, and keep outputs yourself",
        "test_epoch_end": "it is gone from Lightning 2; use `on_test_epoch_end`, and keep outputs yourself",
        "train_dataloader": "clients' data comes from FederatedDataModule(train, partitioner)",
        "val_dataloader": "pass the data to FederatedDataModule(val=...)",
        "test_dataloader": "pass the data to FederatedDataModule(test=...)",
        "predict_dataloader": "pass a dataloader to `Trainer.predict`",
        "on_validation_model_eval": "remove the override; the aggregated model is put into eval mode",
        "on_validation_model_train": "remove the override; every module returns to the mode it had",
        "on_validation_model_zero_grad": "remove the override; the server's gradients belong to the round",
        "on_test_model_eval": "remove the override; the aggregated model is put into eval mode",
        "on_test_model_train": "remove the override; every module returns to the mode it had",
        "on_predict_model_eval": "remove the override; the aggregated model is put into eval mode",
    }
)

# Hooks that move batches. Lightning asks the data module if that overrides a hook, else the module that it trains. It
# warns if the latter does while there is a data module, so the wrapper has such a hook exactly when the module does.
BATCH_HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")


def check_user_module(module: pl.LightningModule) -> None:
    """Raise ``ValueError`` with all that federated training cannot honour."""
    if lazy := [name for name, parameter in module.named_parameters() if is_lazy(parameter)]:
        raise ValueError(f"Lazy layers have no weight yet: {', '.join(lazy)}; run one forward pass first.")
    name = type(module).__name__
    problems = [f"`{hook}`: {remedy}." for hook, remedy in REFUSED_HOOKS.items() if is_overridden(module, hook)]
    if not is_overridden(module, "training_step"):
        problems.append("`training_step` is missing: it is what clients run.")
    elif "dataloader_iter" in inspect.signature(module.training_step).parameters:
        problems.append("`training_step(dataloader_iter)`: take `batch` (and `batch_idx`) instead.")
    if problems:
        raise ValueError(f"{name} cannot be trained in a federation as it is:\n  - " + "\n  - ".join(problems))


def is_overridden(module: pl.LightningModule | pl.LightningDataModule, hook: str) -> bool:
    """Whether the class of a module, or of a data module for one of `BATCH_HOOKS`, defines a hook itself.

    Hooks that are unknown to this version of Lightning do not count.
    """
    return getattr(type(module), hook, None) is not getattr(pl.LightningModule, hook, None)


def defines(module: Any, hook: str) -> bool:
    """Whether a module has a hook of its own, by its class or by an attribute of the instance."""
    return hook in vars(module) or is_overridden(module, hook)


def as_in_a_step(batch: Any, module: pl.LightningModule, trainer: pl.Trainer) -> Any:
    """A batch as a user's steps get it: of the right type, on the device, and passed through the module's hooks."""
    batch = module.on_before_batch_transfer(trainer.precision_plugin.convert_input(batch), 0)
    batch = module.transfer_batch_to_device(batch, trainer.strategy.root_device, 0)
    return module.on_after_batch_transfer(batch, 0)


def adopt_batch_hooks(client: pl.LightningModule, data: pl.LightningDataModule) -> None:
    """Give the user's module, while it is a client, a data module's batch hooks, which come first in Lightning too."""
    for hook in BATCH_HOOKS:
        if is_overridden(data, hook):
            setattr(client, hook, getattr(data, hook))


def for_evaluation_only(module: pl.LightningModule | pl.LightningDataModule, of: Any) -> None:
    """Let the batch hooks of an object act on evaluation batches only: Lightning moves a round's batch too."""
    for hook in BATCH_HOOKS:
        if is_overridden(of, hook):
            own = getattr(type(of), hook).__get__(of)
            setattr(module, hook, lambda one, *args, own=own: one if isinstance(one, Share) else own(one, *args))


def redirect(module: pl.LightningModule, methods: Mapping[str, Callable[..., Any]]) -> None:
    """Replace some of Lightning's methods by other functions, until the module is restored.

    If its class overrides one, this still acts, and what it passes to ``super()`` goes to the other function: a class
    is put between the user's and Lightning's, whose own ``log_dict`` calls ``log`` for each entry.
    """
    vars(module).update({name: method for name, method in methods.items() if not is_overridden(module, name)})
    if between := tuple((name, method) for name, method in methods.items() if is_overridden(module, name)):
        kind: Any = type(module)
        module.__class__ = _with_class_between(kind, between)


@lru_cache(maxsize=32)  # a module is redirected in every turn
def _with_class_between(kind: Any, methods: tuple[tuple[str, Callable[..., Any]], ...]) -> Any:
    between = type("Redirected", (pl.LightningModule,), {name: staticmethod(method) for name, method in methods})
    return type(kind.__name__, (kind, between), {"__module__": kind.__module__})


@contextmanager
def replaced(owner: Any, **attributes: Any) -> Iterator[None]:
    """Give an object other values of some attributes within the block."""
    own = {name: getattr(owner, name) for name in attributes}
    try:
        for name, value in attributes.items():
            setattr(owner, name, value)
        yield
    finally:
        for name, value in own.items():
            setattr(owner, name, value)


def only_or_all(found: list[T]) -> T | list[T] | None:
    """What ``LightningModule.lr_schedulers`` and ``optimizers`` return: the only one, or all; ``None`` for none."""
    return found[0] if len(found) == 1 else found or None
