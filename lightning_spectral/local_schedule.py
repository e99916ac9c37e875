"""The user's ``configure_optimizers``: the optimizer of clients, and its schedule over rounds."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau


@dataclass(frozen=True)
class Schedule:
    """One learning-rate scheduler over rounds; ``interval="step"`` and ``"epoch"`` both mean a round.

    Attributes:
        scheduler: The user's scheduler, over the optimizer that every client's is modelled on.
        name: Its name for ``LearningRateMonitor``.
        frequency: Steps every so many rounds.
        monitor: Metric that a ``ReduceLROnPlateau`` looks at.
        strict: Whether a missing metric is an error.
    """

    scheduler: Any
    name: str | None = None
    frequency: int = 1
    monitor: str | None = None
    strict: bool = True

    @property
    def waits_for_metric(self) -> bool:
        """Whether it steps after validation, on a metric."""
        return isinstance(self.scheduler, ReduceLROnPlateau)

    def step(self, round_idx: int) -> None:
        """Step at the end of a round."""
        if (round_idx + 1) % self.frequency == 0:
            with warnings.catch_warnings():
                # The optimizer it schedules is a model for those of clients and never steps itself.
                warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")
                self.scheduler.step()

    def step_on(self, metrics: Mapping[str, Any], round_idx: int) -> None:
        """Step on the monitored metric.

        Raises:
            ValueError: If the metric was not logged and ``strict`` is set.
        """
        if (round_idx + 1) % self.frequency != 0:
            return
        if self.monitor is not None and self.monitor in metrics:
            self.scheduler.step(metrics[self.monitor])
        elif self.strict:
            raise ValueError(
                f"ReduceLROnPlateau monitors {self.monitor!r}, which was not logged in round {round_idx}; "
                f"logged were: {', '.join(sorted(metrics))}. Log it, validate every round, or set 'strict': False."
            )


def read_optimizer(configured: Any, owner: str) -> tuple[Optimizer, list[Schedule]]:
    """What a user's ``configure_optimizers`` returned, in any of the forms with one optimizer.

    Args:
        configured: An optimizer; ``[optimizer]``; ``([optimizer], [scheduler])``; ``{"optimizer": ..., "lr_scheduler":
            ...}``, or a list of one such dictionary.
        owner: Name of the user's class, for errors.

    Raises:
        ValueError: If there is no optimizer, or more than one.

    Example:
        >>> import torch
        >>> optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
        >>> _, schedules = read_optimizer({"optimizer": optimizer, "lr_scheduler": None}, "LitModel")
        >>> schedules
        []
    """
    optimizers, schedulers, monitor = _parts(configured)
    if len(optimizers) != 1 or not isinstance(optimizers[0], Optimizer):
        raise ValueError(
            f"{owner}.configure_optimizers must return one torch optimizer, got {len(optimizers)} "
            f"({', '.join(type(o).__name__ for o in optimizers)}); clients train with a single one."
        )
    return optimizers[0], [_schedule(s, monitor) for s in schedulers if s is not None]


def _parts(configured: Any) -> tuple[list[Any], list[Any], str | None]:
    if isinstance(configured, Mapping):
        if "optimizer" not in configured:
            raise ValueError(f"`configure_optimizers` returned a dictionary without 'optimizer': {list(configured)}.")
        return [configured["optimizer"]], [configured.get("lr_scheduler")], configured.get("monitor")
    if not isinstance(configured, Sequence):
        return [] if configured is None else [configured], [], None
    if len(configured) == 1 and isinstance(configured[0], Mapping):
        return _parts(configured[0])
    if len(configured) == 2 and isinstance(configured[0], Sequence):
        schedulers = configured[1]
        return list(configured[0]), list(schedulers) if isinstance(schedulers, Sequence) else [schedulers], None
    return list(configured), [], None


def _schedule(scheduler: Any, monitor: str | None) -> Schedule:
    if not isinstance(scheduler, Mapping):
        return Schedule(scheduler, monitor=monitor)
    return Schedule(
        scheduler["scheduler"],
        scheduler.get("name"),
        scheduler.get("frequency", 1),
        scheduler.get("monitor", monitor),
        scheduler.get("strict", True),
    )
