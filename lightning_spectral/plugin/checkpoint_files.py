"""Checkpoint files: written whole or not at all, checked before they are loaded, and found after a crash."""

from __future__ import annotations

import hashlib
import io
import os
import pickle
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar
from zipfile import ZipFile

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins.io import TorchCheckpointIO
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor

from lightning_spectral.errors import warn, writing
from lightning_spectral.protocol.exchange import digest

NOTHING_NEW = "federation_nothing_new"  # marks the checkpoint of a run that ended before it began
DIGEST = "federation_digest"  # of the tensors in a checkpoint
NEEDED = ("epoch", "global_step", "loops", "optimizer_states")
ModuleT = TypeVar("ModuleT", bound=pl.LightningModule)
HPARAMS = pl.LightningModule.CHECKPOINT_HYPER_PARAMS_KEY
ARGUMENTS, OF_MODELS = "federation_arguments", "federation_models"
OF_THE_RUN = ("optimizer_states", "lr_schedulers", "loops", "callbacks")


class DamagedFile(Exception):
    """The file is not a checkpoint that can be loaded; the message says why."""


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes each checkpoint to ``<name>.part`` first, and renames that file once everything is on the disk.

    Even if the process is killed or the power fails, the file under the checkpoint's name is complete: either the new
    one or the one that was there before. Lightning's own plugin writes to the system's temporary folder and moves the
    file. If that folder is on another file system, moving means copying, which can be interrupted.

    torch compares nothing when it loads a file, so a damaged one could be loaded as other weights. A file's checksums
    are therefore compared before it is loaded, and then the tensors with their digest, which is saved with them.

    A run that fails before it has restored or trained anything writes nothing, so that no rounds are replaced.

    `FederatedModule` installs it if the Trainer has Lightning's own plugin; it reads and writes the same format. Paths
    with a protocol (``s3://...``) are written and read by Lightning, with the digest.

    Example:
        >>> trainer = pl.Trainer(plugins=[AtomicCheckpointIO()], logger=False, enable_checkpointing=False)
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        if NOTHING_NEW in checkpoint:
            return
        checkpoint = {**checkpoint, DIGEST: digest_of_tensors(checkpoint)}
        if storage_options is not None or "://" in str(path):
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        target = Path(path)  # not resolved: a link is replaced, and its target stays
        part = target.with_name(f"{target.name}.part")  # a fixed name, so that what a crash left behind is overwritten
        with writing(target, "Choose another folder: Trainer(default_root_dir=...), or ModelCheckpoint(dirpath=...)."):
            target.parent.mkdir(parents=True, exist_ok=True)
            with part.open("wb") as file:
                torch.save(checkpoint, file)
                file.flush()
                os.fsync(file.fileno())
            part.replace(target)
        if hasattr(os, "O_DIRECTORY"):  # write the new name itself to the disk, if the system can
            descriptor = os.open(target.parent, os.O_RDONLY | os.O_DIRECTORY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)

    def load_checkpoint(self, path: Any, *args: Any, **options: Any) -> dict[str, Any]:
        check_loadable(path)
        checkpoint = super().load_checkpoint(path, *args, **options)
        with _refusing(path):
            _check_tensors(checkpoint)
        return checkpoint


def check_loadable(source: Any) -> None:
    """Check a checkpoint before anything loads it: its checksums, that torch can read it, and that it is not a script.

    It is a path or an opened file; paths with a protocol (``s3://...``) are not checked.

    Raises:
        ValueError: If it is not an intact checkpoint; the message names the file and says why.
    """
    if not isinstance(source, str | os.PathLike):
        position = source.tell()
        with _refusing("the given file"):
            _check_archive(source)
        source.seek(position)
    elif Path(source).is_dir():
        raise ValueError(f"{source} is a folder; latest_checkpoint({str(source)!r}) finds a checkpoint in it.")
    elif "://" not in str(source):
        with _refusing(source), suppress(pickle.UnpicklingError):
            _check_archive(source)
            _read(source, mmap=True)  # torch refuses some of what zipfile accepts


def digest_of_tensors(content: Any) -> str:
    """A digest of the tensors in nested containers: of their order, types, shapes and values."""
    hashed = hashlib.sha256()
    for tensor in _tensors(content):
        has_values = tensor.layout is torch.strided and not (tensor.is_meta or tensor.is_quantized)
        kind = f"{tensor.dtype} {tuple(tensor.shape)} {tensor.layout}"
        hashed.update((digest(tensor) if has_values else kind).encode())
    return hashed.hexdigest()


def _tensors(content: Any) -> Iterator[Tensor]:
    if isinstance(content, Tensor):
        yield content
    elif isinstance(content, Mapping | list | tuple):
        for inner in content.values() if isinstance(content, Mapping) else content:
            yield from _tensors(inner)


def latest_checkpoint(folder: str | Path) -> str | None:
    """Find the checkpoint with the most rounds in a folder, for ``fit(..., ckpt_path=)``.

    The number of rounds is read from the file: neither its name nor its age matters, so a folder may be copied. A file
    that cannot be resumed from, damaged or with weights only, is skipped with a warning. Nothing in a file is executed.

    Args:
        folder: Where a ``ModelCheckpoint`` of one run writes. Sub-folders are searched too, because a metric with a
            slash in its name creates them. The folder need not exist yet. If it is a file, that file is returned.

    Returns:
        A path, or ``None`` if there is none: ``fit`` then starts from scratch. A missing folder is reported.

    Raises:
        ValueError: If it is a pattern, or a file, and cannot be resumed from; or if an intact file holds objects that
            torch does not load without executing code, because starting from scratch would be a surprise.

    Example:
        >>> latest_checkpoint("a folder that is not there")
    """
    if (path := Path(folder)).is_file():  # not skipped: a run that starts from scratch instead would be a surprise
        with _refusing(path, "cannot be resumed from", "give the folder to find an intact one"):
            saved_progress(path)
            _check_contents(path)
        return str(path)
    if not path.exists():
        if any(letter in str(folder) for letter in "*?["):
            raise ValueError(f"`folder` is searched as it is, got the pattern {str(folder)!r}; leave the pattern out.")
        rank_zero_info(f"There is nothing at {folder}, so there is no checkpoint to resume from.")
    progress: dict[Path, tuple[int, int]] = {}
    for path in sorted(filter(Path.is_file, Path(folder).rglob("*.ckpt"))):  # a dangling link is not a file
        with _skipping(path):
            progress[path] = saved_progress(path)
    for path in sorted(progress, key=lambda path: (*progress[path], path.stat().st_mtime_ns), reverse=True):
        with _skipping(path):
            _check_contents(path)  # for as few files as possible, because it reads them completely
            return str(path)
    return None


def saved_progress(path: Path) -> tuple[int, int]:
    """The server's steps and Lightning's epoch in a Trainer's checkpoint; the bytes of tensors are not read."""
    try:
        content = _read(path, mmap=True)
    except pickle.UnpicklingError as error:
        _check_archive(path)  # which raises, if it is damage that looks like a class that is not allowed
        raise ValueError(
            f"{path} holds objects other than tensors and plain values. Allow their classes, if you trust the file: "
            "torch.serialization.add_safe_globals([...]); or leave them out of what your module saves."
        ) from error
    if missing := [name for name in NEEDED if not isinstance(content, dict) or name not in content]:
        raise DamagedFile(f"it has no {', '.join(missing)}, and a run is resumed from them, not from weights alone")
    for name in ("global_step", "epoch"):
        if not isinstance(content[name], int):
            raise DamagedFile(f"its {name} must be a whole number, got {type(content[name]).__name__}")
    return content["global_step"], content["epoch"]


def _check_contents(path: Path) -> None:
    """Read all of a checkpoint, and compare it with its checksums and its digest."""
    _check_archive(path)
    _check_tensors(_read(path, mmap=False))


def _check_archive(source: Any) -> None:
    with _opened(source) as archive:
        if (damaged := archive.testzip()) is not None:
            raise DamagedFile(f"the checksum of {damaged} does not match")


def _check_tensors(checkpoint: Any) -> None:
    """Compare the tensors of a checkpoint that was loaded with the digest in it, if any."""
    saved = checkpoint.get(DIGEST) if isinstance(checkpoint, Mapping) else None
    if saved is not None and saved != digest_of_tensors(checkpoint):
        raise DamagedFile(f"its tensors are not those that were saved (if you changed them, delete its {DIGEST!r})")


def _read(path: str | os.PathLike[str], *, mmap: bool) -> Any:
    """Load a checkpoint without executing anything in it; raise ``UnpicklingError`` if it holds other objects."""
    with _opened(path):
        return torch.load(path, "cpu", weights_only=True, mmap=mmap)


@contextmanager
def _opened(source: Any) -> Iterator[ZipFile]:
    """The archive of a checkpoint; errors of a damaged one, of zipfile, pickle or Unicode, become a `DamagedFile`."""
    try:
        with ZipFile(source) as archive:
            # some versions of torch execute what TorchScript has saved, whatever `weights_only` is
            if any(name.lower().endswith("constants.pkl") for name in archive.namelist()):
                raise DamagedFile("it is a TorchScript archive, which executes code when it is loaded")
            yield archive
    except (DamagedFile, FileNotFoundError, pickle.UnpicklingError):
        raise
    except Exception as error:
        raise DamagedFile(f"{type(error).__name__}: {error}".splitlines()[0]) from error


@contextmanager
def _skipping(path: Path) -> Iterator[None]:
    """Warn that a file is skipped if it turns out to be damaged."""
    try:
        yield
    except DamagedFile as error:
        warn(f"{path} cannot be resumed from and is skipped: {error}.", 4)


@contextmanager
def _refusing(
    name: Any,
    what: str = "is empty or not a whole checkpoint",
    remedy: str = "latest_checkpoint(folder) finds the last whole one of a folder",
) -> Iterator[None]:
    """Raise an error that names the file and the remedy if the file turns out to be damaged."""
    try:
        yield
    except DamagedFile as error:
        raise ValueError(f"{name} {what}: {error}; {remedy}.") from error


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
    if isinstance(path, type):
        raise TypeError(
            f"The checkpoint comes first, then the class, got the class {path.__name__} first; write "
            f"load_user_module({kind!r}, {path.__name__})."
        )
    if not (isinstance(kind, type) and issubclass(kind, pl.LightningModule)):
        what = f"a {type(kind).__name__}" if isinstance(kind, pl.LightningModule) else repr(kind)
        raise TypeError(f"`kind` must be the class of your LightningModule, such as LitModel, got {what}.")
    check_loadable(path)
    map_location = map_location or _if_available
    checkpoint = torch.load(path, map_location, weights_only=weights_only)
    with _refusing(path):
        _check_tensors(checkpoint)
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
    buffer = io.BytesIO()  # the checkpoint of this model alone, as Lightning would have written it
    torch.save({**kept, **models[name], "state_dict": weights}, buffer)
    buffer.seek(0)
    return kind.load_from_checkpoint(buffer, map_location, weights_only=weights_only, **arguments)


def _if_available(storage: torch.UntypedStorage, location: str) -> torch.UntypedStorage | None:
    """The CPU for a tensor of a device that this machine lacks, otherwise torch's own choice."""
    backend = getattr(torch, torch.device(location).type, None)
    return None if backend is None or backend.is_available() else storage
