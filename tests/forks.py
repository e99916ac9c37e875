"""Other processes: forks of this one where that works, since importing torch takes longer than most tests."""

import contextlib
import multiprocessing
import os
import signal
import sys
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

# where there is a GPU, autograd refuses to work in forks of a process in which it has worked
METHOD = "fork" if hasattr(os, "fork") and not torch.cuda.is_available() else "spawn"
_unused: list[tuple[BaseProcess, Connection]] = []


def started(call: Callable[..., object], *arguments: Any, method: str = METHOD, **options: Any) -> BaseProcess:
    context: Any = multiprocessing.get_context(method)
    process: BaseProcess = context.Process(target=call, args=arguments, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # since Python 3.12: pytest-xdist has another thread
        process.start()
    return process


def set_aside() -> None:
    """Fork a process in which nothing runs until `finished` asks for one: autograd learns of devices as it begins."""
    if METHOD == "fork" and multiprocessing.parent_process() is None:
        ours, theirs = multiprocessing.Pipe()
        _unused.append((started(_when_asked, ours, theirs, daemon=True), ours))
        theirs.close()


def _when_asked(ours: Connection, theirs: Connection) -> None:
    ours.close()  # so that it ends with the process that would ask
    asked = None
    with contextlib.suppress(EOFError, KeyboardInterrupt):
        asked = theirs.recv()
    if asked is not None:
        _speaking_into(*asked)


def finished(
    said: Path, seconds: float, call: Callable[..., object], *arguments: Any, unused: bool = False
) -> int | None:
    """Call a function in another process, which writes what it prints into a file; return its exit code.

    Whatever it has started is ended with it. If asked for, nothing has run in it before.
    """
    if unused and _unused:
        process, ours = _unused.pop()
        ours.send((said, call, *arguments))
    else:
        process = started(_speaking_into, said, call, *arguments, method="spawn" if unused else METHOD)
    assert process.pid is not None
    try:
        process.join(seconds)
        return process.exitcode
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def _speaking_into(said: Path, call: Callable[..., object], *arguments: Any) -> None:
    os.setsid()
    sys.stdout = sys.stderr = said.open("w", buffering=1)
    for descriptor in (1, 2):
        os.dup2(sys.stdout.fileno(), descriptor)
    sys.exit(call(*arguments))
