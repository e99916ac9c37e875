"""What each machine of a deployment needs: keys, certificates, and services that start Flower's programs with them."""

from __future__ import annotations

import getpass
import ipaddress
import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from importlib.resources import files
from pathlib import Path
from typing import Any

from lightning_spectral.errors import from_extra
from lightning_spectral.network.status import QUIET, SERVER, asked_flower, write_whole

with from_extra("network"):
    from cryptography import x509
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*(\.[A-Za-z0-9_-]+)*")
VALID = timedelta(days=730)
PORT, LINK_PORT, NODE_PORT = 8443, 8000, 9094  # of the door, and on loopback of the SuperLink and the first SuperNode
READY = "ExecStartPost=/bin/bash -c 'until (exec 3<>/dev/tcp/127.0.0.1/{}) 2>/dev/null; do sleep 0.2; done'\n"


@dataclass(frozen=True)
class Service:
    """A program that runs all the time.

    Attributes:
        what: What it is, in a few words.
        folder: Its working directory.
        command: Its command line.
        environment: Its environment variables, beside those of the system.
        restart: Seconds after which it starts again if it has ended.
        port: Where it listens when it has started; ``None`` if nobody waits for that.
    """

    what: str
    folder: Path
    command: Sequence[str]
    environment: Mapping[str, str]
    restart: int = 5
    port: int | None = None

    def unit(self) -> str:
        """Its service file for systemd, which runs it as whoever writes the file."""
        environment = "\n".join(f"Environment={_quoted(f'{k}={v}')}" for k, v in self.environment.items())
        command = " ".join(_quoted(word, in_command=True) for word in self.command)
        where = {"user": getpass.getuser(), "folder": str(self.folder).replace("%", "%%")}
        when = {"ready": READY.format(self.port) if self.port else "", "restart": self.restart}
        return filled("unit.service", what=self.what, environment=environment, command=command, **when, **where)


def _quoted(word: str, *, in_command: bool = False) -> str:
    word = shlex.quote(word.replace("\\", "\\\\").replace("%", "%%"))
    return word.replace("$", "$$") if in_command else word


class Kit:
    """A folder with one folder for the server and one for each device.

    Args:
        folder: Where it is, on all machines.
        server: The server's host name or IPv4 address, as devices reach it, or with a port: ``server.example:9443``.
        threads: Number of threads with which server and devices compute. Weights are the simulation's bit for bit if
            this is the simulation's too.
        link_port: Port of the SuperLink on the server's loopback.

    Raises:
        ValueError: If the server's name or port cannot be one.
    """

    def __init__(self, folder: Path, server: str, threads: int = 1, link_port: int = LINK_PORT) -> None:
        self.host, _, port = server.partition(":")
        is_port = port.isdecimal() and 1024 <= int(port) < 2**16
        if not NAME.fullmatch(self.host) or (":" in server and not is_port):
            raise ValueError(
                "The server must be a host name or an IPv4 address, and perhaps a port that needs no privilege, as in "
                f"server.example:9443, got {server!r}."
            )
        self.folder, self.port, self.link_port, self.threads = folder.resolve(), int(port or PORT), link_port, threads

    @property
    def home(self) -> Path:
        """Flower's own folder on the server, ``FLWR_HOME``."""
        return self.folder / SERVER / "flwr"

    def write(self, names: Sequence[str], node_config: str = "") -> None:
        """Write what the server and new devices need; a server's folder that is there already stays as it is.

        Args:
            names: Names of the devices, which are those of their folders and clients.
            node_config: Further entries of each device's configuration, such as ``'folder="/data"'``.

        Raises:
            ValueError: If a name cannot be one, or is given twice, or the configuration is not one line.
            FileExistsError: If a device's folder exists, or the server's is one for another server.
        """
        server = self.folder / SERVER
        if not node_config.isprintable():
            raise ValueError(f"A device's configuration must be one line, got {node_config!r}.")
        for name in names:
            if not NAME.fullmatch(name) or name == SERVER or names.count(name) > 1:
                raise ValueError(
                    "Names of devices must be letters, digits, '-', '_' and single dots, different from each other and "
                    f"from {SERVER!r}, got {name!r}."
                )
            if (self.folder / name).exists():
                raise FileExistsError(f"{self.folder / name} exists; remove it, or give the device another name.")
        if server.exists() and not self._is_of(server):
            where = f"{self.host}:{self.port}"
            raise FileExistsError(
                f"{server} was made for another server than {where}; name that server, or write the kit elsewhere."
            )
        if not server.exists():
            write_certificates(server, self.host)
            self.home.mkdir()
            config = filled("config.toml", name=SERVER, port=self.link_port, authority=server / "ca.crt")
            write_whole(self.home / "config.toml", config.encode())
            for file, service in (("superlink", self.superlink()), ("door", self.door())):
                write_whole(server / f"{file}.service", service.unit().encode(), mode=0o644)
        devices = sum((path / "supernode.service").exists() for path in self.folder.iterdir())
        for index, name in enumerate(names):
            (folder := self.folder / name).mkdir()
            write_whole(folder / "ca.crt", (server / "ca.crt").read_bytes(), mode=0o644)
            unit = self.supernode(name, NODE_PORT + devices + index, node_config).unit()
            write_whole(folder / "supernode.service", unit.encode(), mode=0o644)
        exports = " ".join(f"{name}={value}" for name, value in {**QUIET, "FLWR_HOME": self.home}.items())
        who = {"names": " ".join(names), "python": sys.executable, "host": self.host, "user": getpass.getuser()}
        text = filled("README.md", folder=self.folder, exports=exports, port=self.port, link_port=self.link_port, **who)
        write_whole(self.folder / "README.md", text.encode(), mode=0o644)

    def _is_of(self, server: Path) -> bool:
        """Whether devices reach a server that was written before as they would reach this one."""
        certificate, door = server / "server.pem", server / "door.service"
        if not certificate.is_file() or not door.is_file() or f" --port={self.port} " not in door.read_text():
            return False
        names = x509.load_pem_x509_certificate(certificate.read_bytes()).extensions
        return _general_name(self.host) in names.get_extension_for_class(x509.SubjectAlternativeName).value

    def superlink(self) -> Service:
        """The SuperLink, on loopback: its port is also that of ``flwr run``, where nobody is authenticated."""
        folder = self.folder / SERVER
        files = {"ssl-ca-certfile": "ca.crt", "ssl-certfile": "server.pem", "ssl-keyfile": "server.key"}
        options = [f"--{name}={folder / file}" for name, file in files.items()]
        options += ["--host=127.0.0.1", f"--port={self.link_port}", "--enable-supernode-auth"]
        options.append(f"--database={folder / 'link.db'}")  # so that it knows its devices when it starts again
        # glibc keeps freed blocks of less than this in pieces, and the server's process would grow with a cohort
        environment = {**self._environment(self.home), "MALLOC_MMAP_THRESHOLD_": "65536"}
        command = [str(Path(sys.executable).parent / "flower-superlink"), *options]
        return Service("Flower's SuperLink", folder, command, environment, port=self.link_port)

    def door(self, host: str = "0.0.0.0") -> Service:
        """What devices reach, at all addresses or one."""
        folder = self.folder / SERVER
        options = [f"--host={host}", f"--port={self.port}", f"--link-port={self.link_port}"]
        command = [sys.executable, "-m", "lightning_spectral", "network", "door", str(folder), *options]
        return Service("Flower's Fleet API for devices", folder, command, self._environment(self.home), port=self.port)

    def supernode(self, name: str, port: int, node_config: str = "", authority: Path | None = None) -> Service:
        """A device's SuperNode; ``port`` is on its loopback, and the authority must have signed the server's key."""
        folder = self.folder / name
        options = [f"--superlink={self.host}:{self.port}", f"--root-certificates={authority or folder / 'ca.crt'}"]
        options += [f"--auth-supernode-private-key={folder / 'node'}", f"--port={port}"]
        options.append(f'--node-config=client="{name}" {node_config}'.rstrip())
        environment = self._environment(folder / "flwr")
        # A SuperNode that has crashed is refused until the server has missed it for a minute, and ends.
        command = [sys.executable, "-m", "lightning_spectral.network.supernode", *options]
        return Service(f"Flower's SuperNode {name}", folder, command, environment, 15)

    def _environment(self, home: Path) -> dict[str, str]:
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.defpath}"
        return {**QUIET, "FLWR_HOME": str(home), "PATH": path, "OMP_NUM_THREADS": str(self.threads)}


def filled(template: str, **values: object) -> str:
    """A file of the folder `templates`, with values in place of the names in braces."""
    return (files("lightning_spectral.network") / "templates" / template).read_text(encoding="utf-8").format(**values)


def write_key(folder: Path) -> str:
    """Make a device's key in its folder, on the device, which it never leaves, unless there is one.

    The public half, which is returned, is in ``node.pub`` too.
    """
    if not (folder / "node").exists():
        made = ec.generate_private_key(ec.SECP384R1())
        write_whole(folder / "node", _private(made, serialization.PrivateFormat.OpenSSH))
    key = serialization.load_ssh_private_key((folder / "node").read_bytes(), password=None)
    public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    write_whole(folder / "node.pub", public, mode=0o644)
    return public.decode()


def enrol(folder: Path, name: str, public: str) -> int:
    """Let the SuperLink of this machine accept a device's key, and keep the node's number in the device's folder.

    Args:
        folder: The kit's.
        name: The device's name.
        public: What `write_key` returned on the device.

    Raises:
        OSError, RuntimeError, ValueError: If the kit lacks this device, or has its key; Flower refuses; it is no key.
    """
    own, noted = folder / name, folder / name / "registered"
    if not (own / "supernode.service").is_file():
        raise FileNotFoundError(f"{own} is no folder of a device; `network kit SERVER {name}` writes it.")
    if noted.exists():
        raise FileExistsError(
            f"{name} is enrolled as node {noted.read_text()}; to give it another key, run `flwr supernode unregister` "
            f"with this number, and remove {noted}."
        )
    curve = None
    with suppress(ValueError, UnsupportedAlgorithm):
        curve = getattr(serialization.load_ssh_public_key(public.encode()), "curve", None)
    if not isinstance(curve, ec.SECP384R1):
        raise ValueError(f"A device's key is what `network key` prints on the device, got {public[:30]!r}.")
    write_whole(own / "node.pub", public.encode(), mode=0o644)
    node: int = asked_flower(folder, "supernode", "register", str(own / "node.pub"))["node-id"]
    write_whole(noted, str(node).encode(), mode=0o644)
    return node


def write_certificates(folder: Path, host: str) -> None:
    """Write ``ca.crt``, and ``server.pem`` with its key ``server.key``, for a host and for loopback.

    Loopback is where the SuperLink's own processes and the door reach it. The key of the authority is not kept, so it
    can sign nothing else.
    """
    authority, own = ec.generate_private_key(ec.SECP384R1()), ec.generate_private_key(ec.SECP384R1())
    names = [_general_name(name) for name in dict.fromkeys((host, "127.0.0.1", "localhost"))]
    issuer, subject = (
        x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common)]) for common in ("lightning_spectral", "server")
    )
    signer, now = authority.public_key(), datetime.now(timezone.utc)
    folder.mkdir(parents=True, exist_ok=True)
    for file, name, key in (("ca.crt", issuer, signer), ("server.pem", subject, own.public_key())):
        builder = (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(issuer)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - timedelta(minutes=5))
            .not_valid_after(now + VALID)
            .add_extension(x509.BasicConstraints(ca=key is signer, path_length=None), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer), critical=False)
        )
        if key is not signer:
            builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        certificate = builder.sign(authority, hashes.SHA256())
        write_whole(folder / file, certificate.public_bytes(serialization.Encoding.PEM), mode=0o644)
    write_whole(folder / "server.key", _private(own, serialization.PrivateFormat.PKCS8))


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _private(key: Any, form: serialization.PrivateFormat) -> bytes:
    data: bytes = key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())
    return data
