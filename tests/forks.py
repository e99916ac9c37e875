"""Other processes: forks of this one where that works, since importing torch takes longer than most tests."""

import contextlib
import multiprocessing
import os
import signal
import sys
import warnings
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

# where there is a GPU, autograd refuses to work in forks of a process in which it has worked
METHOD = "fork" if hasattr(os, "fork") and not torch.cuda.is_available() else "spawn"


def started(call: Callable[..., object], *arguments: Any, **options: Any) -> BaseProcess:
    """A process that calls a function."""
    process = multiprocessing.get_context(METHOD).Process(target=call, args=arguments, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # since Python 3.12: pytest-xdist has another thread
        process.start()
    return process


def finished(said: Path, seconds: float, call: Callable[..., object], *arguments: Any) -> int | None:
    """Call a function in another process, which writes what it prints into a file; return its exit code.

    Whatever it has started is ended with it.
    """
    process = started(_speaking_into, said, call, *arguments)
    try:
        process.join(seconds)
        return process.exitcode
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid or 0, signal.SIGKILL)


def _speaking_into(said: Path, call: Callable[..., object], *arguments: Any) -> None:
    os.setsid()
    sys.stdout = sys.stderr = said.open("w", buffering=1)
    for descriptor in (1, 2):
        os.dup2(sys.stdout.fileno(), descriptor)
    sys.exit(call(*arguments))
