"""Checkpoint files: written whole or not at all, and found again after a crash."""

from __future__ import annotations

import os
import warnings
import zipfile
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins.io import TorchCheckpointIO

from lightning_spectral.errors import SpectralWarning


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes beside the checkpoint first, to ``<name>.part``, and renames once everything is on the disk.

    Whenever the process is killed, or the power fails, the file of a checkpoint's name is a whole one: the new one, or
    the one that was there before. Lightning's own plugin writes to the system's temporary folder and moves the file,
    which copies it, and can be interrupted, where that folder is another file system.

    `FederatedModule` installs it where the Trainer has Lightning's own; it reads and writes the same format. Paths
    with a protocol (``s3://...``) are left to Lightning.

    Example:
        >>> trainer = pl.Trainer(plugins=[AtomicCheckpointIO()], logger=False, enable_checkpointing=False)
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        """Write a checkpoint.

        Raises:
            TypeError: If ``storage_options`` is given.
        """
        if storage_options is not None or "://" in str(path):
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        target = Path(path)  # not resolved: a link is replaced, and its target stays
        target.parent.mkdir(parents=True, exist_ok=True)
        part = target.with_name(f"{target.name}.part")  # one name, so that what a crash left is overwritten
        with part.open("wb") as file:
            torch.save(checkpoint, file)
            file.flush()
            os.fsync(file.fileno())
        part.replace(target)
        _sync_folder(target.parent)


def write_whole_files(trainer: pl.Trainer) -> None:
    """Have a Trainer's checkpoints written by `AtomicCheckpointIO`, unless the user has chosen a plugin."""
    if type(trainer.strategy.checkpoint_io) is TorchCheckpointIO:
        trainer.strategy.checkpoint_io = AtomicCheckpointIO()


def latest_checkpoint(folder: str | Path) -> str | None:
    """The newest whole checkpoint of a folder, for ``fit(..., ckpt_path=)``.

    Truncated or damaged files are skipped, with a warning.

    Args:
        folder: Where a ``ModelCheckpoint`` writes; it need not exist yet.

    Returns:
        A path, or ``None`` if there is no whole checkpoint: ``fit`` then starts anew.

    Example:
        >>> latest_checkpoint("a folder that is not there")
    """
    for path in sorted(filter(Path.exists, Path(folder).glob("*.ckpt")), key=_age):  # a broken link does not exist
        if _is_whole(path):
            return str(path)
        warnings.warn(f"{path} is not a whole checkpoint and is skipped; delete it.", SpectralWarning, stacklevel=2)
    return None


def _age(path: Path) -> tuple[float, str]:
    """Sort key: newest first, then by name."""
    return -path.stat().st_mtime_ns, path.name


def _is_whole(path: Path) -> bool:
    """A checkpoint is a zip archive: its directory is at the end, and every entry has a checksum."""
    try:
        with zipfile.ZipFile(path) as archive:
            return archive.testzip() is None
    except (zipfile.BadZipFile, OSError, EOFError):
        return False


def _sync_folder(folder: Path) -> None:
    """Write the new name itself to the disk; not every system can."""
    if not hasattr(os, "O_DIRECTORY"):
        return
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
