"""Trainers that write and print nothing, alone or within another Trainer's run."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import SingleDeviceStrategy


def quiet_trainer(like: Trainer, **settings: Any) -> Trainer:
    """Make a silent Trainer, with some settings, that has the device and precision of another."""
    own = {
        "strategy": _StaysOnDevice(like.strategy.root_device, like.accelerator, precision_plugin=like.precision_plugin),
        "num_sanity_val_steps": 0,
        "use_distributed_sampler": False,
        "detect_anomaly": torch.is_anomaly_enabled(),
        "default_root_dir": like.default_root_dir,
    }
    return silent_trainer(**{**own, **settings})


def silent_trainer(kind: type[Trainer] = Trainer, **settings: Any) -> Trainer:
    """Make a Trainer without loggers, checkpoints, bars, summaries and remarks, unless the settings say otherwise."""
    silent = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    with silence(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return kind(**{**silent, **settings})


@contextmanager
def silence() -> Iterator[None]:
    """Make Lightning log only errors within the block, and restore the levels of its loggers afterwards.

    Example:
        >>> with silence():
        ...     logging.getLogger("lightning.pytorch").level == logging.ERROR
        True
    """
    loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "lightning.fabric")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


class _StaysOnDevice(SingleDeviceStrategy):
    """Leaves module and optimizers where they are when a fit ends, since the device is the other Trainer's."""

    def teardown(self) -> None: ...  # Lightning's own would move the module to the CPU and empty the device's cache
