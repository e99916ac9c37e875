"""Applies the precision of a Trainer where clients train, and not at the server."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins import DoublePrecision, HalfPrecision
from torch.amp.grad_scaler import GradScaler


def convert_now(module: pl.LightningModule, precision_plugin: Any) -> None:
    """Convert a module as Lightning will, before weights are restored, so that these are not rounded to its old type.

    Only for plugins that change nothing but the type: others may replace layers, which must not happen twice.
    """
    if isinstance(precision_plugin, DoublePrecision | HalfPrecision):
        precision_plugin.convert_module(module)


@contextmanager
def full_precision(device: torch.device, dtype: torch.dtype) -> Iterator[None]:
    """Undo, within the block, the precision context that Lightning enters around a whole training step.

    A client enters it again only for its forward passes, as the batches of a plain Trainer would. Autocast's cache of
    converted weights, which Lightning 2.4 leaves on, would outlive these passes within a context: it stays off.
    True-half and true-double precision change the default type of floating-point tensors: ``dtype`` is restored.
    """
    inside = torch.get_default_dtype()
    if inside == dtype and not torch.is_autocast_enabled(device.type):
        yield
        return
    torch.set_default_dtype(dtype)
    try:
        with torch.autocast(device.type, enabled=False, cache_enabled=False):
            yield
    finally:
        torch.set_default_dtype(inside)


@contextmanager
def scaled_by(scaler: GradScaler | None, precision_plugin: Any) -> Iterator[None]:
    """Give Lightning's precision plugin another gradient scaler within the block, if it scales gradients at all.

    Clients scale their gradients with scalers of their own. The server's pseudo-gradient is not scaled, so Lightning
    must not divide it by a scale when the server steps; the scaler is then ``None``.
    """
    own = getattr(precision_plugin, "scaler", None)
    if own is None:
        yield
        return
    precision_plugin.scaler = scaler
    try:
        yield
    finally:
        precision_plugin.scaler = own
