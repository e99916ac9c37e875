"""Adds the callbacks that make up a federation's rounds to those of a Trainer."""

from __future__ import annotations

from collections.abc import Iterable

import lightning.pytorch as pl
from lightning.pytorch.loggers import WandbLogger
from lightning.pytorch.profilers import PassThroughProfiler

from lightning_spectral.plugin.callbacks import Aggregation, RoundLines, SubmodelSampling, SVDRefresh, WandbRounds
from lightning_spectral.plugin.checks.trainer import check_callbacks
from lightning_spectral.plugin.lightning.round_counting import RoundsAsSteps
from lightning_spectral.plugin.lightning.stages import RoundStages


def with_boundaries(trainer: pl.Trainer, own: Iterable[pl.Callback]) -> list[pl.Callback]:
    """The callbacks of the user's modules, then those boundaries of a round that the Trainer does not have yet."""
    own = list(own)
    callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    if trainer.state.fn == "fit":
        check_callbacks([*callbacks, *own])  # before Lightning refuses some of them with its own messages
    boundaries = [*_watchers(trainer), RoundLines(), RoundsAsSteps(), SVDRefresh(), SubmodelSampling(), Aggregation()]
    present = tuple(type(b) for b in boundaries if any(isinstance(c, type(b)) for c in callbacks))
    return [*own, *(boundary for boundary in boundaries if not isinstance(boundary, present))]


def _watchers(trainer: pl.Trainer) -> list[pl.Callback]:
    """Callbacks for this Trainer's profiler and loggers: only those with something to do, since Lightning calls all."""
    profiled = not isinstance(trainer.profiler, PassThroughProfiler)  # type: ignore[attr-defined]
    at_wandb = any(isinstance(logger, WandbLogger) for logger in trainer.loggers)
    return [*([RoundStages()] if profiled else []), *([WandbRounds()] if at_wandb else [])]
