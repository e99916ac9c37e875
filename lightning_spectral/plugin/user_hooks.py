"""The hooks of a user's LightningModule: which are honoured, where they run, and where what they log goes."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, TypeVar

import lightning.pytorch as pl

from lightning_spectral.plugin.host import Share

T = TypeVar("T")

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
# warns if the latter does while there is a data module, so the wrapper has such a hook exactly when the user's module
# does.
BATCH_HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")


def check_user_module(module: pl.LightningModule) -> None:
    """Raise ``ValueError`` with all that federated training cannot honour."""
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
            setattr(
                module, hook, lambda batch, *args, own=own: batch if isinstance(batch, Share) else own(batch, *args)
            )


def only_or_all(found: list[T]) -> T | list[T] | None:
    """What ``LightningModule.lr_schedulers`` and ``optimizers`` return: the only one, or all; ``None`` for none."""
    return found[0] if len(found) == 1 else found or None
