"""Where, and in which precision, a Trainer lets clients train."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins.precision import Precision

from lightning_spectral.client.local_task import Placement
from lightning_spectral.plugin.lightning.user_hooks import is_overridden


def placement_of(trainer: pl.Trainer, device: torch.device, *hooked: Any) -> Placement:
    """The placement of clients in a Trainer's precision.

    Args:
        trainer: The Trainer.
        device: Device of the sub-models.
        *hooked: The module, and perhaps the data module, whose batch hooks act.
    """
    precision: Any = trainer.precision_plugin
    own = any(is_overridden(module, "transfer_batch_to_device") for module in hooked)
    scaler = getattr(precision, "scaler", None)
    return Placement(device, precision.convert_input, _forward_context(precision), own or device.type != "cpu", scaler)


def _forward_context(precision: Precision) -> Callable[[], AbstractContextManager[Any]]:
    """The context of a client's forward pass; none in full precision, since entering one takes time in every step."""
    names = ("train_step_context", "forward_context")
    is_plain = all(getattr(type(precision), name) is getattr(Precision, name) for name in names)
    return nullcontext if is_plain else precision.train_step_context
