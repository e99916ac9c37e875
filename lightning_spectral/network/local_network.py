"""A SuperLink and SuperNodes on this machine, as a kit sets them up; nothing of it outlives its block."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from lightning_spectral.network.kit import Kit, Service, enrol, write_key

END_SECONDS = 5.0  # that a process has to end by itself


class LocalNetwork:
    """The services of a `Kit` on loopback, as a context manager; they run in the current folder.

    Args:
        folder: For the kit and for logs.
        environment: Further environment variables of all processes.
    """

    def __init__(self, folder: Path, environment: Mapping[str, str] | None = None) -> None:
        self.folder = folder.resolve()
        self.kit = Kit(self.folder / "kit", f"127.0.0.1:{free_port()}", link_port=free_port())
        self.further = dict(environment or {})
        self.environment = {**os.environ, **self.kit.superlink().environment, **self.further}
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> LocalNetwork:
        self.kit.write([])
        try:
            self.start_link()
            self._start_listening("door", self.kit.door(host="127.0.0.1"), self.kit.port)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def start_link(self) -> None:
        """Start the SuperLink, and wait until it listens; ``RuntimeError`` if it does not."""
        self._start_listening("superlink", self.kit.superlink(), self.kit.link_port)

    def _start_listening(self, name: str, service: Service, port: int) -> None:
        process, until = self.start(name, service.command, service.environment), time.monotonic() + 60.0
        while True:
            with socket.socket() as tried:
                tried.settimeout(1.0)
                if tried.connect_ex(("127.0.0.1", port)) == 0:
                    return
            if process.poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"The {name} does not listen:\n{self.log(name)}")
            time.sleep(0.1)

    def add_node(self, name: str, node_config: str = "", *, register: bool = True) -> None:
        """Start a SuperNode of a client, with a key of its own that the SuperLink knows if it is registered."""
        self.kit.write([name])
        public = write_key(self.kit.folder / name)
        if register:
            enrol(self.kit.folder, name, public)
        self.start_node(name, node_config)

    def start_node(self, name: str, node_config: str = "", authority: Path | None = None) -> None:
        """Start a SuperNode whose key exists already."""
        service = self.kit.supernode(name, free_port(), node_config, authority)
        self.start(f"node-{name}", service.command, service.environment)

    def run(self, command: list[str]) -> str:
        """Run a command of Flower to its end, and return what it printed; ``RuntimeError`` if it fails."""
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
        return done.stdout

    def start(
        self, name: str, command: Sequence[str], environment: Mapping[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        """Start a process; what it prints goes into a log."""
        (self.folder / "logs").mkdir(parents=True, exist_ok=True)
        everything = {**self.environment, **(environment or {}), **self.further}
        with open(self.folder / "logs" / f"{name}.log", "ab") as log:
            process = subprocess.Popen(command, env=everything, stdout=log, stderr=log, start_new_session=True)
        self._processes[name] = process
        return process

    def log(self, name: str) -> str:
        """What a process has printed."""
        return (self.folder / "logs" / f"{name}.log").read_text(errors="replace")

    def kill(self, name: str, *, without_warning: bool = False) -> None:
        """End a process with all that it has started: by SIGTERM, and after five seconds by SIGKILL."""
        end(self._processes.pop(name), without_warning=without_warning)

    def close(self) -> None:
        for name in list(self._processes)[::-1]:
            self.kill(name)


def free_port() -> int:
    """A port of this machine on which nothing listens."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def end(process: subprocess.Popen[bytes], *, without_warning: bool = False) -> None:
    """End the leader of a session and what it has started: by SIGTERM, if not without warning, and then by SIGKILL.

    Flower's processes start others in sessions of their own, which they end when they are asked to, if there is time.
    """
    parents, family = processes(), {process.pid}
    while grown := {child for child, parent in parents if parent in family} - family:
        family |= grown
    sessions = {_session(pid) for pid in family} - {None, os.getsid(0)}
    if not without_warning:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(END_SECONDS)
    while members := [pid for pid, _ in processes() if _session(pid) in sessions]:
        for pid in members:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()
    process.wait()


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
