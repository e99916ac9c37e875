"""Finds out before a run trains whether its checkpoints can be written, and what in them cannot."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from lightning_spectral.plugin.lightning.saved_modules import HPARAMS

REMEDIES = {
    "callbacks": "leave it out of what that callback's `state_dict` returns",
    "state_dict": "leave it out of what your module's `state_dict` or `get_extra_state` returns",
    HPARAMS: "leave it out: self.save_hyperparameters(ignore=[...])",
}
OTHERWISE = "leave it out of what `on_save_checkpoint` adds"


def check_can_be_saved(checkpoint: Mapping[str, Any]) -> None:
    """Pickle a checkpoint without the bytes of its tensors.

    Raises:
        ValueError: If something in it cannot be pickled, with its place.

    Example:
        >>> check_can_be_saved({"state_dict": {"w": torch.ones(3)}, "epoch": 0})
        >>> check_can_be_saved({"callbacks": {"Mine": [1, lambda: 2]}})  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ...
        ValueError: The run could not save a checkpoint: checkpoint['callbacks']['Mine'][1] cannot be pickled, ...
    """
    if (error := _error(checkpoint)) is None:
        return
    keys, value = _place(checkpoint)
    remedy = REMEDIES.get(keys[0], OTHERWISE) if keys else OTHERWISE
    raise ValueError(
        f"The run could not save a checkpoint: checkpoint{''.join(f'[{key!r}]' for key in keys)} cannot be pickled, "
        f"got {type(value).__name__}; {remedy}, or train without checkpoints: Trainer(enable_checkpointing=False). "
        f"{type(error).__name__}: {error}"
    ) from error


def _error(value: Any) -> Exception | None:
    try:
        _TrialPickler(_Nowhere(), protocol=2).dump(value)  # torch's protocol
    except Exception as error:  # whatever `__reduce__` and `__getstate__` raise
        return error
    return None


def _place(value: Any) -> tuple[list[Any], Any]:
    """Where in nested containers the first value is that cannot be pickled, and that value."""
    for key, entry in _entries(value):
        if _error(entry) is not None:
            inner, found = _place(entry)
            return [key, *inner], found
    return [], value


def _entries(value: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(value, Mapping):
        yield from value.items()
    elif isinstance(value, list | tuple):
        yield from enumerate(value)


class _TrialPickler(pickle.Pickler):
    """Treats tensors and their storages as written, as torch writes them outside of the pickle."""

    def persistent_id(self, value: Any) -> str | None:
        return "elsewhere" if type(value) in (torch.Tensor, nn.Parameter) or torch.is_storage(value) else None


class _Nowhere:
    """A file that forgets what is written to it."""

    def write(self, data: Any) -> int:
        return len(data)
