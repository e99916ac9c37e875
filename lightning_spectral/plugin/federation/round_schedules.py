"""Steps a model's learning-rate schedules: at the end of a round, or on a metric that the round has logged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lightning_spectral.plugin.lightning.schedules import RoundScheduler
from lightning_spectral.protocol.records import RoundSummary
from lightning_spectral.server.metrics import logged_by_clients, round_metrics


class RoundSchedules:
    """A model's schedules in one fit.

    Lightning keeps the last value of every metric, so a schedule that waits for one could see an earlier round's value.

    Args:
        schedulers: Those of the user's ``configure_optimizers``.
        name: The model's name, with which the names of its metrics begin; empty if it is trained alone.
    """

    def __init__(self, schedulers: Sequence[RoundScheduler], name: str) -> None:
        self.schedulers = schedulers
        self.prefix = f"{name}/" if name else ""
        self._logged: set[str] = set()
        self._outdated: set[str] = set()
        self._rests = False

    def note(self, summary: RoundSummary) -> None:
        """Remember which training metrics are missing in this round."""
        logged = round_metrics(summary).keys() | logged_by_clients(summary).keys()
        self._logged |= logged
        self._outdated = self._logged - logged
        self._rests = not summary.averaged

    def state_dict(self) -> dict[str, Any]:
        """Which training metrics there are, for the checkpoint; Lightning saves the schedulers themselves."""
        return {"logged": sorted(self._logged), "outdated": sorted(self._outdated), "rests": self._rests}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore what is known about training metrics."""
        self._logged, self._outdated = set(state_dict["logged"]), set(state_dict["outdated"])
        self._rests = state_dict["rests"]

    def step(self, round_idx: int) -> None:
        """Step at the end of a round, whether or not any client trained this model."""
        for scheduler in self.schedulers:
            if not scheduler.waits_for_metric:
                scheduler.step(round_idx)

    def step_on(self, metrics: Mapping[str, Any], round_idx: int) -> None:
        """Step the schedules that wait for a metric, by the names under which the user's module logs.

        A schedule that waits for a training metric skips rounds in which no client is in the average.
        """
        new = {name: value for name, value in metrics.items() if name not in self._outdated}
        own = {name.removeprefix(self.prefix): value for name, value in new.items() if name.startswith(self.prefix)}
        for scheduler in self.schedulers:
            if scheduler.waits_for_metric and (scheduler.monitor in own or not self._rests):
                scheduler.step_on(own, round_idx)
