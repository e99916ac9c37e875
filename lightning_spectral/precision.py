"""Where the precision of a Trainer acts, and where it must not: clients train in it, the server does not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def full_precision(device: torch.device, dtype: torch.dtype) -> Iterator[None]:
    """Undo, within the block, the precision context that Lightning enters around a whole training step.

    A client enters it again for its forward passes alone, as in a plain Trainer its batches would.

    Args:
        device: Device of the autocast to leave.
        dtype: The default type of floating-point tensors, which true-half and true-double precision change.
    """
    inside = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.autocast(device.type, enabled=False):
            yield
    finally:
        torch.set_default_dtype(inside)


@contextmanager
def unscaled(precision_plugin: Any) -> Iterator[None]:
    """Take the gradient scaler off Lightning's precision plugin within the block.

    Clients scale their gradients with scalers of their own. The pseudo-gradient of the server is not scaled, so
    Lightning must not divide it by a scale when the server steps.
    """
    scaler = getattr(precision_plugin, "scaler", None)
    if scaler is None:
        yield
        return
    precision_plugin.scaler = None
    try:
        yield
    finally:
        precision_plugin.scaler = scaler
