"""Ends processes with all that they have started, also in sessions of its own."""

from __future__ import annotations

import os
import signal
import subprocess
from contextlib import suppress

SECONDS = 5.0  # that a process has to end by itself


def end(process: subprocess.Popen[bytes], *, without_warning: bool = False) -> None:
    """End a process and what it has started: by SIGTERM, and after some seconds by SIGKILL.

    Flower's processes start others in sessions of their own. They end those when they are asked to end, if they find
    the time.

    Args:
        process: The leader of a session.
        without_warning: Whether to begin with SIGKILL.
    """
    sessions = _sessions_below(process.pid)
    if not without_warning:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(SECONDS)
    while members := [pid for pid, _ in processes() if _session(pid) in sessions]:
        for pid in members:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()
    process.wait()


def _sessions_below(pid: int) -> set[int]:
    """The sessions of a process and of all that it has started, directly or not."""
    parents, found = processes(), {pid}
    while grown := {child for child, parent in parents if parent in found} - found:
        found |= grown
    return {session for session in map(_session, found) if session is not None} - {os.getsid(0)}


def _session(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except (ProcessLookupError, PermissionError):
        return None


def processes() -> list[tuple[int, int]]:
    """All processes that have not ended, each with its parent."""
    listed = subprocess.run(["ps", "-A", "-o", "pid=,ppid=,stat="], capture_output=True, text=True, check=True).stdout
    rows = [line.split() for line in listed.splitlines()]
    return [(int(pid), int(parent)) for pid, parent, state, *_ in rows if not state.startswith("Z")]
