"""Processes that each import everything once and then do one run after another."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing import get_context, parent_process
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_spectral.sweep.plan import PlannedRun

if TYPE_CHECKING:
    from lightning_spectral.sweep.training import Checked

CONTEXT = get_context("spawn")  # a copy of a process with threads may hang


@dataclass
class Worker:
    """A process, and the run that it is busy with."""

    given: tuple[str, ...]  # what all runs have on the command line
    busy: tuple[PlannedRun, Path] | None = None
    process: Any = field(init=False)
    connection: Connection = field(init=False)

    def __post_init__(self) -> None:
        self.connection, other = CONTEXT.Pipe()
        self.process = CONTEXT.Process(target=_work, args=(other, self.given))
        self.process.start()
        other.close()  # so that reading ends when the process does

    def check(self, runs: Sequence[PlannedRun]) -> list[Checked]:
        """Parse the settings of runs."""
        self.connection.send(("check", runs))
        return [self.connection.recv() for _ in runs]

    def begin(self, run: PlannedRun, path: Path) -> None:
        """Train a run; the outcome is received later."""
        self.busy = run, path
        self.connection.send(("train", run, path))

    def outcome(self) -> str:
        """Why the run failed, empty if it is finished; raises ``EOFError`` if the process has ended."""
        found: str = self.connection.recv()
        self.busy = None
        return found

    def end(self) -> None:
        """End the process, and those that it started, at once: whatever it writes, it writes whole."""
        if self.process.is_alive():
            _kill_group(self.process.pid)
        self.process.join()


@contextmanager
def workers(number: int, given: tuple[str, ...]) -> Iterator[list[Worker]]:
    """Start processes; none of them outlives the block, however it ends."""
    started: list[Worker] = []
    try:
        for _ in range(number):
            started.append(Worker(given))
        yield started
    finally:
        for worker in started:
            worker.end()


def train_all(pool: list[Worker], runs: Sequence[tuple[PlannedRun, Path]]) -> Iterator[tuple[PlannedRun, str]]:
    """Train all runs, and yield each with why it failed, empty if it did not, as soon as it ends."""
    waiting = deque(runs)
    while waiting or any(worker.busy for worker in pool):
        for index, worker in enumerate(pool):
            if worker.busy is None and waiting:
                if not worker.process.is_alive():
                    pool[index] = worker = Worker(worker.given)
                worker.begin(*waiting.popleft())
        for ready in wait([worker.connection for worker in pool if worker.busy]):
            worker = next(worker for worker in pool if worker.connection is ready)
            assert worker.busy is not None, "only busy ones are waited for"
            run, _ = worker.busy
            try:
                yield run, worker.outcome()
            except (EOFError, ConnectionError):
                worker.process.join()
                worker.busy = None
                yield run, _death(worker.process.exitcode)


def _death(code: int) -> str:
    if code == -signal.SIGKILL:
        return "its process was killed; if memory ran out, use fewer jobs"
    return f"its process ended with status {code}"


def _work(connection: Connection, given: tuple[str, ...]) -> None:
    """What a worker does until it is told to end."""
    os.setpgrp()  # Ctrl-C reaches the sweep alone, which ends this process and all that it starts
    threading.Thread(target=_end_with_parent, daemon=True).start()
    sys.argv = sys.argv[:1]  # LightningCLI would wonder about the sweep's own arguments
    from lightning_spectral.sweep.training import checked, train

    while True:
        what, *details = connection.recv()
        if what == "check":
            for run in details[0]:
                connection.send(checked(given, run))
        else:
            connection.send(train(given, *details))


def _end_with_parent() -> None:
    parent = parent_process()
    assert parent is not None, "this is a child process"
    parent.join()
    _kill_group(os.getpid())


def _kill_group(pid: int) -> None:
    for kill in (os.killpg, os.kill):  # the second one if it has not made its group yet
        with suppress(ProcessLookupError):
            kill(pid, signal.SIGKILL)
