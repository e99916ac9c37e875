"""What `network kit` writes: who can read it, for whom its certificates are, and what its services start."""

import os
import re
import shlex
import shutil
import ssl
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from lightning_spectral.network import kit as kit_module
from lightning_spectral.network.command import main
from lightning_spectral.network.kit import NODE_PORT, Kit, Service, write_certificates
from lightning_spectral.network.status import write_whole

FLOWER = Path(sys.executable).with_name("flower-superlink")


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture
def kit(tmp_path: Path) -> Kit:
    kit = Kit(tmp_path / "a kit, 100 % $HOME" / "kit", "server.example:9443", threads=3)
    kit.write(["ward-1", "ward-2"], 'folder="/my data"')
    return kit


def test_each_machine_has_what_its_services_name(kit: Kit) -> None:
    assert sorted(str(path.relative_to(kit.folder)) for path in kit.folder.rglob("*") if path.is_file()) == [
        "README.md",
        *(f"server/{name}" for name in ("ca.crt", "door.service", "flwr/config.toml", "server.key", "server.pem")),
        "server/superlink.service",
        *(f"ward-{i}/{name}" for i in (1, 2) for name in ("ca.crt", "supernode.service")),
    ]
    for unit in kit.folder.rglob("*.service"):
        named = [word.rpartition("=")[2] for word in command(unit) if str(kit.folder) in word]
        assert {Path(path).parent for path in named} <= {unit.parent, kit.folder}
        assert all(Path(path).exists() or path.endswith(("link.db", "/node")) for path in named)  # made there


def command(unit: Path) -> list[str]:
    """The command line of a service file: systemd quotes as a shell does, and ``%`` and ``$`` have a meaning."""
    (line,) = (line for line in unit.read_text().splitlines() if line.startswith("ExecStart="))
    return shlex.split(line.removeprefix("ExecStart=").replace("$$", "$").replace("%%", "%"))


def test_service_files_say_what_the_services_are(kit: Kit) -> None:
    node = kit.supernode("ward-2", 9095, 'folder="/my data"')
    services = {"server/superlink": kit.superlink(), "server/door": kit.door(), "ward-2/supernode": node}
    for name, service in services.items():
        text = (kit.folder / f"{name}.service").read_text()
        assert command(kit.folder / f"{name}.service") == service.command
        assert {"Environment=OMP_NUM_THREADS=3", "Restart=always", "StartLimitIntervalSec=0"} <= {*text.splitlines()}
    assert "--superlink=server.example:9443" in node.command
    assert '--node-config=client="ward-2" folder="/my data"' in node.command
    assert {"--host=127.0.0.1", "--enable-supernode-auth"} <= {*kit.superlink().command}


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="this machine has no systemd-analyze")
@pytest.mark.skipif(not FLOWER.exists(), reason="Flower is not installed, and systemd looks for the programs")
def test_systemd_has_no_complaints(kit: Kit) -> None:
    units = [str(unit) for unit in kit.folder.rglob("*.service")]
    done = subprocess.run(["systemd-analyze", "verify", *units], capture_output=True, text=True, check=True)
    assert "kit" not in done.stderr  # it may complain of units of this machine


def test_a_kit_can_be_extended(kit: Kit) -> None:
    before = {path: path.read_bytes() for path in kit.folder.rglob("*") if path.is_file() and path.suffix != ".md"}
    Kit(kit.folder, "server.example:9443").write(["ward-3"])
    assert all(path.read_bytes() == data for path, data in before.items())
    assert (kit.folder / "ward-3" / "ca.crt").read_bytes() == (kit.folder / "server" / "ca.crt").read_bytes()
    ports = [int(command(unit)[6].removeprefix("--port=")) for unit in sorted(kit.folder.glob("ward-*/*.service"))]
    assert ports == [9094, 9095, 9096]  # so that several can be tried on one machine


NOT_NAMES = ["", ".", "..", "a/b", "/etc", "a\\b", "a b", "-r", "a'b", "ä", "server", "b\n", "ward-3"]
NOT_SERVERS = ["", "ftp://x", "a b", "::1", "[::1]", "x:", "x:80", "x:y", "x:70000", "-x", "x/y", "x\n"]


@pytest.mark.parametrize("name", NOT_NAMES)
def test_names_that_cannot_be_folders_are_refused(kit: Kit, name: str) -> None:
    with pytest.raises(ValueError, match=r"Names of devices must be letters, .* got "):
        kit.write([name, "ward-3"])
    assert not (kit.folder / "ward-3").exists()


@pytest.mark.parametrize("server", NOT_SERVERS)
def test_servers_that_have_no_such_name_are_refused(tmp_path: Path, server: str) -> None:
    with pytest.raises(ValueError, match=r"The server must be a host name or an IPv4 address, and perhaps a port"):
        Kit(tmp_path, server)


def test_a_configuration_that_would_be_lines_of_a_service_is_refused(kit: Kit) -> None:
    with pytest.raises(ValueError, match=r"A device's configuration must be one line, got 'x=1\\nExecStart"):
        kit.write(["ward-3"], "x=1\nExecStartPre=/bin/evil")


def test_what_exists_is_not_overwritten(kit: Kit, tmp_path: Path) -> None:
    with pytest.raises(FileExistsError, match=r"ward-1 exists; remove it, or give the device another name"):
        kit.write(["ward-1"])
    for server in ("other.example:9443", "server.example:9444"):
        with pytest.raises(FileExistsError, match=f"server was made for another server than {server}; name that"):
            Kit(kit.folder, server).write(["ward-3"])
    (tmp_path / "server").mkdir()
    with pytest.raises(FileExistsError, match="server was made for another server"):
        Kit(tmp_path, "server.example").write(["ward-3"])


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """What is asked of Flower, which says that the node is 7."""
    asked: list[tuple[str, ...]] = []
    monkeypatch.setattr(kit_module, "asked_flower", lambda folder, *words: asked.append(words) or {"node-id": 7})
    return asked


def test_a_device_makes_its_key_and_the_server_gets_its_public_half_alone(
    kit: Kit, tmp_path: Path, registered: list[tuple[str, ...]], capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(kit.folder / "ward-1", device := tmp_path / "ward-1")
    printed = [(main(["key", str(device)]), capsys.readouterr().out) for _ in range(2)]
    assert printed == 2 * [(0, (device / "node.pub").read_text() + "\n")]  # a key that is there stays
    assert {mode(path) for path in (device / "node", kit.folder / "server" / "server.key")} == {0o600}
    assert main(["enrol", "ward-1", str(device / "node.pub"), "--kit", str(kit.folder)]) == 0
    assert capsys.readouterr().out == "ward-1 is node 7\n"
    assert registered == [("supernode", "register", str(kit.folder / "ward-1" / "node.pub"))]
    assert (kit.folder / "ward-1" / "node.pub").read_text() in printed[0][1]
    assert not [*kit.folder.rglob("node")]
    for name, key, why in (
        ("ward-1", "node.pub", "ward-1 is enrolled as node 7; to give it another key, run `flwr supernode unregister`"),
        ("ward-2", "node", "is what `network key` prints on the device, got '-----BEGIN OPENSSH PRIVATE KEY"),
        ("ward-2", "ca.crt", "is what `network key` prints on the device, got '-----BEGIN CERTIFICATE-----"),
        ("ward-3", "node.pub", "ward-3 is no folder of a device; `network kit SERVER ward-3` writes it"),
    ):
        assert main(["enrol", name, str(device / key), "--kit", str(kit.folder)]) == 1
        assert why in capsys.readouterr().err
    assert len(registered) == 1


def test_a_file_is_replaced_whole_and_never_readable_by_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (key := tmp_path / "node").write_bytes(b"old")
    key.chmod(0o644)
    modes, replace = [], os.replace

    def looks(new: str, old: Path) -> None:
        modes.append(mode(Path(new)))
        assert (Path(new).read_bytes(), old.read_bytes()) == (b"secret", b"old")
        replace(new, old)

    before = os.umask(0)
    try:
        monkeypatch.setattr(os, "replace", looks)
        write_whole(key, b"secret")
    finally:
        os.umask(before)
    assert (modes, mode(key), key.read_bytes()) == ([0o600], 0o600, b"secret")
    monkeypatch.setattr(os, "replace", lambda new, old: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        write_whole(key, b"newer")
    assert [path.name for path in tmp_path.iterdir()] == ["node"]
    assert key.read_bytes() == b"secret"


@pytest.mark.parametrize("host", ["server.example", "10.0.0.1"])
def test_certificates_are_for_the_server_and_for_loopback(tmp_path: Path, host: str) -> None:
    write_certificates(tmp_path, host)
    for name in (host, "127.0.0.1", "localhost"):
        shake_hands(tmp_path, name)
    for name in ("other.example", "10.0.0.2"):
        with pytest.raises(ssl.SSLCertVerificationError):
            shake_hands(tmp_path, name)


def shake_hands(folder: Path, name: str) -> None:
    """Connect a client of the authority to a server with the certificate, in memory."""
    of_server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    of_server.load_cert_chain(folder / "server.pem", folder / "server.key")
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = ssl.create_default_context(cafile=folder / "ca.crt").wrap_bio(to_client, to_server, server_hostname=name)
    server = of_server.wrap_bio(to_server, to_client, server_side=True)
    ends: list[Any] = [client, server]
    while ends:
        for end in list(ends):
            try:
                end.do_handshake()
                ends.remove(end)
            except ssl.SSLWantReadError:
                continue


def test_the_command_writes_a_kit_or_says_what_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["kit", "server.example", "a", "b", "--threads", "2", "--node-config", "x=1"]) == 0
    assert f"wrote {tmp_path / 'kit'}; " in capsys.readouterr().out
    assert '--node-config=client="b" x=1' in command(tmp_path / "kit" / "b" / "supernode.service")
    assert main(["kit", "server.example", "b"]) == 1
    assert "error: " in capsys.readouterr().err


def test_from_the_kit_to_a_run_there_are_few_commands(kit: Kit) -> None:
    readme = (kit.folder / "README.md").read_text().splitlines()
    commands = [line for line in readme if line.startswith("    ") and not line.startswith("     ")]
    assert len(commands) - 1 + 2 <= 8  # `done` is none, and the package is installed and the kit written before


@pytest.mark.parametrize("name", ["superlink", "door", "supernode"])
def test_containers_run_what_the_services_of_a_kit_run(name: str) -> None:
    text = (Path(__file__).parents[2] / "examples/containers/compose.yaml").read_text()
    for variable, value in {"NAME": "ward-1", "SERVER": "server.example:8443"}.items():
        text = text.replace(f"${{{variable}}}", value)
    kit, found = Kit(Path("/kit"), "server.example"), yaml.safe_load(text)["services"][name]
    nodes = kit.supernode("ward-1", NODE_PORT, 'folder="/data"')
    service = {"superlink": kit.superlink(), "door": kit.door(), "supernode": nodes}[name]
    program, *rest = service.command
    program = "python" if program == sys.executable else Path(program).name
    assert shlex.split(found["command"]) == [program, *rest]
    assert found["environment"] == {key: value for key, value in service.environment.items() if key != "PATH"}
    assert found["network_mode"] == "host"
    assert found["working_dir"] == str(service.folder)


@pytest.mark.parametrize("folder", ["my_app", "Unsere App 2", 27 * "x" + "_b"])
def test_an_app_has_a_name_that_flower_takes_whatever_its_folder_is_called(folder: str, tmp_path: Path) -> None:
    assert main(["init", str(tmp_path / folder)]) == 0
    (name,) = re.findall(r'(?m)^name = "(.*)"$', (tmp_path / folder / "pyproject.toml").read_text())
    assert re.fullmatch(r"app(-[a-z0-9]+)+", name)
    assert len(name) <= 32


def test_a_service_file_has_its_words_quoted_for_systemd() -> None:
    service = Service("A clock", Path("/tmp"), ["date", "+%H h"], {"TZ": "UTC"})
    lines = [line for line in service.unit().splitlines() if line.startswith(("Environment=", "ExecStart="))]
    assert lines == ["Environment=TZ=UTC", "ExecStart=date '+%%H h'"]
