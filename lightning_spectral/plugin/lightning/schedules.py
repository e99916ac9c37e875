"""Reads the user's ``configure_optimizers``: the clients' optimizer, and its schedule over rounds."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

T = TypeVar("T")


@dataclass(frozen=True)
class RoundScheduler:
    """One learning-rate scheduler over rounds; ``interval="step"`` and ``"epoch"`` both mean a round.

    Attributes:
        scheduler: The user's scheduler, of the optimizer on which every client's is modelled.
        name: Its name for ``LearningRateMonitor``.
        frequency: Number of rounds from one step to the next.
        monitor: Metric that a ``ReduceLROnPlateau`` monitors.
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
        if (round_idx + 1) % self.frequency == 0:
            with warnings.catch_warnings():
                # The optimizer that it schedules is only a template for clients' optimizers and never steps itself.
                warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")
                self.scheduler.step()

    def step_on(self, metrics: Mapping[str, Any], round_idx: int) -> None:
        """Step on the monitored metric; if it is missing, that is an error if ``strict`` is set."""
        if (round_idx + 1) % self.frequency != 0:
            return
        if self.monitor is not None and self.monitor in metrics:
            self.scheduler.step(metrics[self.monitor])
        elif self.strict:
            raise ValueError(
                f"ReduceLROnPlateau monitors {self.monitor!r}, which was not logged in round {round_idx}; "
                f"logged were: {', '.join(sorted(metrics))}. Log it, validate every round, or set 'strict': False."
            )


def read_optimizers(
    configured: Any, owner: str, *, several: bool = False
) -> tuple[list[Optimizer], list[RoundScheduler]]:
    """Read what a user's ``configure_optimizers`` returned, in any of the forms that Lightning knows.

    Args:
        configured: What it returned.
        owner: Name of the user's class, for errors.
        several: Whether there may be more than one optimizer.

    Example:
        >>> import torch
        >>> optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
        >>> _, schedules = read_optimizers({"optimizer": optimizer, "lr_scheduler": None}, "LitModel")
        >>> schedules
        []
    """
    if configured is None:
        raise ValueError(f"{owner}.configure_optimizers returned None; return the optimizer that clients use.")
    optimizers, schedulers = _parts(configured)
    right_number = len(optimizers) >= 1 if several else len(optimizers) == 1
    if not right_number or not all(isinstance(optimizer, Optimizer) for optimizer in optimizers):
        number = "torch optimizers" if several else "one torch optimizer"
        more = "; several need manual optimisation: `self.automatic_optimization = False` in its `__init__`"
        raise ValueError(
            f"{owner}.configure_optimizers must return {number}, got {len(optimizers)} "
            f"({', '.join(type(o).__name__ for o in optimizers)}){'' if several else more}."
        )
    return optimizers, [_schedule(s, monitor) for s, monitor in schedulers if s is not None]


def only_or_all(found: list[T]) -> T | list[T] | None:
    """What ``LightningModule.lr_schedulers`` and ``optimizers`` return: the only one, or all; ``None`` for none."""
    return found[0] if len(found) == 1 else found or None


def name_group(optimizer: Optimizer, name: str) -> None:
    """Name an optimizer's only parameter group for ``LearningRateMonitor``, unless it has a name.

    Example:
        >>> import torch
        >>> optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
        >>> name_group(optimizer, "server")  # its rate is then logged as "lr-SGD/server"
        >>> optimizer.param_groups[0]["name"]
        'server'
    """
    if len(optimizer.param_groups) == 1:
        optimizer.param_groups[0].setdefault("name", name)


def _parts(configured: Any) -> tuple[list[Any], list[tuple[Any, str | None]]]:
    """Optimizers, and schedulers with the metric that each monitors, if any."""
    if isinstance(configured, Mapping):
        if "optimizer" not in configured:
            raise ValueError(f"`configure_optimizers` returned a dictionary without 'optimizer': {list(configured)}.")
        return [configured["optimizer"]], [(configured.get("lr_scheduler"), configured.get("monitor"))]
    if not isinstance(configured, Sequence):
        return [configured], []
    if configured and all(isinstance(one, Mapping) for one in configured):
        parts = [_parts(one) for one in configured]
        return [o for optimizers, _ in parts for o in optimizers], [s for _, schedulers in parts for s in schedulers]
    if len(configured) == 2 and isinstance(configured[0], Sequence):
        schedulers = configured[1] if isinstance(configured[1], Sequence) else [configured[1]]
        return list(configured[0]), [(scheduler, None) for scheduler in schedulers]
    return list(configured), []


def _schedule(scheduler: Any, monitor: str | None) -> RoundScheduler:
    if not isinstance(scheduler, Mapping):
        return RoundScheduler(scheduler, monitor=monitor)
    return RoundScheduler(
        scheduler["scheduler"],
        scheduler.get("name"),
        scheduler.get("frequency", 1),
        scheduler.get("monitor", monitor),
        scheduler.get("strict", True),
    )
