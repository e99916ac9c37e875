"""Contenders that take turns, each in its own process, so that a busy machine affects all of them alike.

All run with the allocator settings of `lightning_spectral.plugin.tune_allocator`, set through the environment.
"""

import json
import os
import statistics
import subprocess
import sys
import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

CONTENDERS = Path(__file__).parent / "contenders"
ALLOCATOR = {
    "MALLOC_TRIM_THRESHOLD_": "2147483647",
    "MALLOC_MMAP_THRESHOLD_": "2147483647",
    "MALLOC_TOP_PAD_": "67108864",
}
ONE_CPU_THREAD = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


@dataclass
class Contender:
    """A script with its arguments, and the measurements of its turns.

    Attributes:
        command: The script in `CONTENDERS`, and its arguments.
        python: The interpreter of the contender's own environment.
        seconds: For each turn, the median over its rounds.
        stages: For each turn, the seconds of each stage of a round, where the script reports them.
        peak_mib: Peak memory, summed over processes.
        versions: Version of each package.
    """

    command: Sequence[str]
    python: str = sys.executable
    seconds: list[float] = field(default_factory=list)
    stages: list[Mapping[str, float]] = field(default_factory=list)
    peak_mib: float = 0.0
    versions: dict[str, str] = field(default_factory=dict)

    def take_turn(self, rounds: int, tuned: bool = True) -> None:
        """Run once and record the measurements.

        Raises:
            RuntimeError: If the command fails; the message has the end of its standard error.
        """
        environment = {**os.environ, **ONE_CPU_THREAD, **(ALLOCATOR if tuned else {})}
        command = [self.python, self.command[0], *self.command[1:], "--rounds", str(rounds)]
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        with subprocess.Popen(command, cwd=CONTENDERS, env=environment, **pipes) as process, Peak(process.pid) as peak:
            out, err = process.communicate()
        if process.returncode:
            raise RuntimeError(f"{' '.join(command)}: exit status {process.returncode}\n{err[-2000:]}")
        measured = json.loads(out.strip().splitlines()[-1])
        self.seconds.append(statistics.median(measured["seconds"]))
        self.stages.append(measured.get("stages", {}))
        self.peak_mib = max(self.peak_mib, peak.mib)
        self.versions.update(measured["versions"])

    def over(self, other: "Contender", more: Sequence[float] | None = None) -> list[float]:
        """Return the ratio of the seconds of each turn to those of ``other``, to which ``more`` are added."""
        added = more or [0.0] * len(self.seconds)
        return [mine / (theirs + m) for mine, theirs, m in zip(self.seconds, other.seconds, added, strict=True)]


class Peak:
    """The peak memory of a process and its descendants: the largest resident set observed of each, summed."""

    def __init__(self, pid: int, every: float = 0.5) -> None:
        self._pids, self._every, self._done = {pid}, every, threading.Event()
        self._largest: dict[int, float] = defaultdict(float)
        self._thread = threading.Thread(target=self._watch)

    @property
    def mib(self) -> float:
        return sum(self._largest.values())

    def __enter__(self) -> "Peak":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._done.wait(self._every):
            for status in Path("/proc").glob("[0-9]*/status"):
                self._look(status)

    def _look(self, status: Path) -> None:
        try:
            lines = dict(line.split(":", 1) for line in status.read_text().splitlines())
        except OSError:  # the process has ended
            return
        pid, parent = int(lines["Pid"]), int(lines["PPid"])
        if pid in self._pids or parent in self._pids:
            self._pids.add(pid)
            self._largest[pid] = max(self._largest[pid], int(lines.get("VmHWM", "0 kB").split()[0]) / 1024)


def interleave(contenders: Sequence[Contender], turns: int, rounds: int, tuned: bool = True) -> Iterator[str]:
    """Run every contender once per turn, and yield a progress message before each run."""
    for turn in range(turns):
        for contender in contenders:
            yield f"turn {turn + 1} of {turns}: {' '.join(contender.command)}"
            contender.take_turn(rounds, tuned)


def spread(values: Sequence[float]) -> str:
    """Format the median, the smallest and the largest."""
    return f"{statistics.median(values):.3f} ({min(values):.3f}-{max(values):.3f})"
