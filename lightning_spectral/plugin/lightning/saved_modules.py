"""The modules in a checkpoint: the arguments to build them with, and which entries belong to which module."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any, TypeVar

import lightning.pytorch as pl
import torch
from lightning.pytorch.core.mixins import hparams_mixin

from lightning_spectral.plugin.lightning.checkpoint_files import check_loadable, check_tensors

ModuleT = TypeVar("ModuleT", bound=pl.LightningModule)
HPARAMS = pl.LightningModule.CHECKPOINT_HYPER_PARAMS_KEY
ARGUMENTS, OF_MODELS = "federation_arguments", "federation_models"
OF_THE_RUN = ("optimizer_states", "lr_schedulers", "loops", "callbacks")


def given_arguments() -> dict[str, Any]:
    """The arguments of the federation that LightningCLI is building; empty outside of LightningCLI."""
    given = getattr(hparams_mixin, "_given_hyperparameters", None)  # there is no public way to ask
    return dict(given.get() or {}) if given is not None else {}


def write_arguments(checkpoint: dict[str, Any], given: Mapping[str, Any]) -> None:
    """Record in a checkpoint how to build the federation, if that is known.

    What Lightning has put there is what loggers get, which are not arguments.
    """
    for entry in (ARGUMENTS, f"{ARGUMENTS}_name"):
        checkpoint.pop(entry, None)
    if given:
        checkpoint[ARGUMENTS] = dict(given)


def write_hparams(checkpoint: dict[str, Any], module: pl.LightningModule) -> None:
    """Record a user's hyper-parameters in a checkpoint, as Lightning does for the module that it trains."""
    if not (hparams := module.hparams):
        return
    if hasattr(module, "_hparams_name"):
        checkpoint[module.CHECKPOINT_HYPER_PARAMS_NAME] = module._hparams_name
    checkpoint[module.CHECKPOINT_HYPER_PARAMS_KEY] = dict(hparams) if isinstance(hparams, dict) else hparams
    if not isinstance(hparams, dict):  # of OmegaConf
        checkpoint[module.CHECKPOINT_HYPER_PARAMS_TYPE] = type(hparams)


def load_user_module(
    path: Any,
    kind: type[ModuleT],
    name: str = "",
    /,
    *,
    map_location: Any = None,
    weights_only: bool = True,
    **arguments: Any,
) -> ModuleT:
    """Load your own module, with the server's weights, from a checkpoint of a federation.

    For a federation of one model this is ``kind.load_from_checkpoint(path)``, but the file is checked before anything
    reads it. Of several models, whose weights have their names in the checkpoint, it takes one.

    Args:
        path: The checkpoint.
        kind: Class of your module.
        name: Name of the model; needed if there are several.
        map_location: Where to put tensors, as for `torch.load`; by default where they were when they were saved, or on
            the CPU if this machine has no such device.
        weights_only: Whether to refuse to unpickle anything but tensors and plain values. Hyper-parameters of your
            module that are other objects need ``False``, which can execute code: use it only for files that you trust.
        **arguments: Arguments of your module that it has not saved with ``save_hyperparameters``, or that should
            differ; ``strict``, as for ``load_from_checkpoint``.

    Raises:
        ValueError: If the file is empty, damaged or not of a federation, or ``name`` is not among its models.
        TypeError: If an argument of your module is missing.

    Example:
        >>> import tempfile
        >>> import lightning_spectral as ls
        >>> from lightning_spectral.models import MLP, LitClassifier
        >>> examples = torch.utils.data.TensorDataset(torch.randn(40, 6), torch.randint(3, (40,)))
        >>> data = ls.FederatedDataModule(examples, ls.IIDPartitioner(num_clients=4))
        >>> model = ls.FederatedModule(LitClassifier(MLP(6, [8], 3), num_classes=3, lr=0.2), clients_per_round=2)
        >>> quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
        >>> trainer = pl.Trainer(max_epochs=1, accelerator="cpu", enable_model_summary=False, **quiet)
        >>> trainer.fit(model, data)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     trainer.save_checkpoint(f"{folder}/last.ckpt")
        ...     lit = ls.plugin.load_user_module(f"{folder}/last.ckpt", LitClassifier, model=MLP(6, [8], 3))
        >>> lit.lr, torch.equal(lit.model.head.weight, model.module.model.head.weight)
        (0.2, True)
    """
    _check_kind(path, kind)
    check_loadable(path)
    map_location = map_location or _if_available
    checkpoint = torch.load(path, map_location, weights_only=weights_only)
    check_tensors(checkpoint, path)
    buffer = io.BytesIO()
    torch.save(_of_one_model(checkpoint, name), buffer)
    buffer.seek(0)
    return kind.load_from_checkpoint(buffer, map_location, weights_only=weights_only, **arguments)


def _check_kind(path: Any, kind: Any) -> None:
    if isinstance(path, type):
        raise TypeError(
            f"The checkpoint comes first, then the class, got the class {path.__name__} first; write "
            f"load_user_module({kind!r}, {path.__name__})."
        )
    if not (isinstance(kind, type) and issubclass(kind, pl.LightningModule)):
        what = f"a {type(kind).__name__}" if isinstance(kind, pl.LightningModule) else repr(kind)
        raise TypeError(f"`kind` must be the class of your LightningModule, such as LitModel, got {what}.")


def _if_available(storage: torch.UntypedStorage, location: str) -> torch.UntypedStorage | None:
    """The CPU for a tensor of a device that this machine lacks, otherwise torch's own choice."""
    backend = getattr(torch, torch.device(location).type, None)
    return None if backend is None or backend.is_available() else storage


def _of_one_model(checkpoint: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The checkpoint of one of its modules alone, as Lightning would have written it."""
    if "federation" not in checkpoint:
        raise ValueError("The checkpoint was not written by a federation; use the class's own `load_from_checkpoint`.")
    models = checkpoint.get(OF_MODELS, {"": {}})
    if name not in models:
        asked = f"has no model {name!r}" if name else "is of several models"
        names = f"give the name of one of them: {', '.join(models)}" if all(models) else "leave the name out"
        raise ValueError(f"The checkpoint {asked}; {names}.")
    prefix = f"models.{name}." if name else ""
    weights = {key.removeprefix(prefix): t for key, t in checkpoint["state_dict"].items() if key.startswith(prefix)}
    kept = {k: v for k, v in checkpoint.items() if k not in OF_THE_RUN and not k.startswith("federation")}
    return {**kept, **models[name], "state_dict": weights}
