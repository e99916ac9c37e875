"""Checkpoint files: written whole or not at all, and found again after a crash."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins.io import TorchCheckpointIO

from lightning_spectral.errors import SpectralWarning
from lightning_spectral.plugin.lightning.archive import DamagedFile
from lightning_spectral.plugin.lightning.checkpoint_archive import check_contents, check_loadable, saved_progress

NOTHING_NEW = "federation_nothing_new"  # marks the checkpoint of a run that ended before it began


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes each checkpoint to ``<name>.part`` first, and renames that file once everything is on the disk.

    Even if the process is killed or the power fails, the file under the checkpoint's name is complete: either the new
    one or the one that was there before. Lightning's own plugin writes to the system's temporary folder and moves the
    file. If that folder is on another file system, moving means copying, which can be interrupted.

    A file is checked before it is loaded, because loading alone compares no checksums: a damaged file could be loaded
    as other weights. That happens before Lightning reads anything of the file.

    A run that fails before it has restored or trained anything writes nothing: it might replace a file that holds
    rounds.

    `FederatedModule` installs it if the Trainer has Lightning's own plugin; it reads and writes the same format. Paths
    with a protocol (``s3://...``) are left to Lightning.

    Example:
        >>> trainer = pl.Trainer(plugins=[AtomicCheckpointIO()], logger=False, enable_checkpointing=False)
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        if NOTHING_NEW in checkpoint:
            return
        if storage_options is not None or "://" in str(path):
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        target = Path(path)  # not resolved: a link is replaced, and its target stays
        target.parent.mkdir(parents=True, exist_ok=True)
        part = target.with_name(f"{target.name}.part")  # a fixed name, so that what a crash left behind is overwritten
        with part.open("wb") as file:
            torch.save(checkpoint, file)
            file.flush()
            os.fsync(file.fileno())
        part.replace(target)
        _sync_folder(target.parent)

    def load_checkpoint(self, path: Any, *args: Any, **options: Any) -> dict[str, Any]:
        check_loadable(path)
        return super().load_checkpoint(path, *args, **options)


def handle_whole_files(trainer: pl.Trainer) -> None:
    """Have a Trainer's checkpoints written and read by `AtomicCheckpointIO`, unless the user has chosen a plugin."""
    if type(trainer.strategy.checkpoint_io) is TorchCheckpointIO:
        trainer.strategy.checkpoint_io = AtomicCheckpointIO()


def latest_checkpoint(folder: str | Path) -> str | None:
    """Find the checkpoint with the most rounds in a folder, for ``fit(..., ckpt_path=)``.

    The number of rounds is read from the file: neither its name nor its age matters, so a folder may be copied. A file
    that cannot be resumed from, because it is damaged or holds only weights, is skipped with a warning. Nothing in a
    file is executed.

    Args:
        folder: Where a ``ModelCheckpoint`` of one run writes. Sub-folders are searched too, because a metric with a
            slash in its name creates them. The folder need not exist yet. If it is a file, that file is returned.

    Returns:
        A path, or ``None`` if there is no such checkpoint: ``fit`` then starts from scratch.

    Raises:
        ValueError: If it is a file, and cannot be resumed from.

    Example:
        >>> latest_checkpoint("a folder that is not there")
    """
    if Path(folder).is_file():
        return _checked(Path(folder))
    progress: dict[Path, tuple[int, int]] = {}
    for path in sorted(filter(Path.is_file, Path(folder).rglob("*.ckpt"))):  # a dangling link is not a file
        with _skipping(path):
            progress[path] = saved_progress(path)
    for path in sorted(progress, key=lambda path: (*progress[path], path.stat().st_mtime_ns), reverse=True):
        with _skipping(path):
            check_contents(path)  # for as few files as possible, because it reads them completely
            return str(path)
    return None


def _checked(path: Path) -> str:
    """A single file, which is not skipped: a run that starts from scratch in its place would be a surprise."""
    try:
        saved_progress(path)
        check_contents(path)
    except DamagedFile as error:
        raise ValueError(f"{path} cannot be resumed from: {error}; give the folder to find an intact one.") from error
    return str(path)


@contextmanager
def _skipping(path: Path) -> Iterator[None]:
    """Warn that a file is skipped if it turns out to be damaged."""
    try:
        yield
    except DamagedFile as error:
        warnings.warn(f"{path} cannot be resumed from and is skipped: {error}.", SpectralWarning, stacklevel=4)


def _sync_folder(folder: Path) -> None:
    """Write the new name itself to the disk, if the system can."""
    if not hasattr(os, "O_DIRECTORY"):
        return
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
