"""Wall-clock seconds of the stages of a round."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

STAGES = ("refresh", "sample", "load", "train", "aggregate", "apply")
Profile = Callable[[str], AbstractContextManager[Any]]


class StageClock:
    """Adds up the seconds that each stage takes.

    Args:
        profile: Maps the name of a stage to a context manager that is entered around it; for a profiler.

    Example:
        >>> clock = StageClock()
        >>> with clock.measure("train"):
        ...     pass
        >>> 0.0 < clock.seconds["train"] < 1.0
        True
    """

    def __init__(self, profile: Profile = nullcontext) -> None:
        self.profile = profile
        self.seconds = dict.fromkeys(STAGES, 0.0)

    @contextmanager
    def measure(self, stage: str) -> Iterator[None]:
        """Measure a block, even if it raises."""
        start = time.perf_counter()
        try:
            with self.profile(stage):
                yield
        finally:
            self.seconds[stage] += time.perf_counter() - start

    def add(self, seconds: Mapping[str, float]) -> None:
        """Add seconds that were measured elsewhere."""
        for stage, more in seconds.items():
            self.seconds[stage] += more
