"""A SuperLink and SuperNodes on this machine, with TLS and keys; nothing of it outlives the block that opened it."""

from __future__ import annotations

import ipaddress
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
}
NAME = "local"
START_SECONDS = 60.0
END_SECONDS = 5.0  # that a process has to end by itself
VALID = timedelta(days=30)


class LocalNetwork:
    """Flower's processes on loopback, as a context manager.

    Args:
        folder: For keys, certificates, Flower's own files and logs.
        environment: Further environment variables of all processes.
    """

    def __init__(self, folder: Path, environment: Mapping[str, str] | None = None) -> None:
        self.folder = folder.resolve()
        self.keys, self.home = self.folder / "keys", self.folder / "flwr"
        self.port = free_port()
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        self.environment = {**os.environ, **QUIET, "FLWR_HOME": str(self.home), "PATH": path, **(environment or {})}
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> LocalNetwork:
        write_certificates(self.keys)
        self.home.mkdir(parents=True, exist_ok=True)
        (self.home / "config.toml").write_text(
            f'[superlink]\ndefault = "{NAME}"\n\n[superlink.{NAME}]\naddress = "127.0.0.1:{self.port}"\n'
            f'root-certificates = "{(self.keys / "ca.crt").as_posix()}"\n'
        )
        try:
            self.start_link()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def start_link(self) -> None:
        """Start the SuperLink, and wait until it listens.

        Raises:
            RuntimeError: If it does not.
        """
        files = {"ssl-ca-certfile": "ca.crt", "ssl-certfile": "server.pem", "ssl-keyfile": "server.key"}
        options = [f"--{name}={self.keys / file}" for name, file in files.items()]
        options += ["--enable-supernode-auth", "--host=127.0.0.1", f"--port={self.port}"]
        options.append(f"--database={self.folder / 'link.db'}")  # so that it knows its nodes when it starts again
        process = self.start("superlink", ["flower-superlink", *options])
        until = time.monotonic() + START_SECONDS
        while not is_listening(self.port):
            if process.poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"The SuperLink does not listen:\n{self.log('superlink')}")
            time.sleep(0.1)

    def add_node(self, name: str, *, register: bool = True) -> None:
        """Start a SuperNode of a client, with a key of its own that the SuperLink knows if it is registered."""
        key = write_node_key(self.keys, f"node-{name}")
        if register:
            self.run(["flwr", "supernode", "register", f"{key}.pub", NAME])
        self.start_node(name)

    def start_node(self, name: str, certificate: Path | None = None) -> None:
        """Start a SuperNode whose key exists already."""
        options = [f"--root-certificates={certificate or self.keys / 'ca.crt'}", f"--superlink=127.0.0.1:{self.port}"]
        options += [f"--port={free_port()}", f"--auth-supernode-private-key={self.keys / f'node-{name}'}"]
        self.start(f"node-{name}", ["flower-supernode", *options, f'--node-config=client="{name}"'])

    def run(self, command: list[str]) -> str:
        """Run a command of Flower to its end, and return what it printed.

        Raises:
            RuntimeError: If it fails.
        """
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True, check=False)
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


def end(process: subprocess.Popen[bytes], *, without_warning: bool = False) -> None:
    """End a process and what it has started: by SIGTERM, and after some seconds by SIGKILL.

    Flower's processes start others in sessions of their own. They end those when they are asked to end, if they find
    the time.

    Args:
        process: The leader of a session.
        without_warning: Whether to begin with SIGKILL.
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


def write_certificates(folder: Path, address: str = "127.0.0.1") -> None:
    """Write ``ca.crt``, and ``server.pem`` with its key ``server.key``, for one address.

    The key of the authority is not kept, so it can sign nothing else.
    """
    authority, own = ec.generate_private_key(ec.SECP384R1()), ec.generate_private_key(ec.SECP384R1())
    names = [x509.IPAddress(ipaddress.ip_address(address)), x509.DNSName("localhost")]
    folder.mkdir(parents=True, exist_ok=True)
    for file, name, key, alternatives in (
        ("ca.crt", "lightning_spectral", authority, []),
        ("server.pem", "server", own, names),
    ):
        certificate = _certificate(name, key, authority, alternatives)
        _write(folder / file, certificate.public_bytes(serialization.Encoding.PEM))
    _write(folder / "server.key", _private(own, serialization.PrivateFormat.PKCS8))


def write_node_key(folder: Path, name: str) -> Path:
    """Write the private key of a node, and its public key beside it as ``NAME.pub``; return the private one's path."""
    key = ec.generate_private_key(ec.SECP384R1())
    public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    folder.mkdir(parents=True, exist_ok=True)
    _write(folder / name, _private(key, serialization.PrivateFormat.OpenSSH))
    _write(folder / f"{name}.pub", public)
    return folder / name


def _certificate(name: str, key: Any, authority: Any, names: list[Any]) -> x509.Certificate:
    """A certificate that the authority signs; its own if the key is the authority's."""
    now = datetime.now(timezone.utc)
    subject, issuer = (
        x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common)]) for common in (name, "lightning_spectral")
    )
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(minutes=5))
        .not_valid_after(now + VALID)
        .add_extension(x509.BasicConstraints(ca=key is authority, path_length=None), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.public_key()), critical=False)
    )
    if names:
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    return builder.sign(authority, hashes.SHA256())


def _private(key: Any, form: serialization.PrivateFormat) -> bytes:
    data: bytes = key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())
    return data


def _write(path: Path, data: bytes) -> None:
    path.touch(mode=0o600)
    path.write_bytes(data)
