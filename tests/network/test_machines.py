"""A kit on machines of its own: a server and devices, each a network namespace with a folder that nobody else sees.

What the kit's README says is done, by commands that stand for `sudo`, `ssh`, `scp` and `systemctl`.
"""

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from loopback_runs import TESTS, expected, run_config, same, wait_for, weights, write_app

pytestmark = pytest.mark.slow
DEVICES = "0", "1", "2"
ADDRESS = "10.77.0.1"

# the last argument of `scp -pr FOLDER NAME:PATH` is a path on another machine
SCP = """\
#!/bin/sh
exec cp -a "$2" "{machines}/${{3%%:*}}/kit"
"""
SSH = """\
#!/bin/sh
[ "$1" = -t ] && shift
name=$1; shift
enter='mount --bind "{machines}/$0" "{site}" && cd "{site}" && exec "$@"'
exec ip netns exec "{prefix}$name" unshare --mount sh -c "$enter" "$name" "$@"
"""
# what systemd does: services run in an environment of their own, are waited for, and run again
SYSTEMCTL = """\
#!{python}
import os, shlex, subprocess, sys, time
for path in sys.argv[3:]:
    lines = [line.rstrip().partition("=")[::2] for line in open(path)]
    unit = dict(lines)
    given = [shlex.split(value.replace("%%", "%"))[0] for name, value in lines if name == "Environment"]
    environment = dict(pair.split("=", 1) for pair in ["PYTHONPATH={package}", "HOME=/nowhere", *given])
    command = shlex.split(unit["ExecStart"].replace("$$", "$").replace("%%", "%"))
    if os.fork():
        subprocess.run(shlex.split(unit.get("ExecStartPost", "true")), check=True)
        continue
    os.setsid()
    null = os.open(os.devnull, os.O_RDWR)
    for number in range(3):
        os.dup2(null, number)
    while True:
        with open(path + ".log", "ab") as log:
            options = dict(cwd=unit["WorkingDirectory"], umask=int(unit["UMask"], 8), stdout=log, stderr=log)
            subprocess.run(command, env=environment, **options)
        time.sleep(float(unit["RestartSec"]))
"""
FILES = {"ca-certfile": "ca.crt", "certfile": "server.pem", "keyfile": "server.key"}
EVIL = """\
import pathlib
pathlib.Path({mark!r}).touch()
import flwr.serverapp
server = flwr.serverapp.ServerApp()
"""


class Machines:
    """A server and devices, each behind a cable of its own to one switch."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.prefix = folder, f"kit{os.getpid()}-"
        self.machines, self.site, self.shims = folder / "machines", folder / "site", folder / "bin"
        self.names = ("server", *DEVICES, "stranger")
        self._started: list[subprocess.Popen[bytes]] = []
        for path in (self.site, self.shims, *(self.machines / name for name in self.names)):
            path.mkdir(parents=True)
        where = {"machines": self.machines, "site": self.site, "prefix": self.prefix}
        for name, text in {
            "sudo": '#!/bin/sh\nexec "$@"\n',
            "scp": SCP.format(**where),
            "ssh": SSH.format(**where),
            "systemctl": SYSTEMCTL.replace("{python}", sys.executable).replace("{package}", str(TESTS.parent)),
        }.items():
            (self.shims / name).write_text(text)
            (self.shims / name).chmod(0o755)
        path = os.pathsep.join((str(self.shims), str(Path(sys.executable).parent), os.environ["PATH"]))
        self.environment = {**os.environ, "PATH": path, "PYTHONPATH": str(TESTS.parent), "OMP_NUM_THREADS": "1"}

    def connect(self) -> None:
        for name in self.names:
            ip("netns", "add", self.prefix + name)
            ip("-n", self.prefix + name, "link", "set", "lo", "up")
        server = self.prefix + "server"
        ip("-n", server, "link", "add", "switch", "type", "bridge")
        ip("-n", server, "addr", "add", f"{ADDRESS}/24", "dev", "switch")
        ip("-n", server, "link", "set", "switch", "up")
        for number, name in enumerate(self.names[1:]):
            cable, device = f"to-{name}", self.prefix + name
            ip("-n", server, "link", "add", cable, "type", "veth", "peer", "name", "eth0", "netns", device)
            ip("-n", server, "link", "set", cable, "master", "switch", "up")
            ip("-n", device, "addr", "add", f"10.77.0.{10 + number}/24", "dev", "eth0")
            ip("-n", device, "link", "set", "eth0", "up")

    def on(self, machine: str, *command: str) -> list[str]:
        """A command as it is said on a machine."""
        return [str(self.shims / "ssh"), machine, *command]

    def run(self, machine: str, *command: str, fails: bool = False) -> str:
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "timeout": 900}
        done = subprocess.run(self.on(machine, *command), env=self.environment, check=False, **pipes)
        assert (done.returncode != 0) == fails, done.stdout
        return str(done.stdout)

    def start(self, machine: str, *command: str) -> Path:
        """Start a command on a machine; return the log of what it prints."""
        log = self.folder / f"{len(list(self.folder.glob('*.log')))}.log"
        with open(log, "wb") as file:
            started = subprocess.Popen(self.on(machine, *command), env=self.environment, stdout=file, stderr=file)
        self._started.append(started)
        return log

    def log_of(self, machine: str, service: str) -> str:
        return (self.machines / machine / "kit" / machine / f"{service}.service.log").read_text(errors="replace")

    def kill(self, machine: str, *programs: str) -> None:
        """End programs of a machine without warning, but not what runs them again."""
        killed = set()
        for pid in pids(self.prefix + machine):
            with suppress(OSError):
                words = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
                if {word.rpartition("/")[2] for word in words[:4]} & {*programs}:
                    os.kill(pid, signal.SIGKILL)
                    killed.add(pid)
        wait_for(lambda: not killed & {*pids(self.prefix + machine)}, 60)

    def wait_for_port(self, port: int) -> None:
        """Wait until something listens on the server's loopback."""
        self.run("server", "bash", "-c", f"until (exec 3<>/dev/tcp/127.0.0.1/{port}) 2>/dev/null; do sleep 1; done")

    def close(self) -> None:
        """End all that runs on the machines, and take them away."""
        for name in self.names:
            while found := pids(self.prefix + name):
                for pid in found:
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
            subprocess.run(["ip", "netns", "delete", self.prefix + name], check=False, capture_output=True)
        for process in self._started:
            process.wait()


def ip(*words: str, program: str = "ip") -> str:
    return subprocess.run([program, *words], check=True, capture_output=True, text=True).stdout


def pids(namespace: str) -> list[int]:
    done = subprocess.run(["ip", "netns", "pids", namespace], check=False, capture_output=True, text=True)
    return [int(pid) for pid in done.stdout.split()]


@pytest.fixture(scope="module")
def machines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machines]:
    pytest.importorskip("flwr", reason="Flower is not installed: constraints-network.txt")
    if not (shutil.which("ip") and shutil.which("tc")):
        pytest.skip("machines and their links are made with `ip` and `tc`, which are not here")
    machines = Machines(tmp_path_factory.mktemp("machines"))
    try:
        try:
            machines.connect()
        except subprocess.CalledProcessError as error:
            pytest.skip(f"network namespaces cannot be made here: {error.stderr.strip()}")
        server = machines.machines / "server"
        write_app(server, "loopback_app")
        machines.run("server", sys.executable, "-m", "lightning_spectral", "network", "kit", ADDRESS, *DEVICES)
        commands = [line[4:] for line in (server / "kit" / "README.md").read_text().splitlines() if line[:4] == "    "]
        assert commands.pop() == "flwr run FOLDER --stream"
        machines.run("server", "bash", "-ec", "\n".join(commands))
        yield machines
    finally:
        machines.close()


def flwr(machines: Machines, *command: str, home: Path | None = None) -> list[str]:
    """A command of Flower, as whoever starts runs says it on the server."""
    home = home or machines.site / "kit" / "server" / "flwr"
    return ["env", f"FLWR_HOME={home}", "FLWR_TELEMETRY_ENABLED=0", "FLWR_DISABLE_UPDATE_CHECK=1", *command]


def a_run(machines: Machines, folder: Path, **settings: Any) -> list[str]:
    config = run_config({"folder": str(folder), **settings})
    return flwr(machines, "flwr", "run", "loopback_app", "--stream", "--run-config", config)


def has_ended(log: Path) -> bool:
    return "`Trainer.fit` stopped" in log.read_text()


def test_a_link_that_is_down_for_a_while_changes_no_bit(machines: Machines, tmp_path: Path) -> None:
    log = machines.start("server", *a_run(machines, tmp_path, rounds=4, algorithm="spectral"))
    wait_for(lambda: "round 0: in, in, in" in log.read_text())
    ip("-n", f"{machines.prefix}1", "link", "set", "eth0", "down")
    time.sleep(30)
    ip("-n", f"{machines.prefix}1", "link", "set", "eth0", "up")
    assert not has_ended(log)
    wait_for(lambda: has_ended(log))
    assert log.read_text().count(": in, in, in") == 4
    assert same(weights(tmp_path), expected(tmp_path, rounds=4, algorithm="spectral"))


def test_a_device_whose_link_stalls_holds_nobody_and_takes_part_again(machines: Machines, tmp_path: Path) -> None:
    """Its answers begin to arrive, and would take more than a minute."""
    log = machines.start("server", *a_run(machines, tmp_path, rounds=99, deadline=5.0))
    wait_for(lambda: "round 0: in, in, in" in log.read_text())
    link = "-n", f"{machines.prefix}1", "qdisc", "replace", "dev", "eth0", "root"
    ip(*link, "tbf", "rate", "1kbit", "burst", "2kb", "limit", "20kb", program="tc")
    wait_for(lambda: log.read_text().count("in, in, late") == 3, seconds=40.0)
    ip(*link, "pfifo", program="tc")
    wait_for(lambda: re.search("late\n.*: in, in, in", log.read_text(), re.DOTALL) is not None)
    machines.kill("server", "flwr", "flwr-serverapp")
    status = machines.run("server", sys.executable, "-m", "lightning_spectral", "network", "status", "--prometheus")
    assert {*re.findall('left_out{client="(.*)",reason="(.*)"', status)} == {("1", "late")}


def test_a_device_that_was_killed_comes_back_by_itself(machines: Machines, tmp_path: Path) -> None:
    log = machines.start("server", *a_run(machines, tmp_path, rounds=99))
    wait_for(lambda: "round 0: in, in, in" in log.read_text())
    machines.kill("2", "lightning_spectral.network.supernode")
    wait_for(lambda: re.search("dropped_out, in, in.*: in, in, in", log.read_text(), re.DOTALL) is not None)
    assert "Failed to activate SuperNode" in machines.log_of("2", "supernode")  # until the server had missed it
    machines.kill("server", "flwr", "flwr-serverapp")


def test_a_run_goes_on_after_everything_on_the_server_was_killed(machines: Machines, tmp_path: Path) -> None:
    log = machines.start("server", *a_run(machines, tmp_path, rounds=8, algorithm="scaffold"))
    wait_for(lambda: "round 1: in, in, in" in log.read_text())
    machines.kill("server", "flwr", "flower-superlink", "flower-superexec", "flwr-serverapp", "lightning_spectral")
    first = tmp_path / "first.ckpt"
    shutil.move(tmp_path / "last.ckpt", first)
    settings = {"algorithm": "scaffold", "rounds": torch.load(first, weights_only=False)["epoch"] + 3}
    for port in (8000, 8443):
        machines.wait_for_port(port)
    assert "`Trainer.fit` stopped" in machines.run("server", *a_run(machines, tmp_path, **settings, resume=str(first)))
    assert same(weights(tmp_path), expected(tmp_path, **settings))


def test_another_authority_and_a_strangers_key_are_refused(machines: Machines) -> None:
    machines.run("stranger", sys.executable, "-m", "lightning_spectral", "network", "kit", ADDRESS, "stranger")
    machines.run("stranger", sys.executable, "-m", "lightning_spectral", "network", "key", "kit/stranger")
    own = machines.machines / "stranger" / "kit" / "stranger"
    (line,) = re.findall("^ExecStart=(.*)$", (own / "supernode.service").read_text(), re.MULTILINE)
    for why in ("certificate verify failed", "Failed to activate SuperNode"):
        log = machines.start("stranger", *flwr(machines, *shlex.split(line), home=machines.site))
        wait_for(lambda log=log, why=why: why in log.read_text())  # type: ignore[misc]
        machines.kill("stranger", "lightning_spectral.network.supernode")
        shutil.copy(machines.machines / "server" / "kit" / "server" / "ca.crt", own)


def test_from_a_device_nobody_can_run_code_or_register_a_key(machines: Machines, tmp_path: Path) -> None:
    mark, own = tmp_path / "was here", machines.machines / "0"
    from lightning_spectral.network.kit import filled

    write_app(own, "loopback_app")
    (own / "loopback_app" / "loopback_app.py").write_text(EVIL.format(mark=str(mark)))
    (own / "evil").mkdir()
    authority = machines.site / "kit" / "0" / "ca.crt"
    evil = flwr(machines, "flwr", "run", "loopback_app", home=machines.site / "evil")
    register = flwr(machines, "flwr", "supernode", "register", "kit/0/node.pub", home=machines.site / "evil")

    def at(port: int) -> None:
        (own / "evil" / "config.toml").write_text(
            filled("config.toml", name="server", port=port, authority=authority).replace("127.0.0.1", ADDRESS)
        )

    for port, why in ((8443, "404"), (8000, "Connection to the SuperLink is unavailable")):
        at(port)
        for command in (evil, register):
            assert why in machines.run("0", *command, fails=True)
    files = [f"--ssl-{name}=kit/server/{file}" for name, file in FILES.items()]
    machines.start("server", *flwr(machines, "flower-superlink", *files, "--host=0.0.0.0", "--port=8001"))
    machines.wait_for_port(8001)
    assert not mark.exists()
    at(8001)  # a SuperLink without the door
    machines.run("0", *evil)
    wait_for(mark.exists)
