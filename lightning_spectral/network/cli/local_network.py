"""A SuperLink and SuperNodes on this machine, with TLS and keys; nothing of it outlives the block that opened it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

from lightning_spectral.network.cli.keys import write_certificates, write_node_key
from lightning_spectral.network.cli.processes import end

QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
}
NAME = "local"
START_SECONDS = 60.0


class LocalNetwork:
    """Flower's processes on loopback, as a context manager.

    Args:
        folder: For keys, certificates, Flower's own files and logs.
        environment: Further environment variables of all processes.
    """

    def __init__(self, folder: Path, environment: Mapping[str, str] | None = None) -> None:
        self.folder = folder.resolve()
        self.port = free_port()
        binaries = str(Path(sys.executable).parent)
        own = {"FLWR_HOME": str(self.folder / "flwr"), "PATH": f"{binaries}{os.pathsep}{os.environ['PATH']}"}
        self.environment = {**os.environ, **QUIET, **own, **(environment or {})}
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> LocalNetwork:
        write_certificates(self.folder / "keys")
        self._write_config()
        try:
            self.start_link()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _write_config(self) -> None:
        home = self.folder / "flwr"
        home.mkdir(parents=True, exist_ok=True)
        lines = [f'[superlink]\ndefault = "{NAME}"\n', f"[superlink.{NAME}]", f'address = "127.0.0.1:{self.port}"']
        lines.append(f'root-certificates = "{(self.folder / "keys" / "ca.crt").as_posix()}"\n')
        (home / "config.toml").write_text("\n".join(lines))

    def start_link(self) -> None:
        """Start the SuperLink, and wait until it listens.

        Raises:
            RuntimeError: If it does not.
        """
        keys = self.folder / "keys"
        tls = [f"--ssl-{name}={keys / file}" for name, file in TLS_FILES.items()]
        options = ["--enable-supernode-auth", "--host=127.0.0.1", f"--port={self.port}"]
        options.append(f"--database={self.folder / 'link.db'}")  # so that it knows its nodes when it starts again
        process = self.start("superlink", ["flower-superlink", *tls, *options])
        until = time.monotonic() + START_SECONDS
        while not is_listening(self.port):
            if process.poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"The SuperLink does not listen:\n{self.log('superlink')}")
            time.sleep(0.1)

    def add_node(self, name: str, *, register: bool = True) -> None:
        """Start a SuperNode of a client, with a key of its own that the SuperLink knows if it is registered."""
        key = write_node_key(self.folder / "keys", f"node-{name}")
        if register:
            self.run(["flwr", "supernode", "register", f"{key}.pub", NAME])
        self.start_node(name)

    def start_node(self, name: str, certificate: Path | None = None) -> None:
        """Start a SuperNode whose key exists already."""
        keys = self.folder / "keys"
        options = [f"--root-certificates={certificate or keys / 'ca.crt'}", f"--superlink=127.0.0.1:{self.port}"]
        options += [f"--port={free_port()}", f"--auth-supernode-private-key={keys / f'node-{name}'}"]
        self.start(f"node-{name}", ["flower-supernode", *options, f'--node-config=client="{name}"'])

    def run(self, command: list[str], *, cwd: Path | None = None) -> str:
        """Run a command of Flower to its end, and return what it printed.

        Raises:
            RuntimeError: If it fails.
        """
        done = subprocess.run(command, env=self.environment, cwd=cwd, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
        return done.stdout

    def start(self, name: str, command: list[str]) -> subprocess.Popen[bytes]:
        """Start a process of the network; what it prints goes into a log."""
        (self.folder / "logs").mkdir(parents=True, exist_ok=True)
        with open(self.folder / "logs" / f"{name}.log", "ab") as log:
            process = subprocess.Popen(command, env=self.environment, stdout=log, stderr=log, start_new_session=True)
        self._processes[name] = process
        return process

    def log(self, name: str) -> str:
        """What a process has printed."""
        return (self.folder / "logs" / f"{name}.log").read_text(errors="replace")

    def kill(self, name: str, *, without_warning: bool = False) -> None:
        """End a process with all that it has started: by SIGTERM, and after five seconds by SIGKILL."""
        end(self._processes.pop(name), without_warning=without_warning)

    def close(self) -> None:
        """End all processes."""
        for name in list(self._processes)[::-1]:
            self.kill(name)


TLS_FILES = {"ca-certfile": "ca.crt", "certfile": "server.pem", "keyfile": "server.key"}


def free_port() -> int:
    """A port of this machine on which nothing listens."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def is_listening(port: int) -> bool:
    """Whether something listens on a port of this machine."""
    with socket.socket() as tried:
        tried.settimeout(1.0)
        return tried.connect_ex(("127.0.0.1", port)) == 0
