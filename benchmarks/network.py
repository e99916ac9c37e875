"""A round over Flower: ours beside Flower's own FedAvg, on the same clients of this machine.

    python benchmarks/network.py cnn

Needs an environment with Flower (constraints-network.txt). A kit's SuperLink and three of its devices run ours, a
SuperLink and three of Flower's own SuperNodes theirs, one contender after another, in turns, each alone on the machine.
The table shows, per contender, seconds of a round (the median of the differences between a long run and a short one, so
that starting the run does not count), bytes over loopback in a round, and the largest resident memory of the server's
process and of a device's. Training an ``mlp`` takes next to no time, so its rounds are what carrying messages costs.
"""

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import threading
import time
from itertools import product
from pathlib import Path

from page import show

from lightning_spectral.network.local_network import LocalNetwork

APPS = Path(__file__).parent / "network_apps"
CLIENTS, SHORT, LONG = 3, 1, 9
CONTENDERS = {
    "Flower's FedAvg": ("flowers", "fedavg"),
    "FedAvg": ("ours", "fedavg"),
    "spectral sharding, r = 0.2": ("ours", "spectral"),
}
APP_FILES = {"ours": "ours_device", "flowers": "flowers"}  # with the file of the device's app
PROCESSES = {  # by what is in their commands: with ours, the one that trains is not that of Flower
    "server": (b"flwr-serverapp",),
    "device": (b"flwr-clientapp", b"lightning_spectral.network.worker"),
}
ENDS = "Run finished", "`Trainer.fit` stopped"
PYPROJECT = """\
[project]
name = "{app}"
version = "0.1.0"
description = "a benchmark"
license = "Apache-2.0"
dependencies = []
[tool.flwr.app]
publisher = "benchmarks"
[tool.flwr.app.components]
serverapp = "{app}:server"
clientapp = "{device}:device"
[tool.flwr.app.config]
rounds = 1
clients = {clients}
algorithm = "fedavg"
"""


def loopback_bytes():
    """Bytes that have gone over loopback since the machine started."""
    (line,) = [one for one in Path("/proc/net/dev").read_text().splitlines() if one.strip().startswith("lo:")]
    return int(line.split()[1])


class PeakMemory(threading.Thread):
    """Watches the resident memory of the processes of server and devices of a network, in MiB."""

    def __init__(self, network):
        super().__init__(daemon=True)
        self.folder, self.peaks, self.going = str(network.folder).encode(), dict.fromkeys(PROCESSES, 0), True

    def run(self):
        while self.going:
            for folder in Path("/proc").glob("[0-9]*"):
                try:
                    command = (folder / "cmdline").read_bytes()
                    kind = next((kind for kind, parts in PROCESSES.items() if any(p in command for p in parts)), None)
                    if kind and self.folder in (folder / "environ").read_bytes():
                        status = (folder / "status").read_text()
                        peak = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM"))
                        self.peaks[kind] = max(self.peaks[kind], peak // 1024)
                except (OSError, StopIteration):  # the process has ended
                    continue
            time.sleep(0.2)


class FlowersOwn(LocalNetwork):
    """A network whose SuperNodes are as Flower starts them."""

    def start(self, name, command, environment=None):
        options = command[3:]  # of python -m
        return super().start(name, ["flower-supernode", *options] if "node-" in name else command, environment)


NETWORKS = {"ours": LocalNetwork, "flowers": FlowersOwn}


def run(network, rounds, algorithm):
    """Seconds and bytes of one run."""
    config = f'rounds={rounds} algorithm="{algorithm}"'
    start, before = time.monotonic(), loopback_bytes()
    printed = network.run(["flwr", "run", str(network.folder / "app"), "server", "--stream", "--run-config", config])
    if not any(end in printed for end in ENDS):
        raise RuntimeError(printed)
    return time.monotonic() - start, loopback_bytes() - before


def measure(network, algorithm):
    """Seconds and bytes of a round, and the peaks of memory."""
    watch = PeakMemory(network)
    watch.start()
    short, long = (run(network, rounds, algorithm) for rounds in (SHORT, LONG))
    watch.going = False
    seconds, sent = ((b - a) / (LONG - SHORT) for a, b in zip(short, long, strict=True))
    return seconds, sent, watch.peaks["server"], watch.peaks["device"]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=["mlp", "cnn", "resnet"])
    parser.add_argument("--turns", type=int, default=2)
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp())
    environment = {
        "BENCHMARK_MODEL": arguments.model,
        "PYTHONPATH": f"{Path(__file__).parent.parent}{os.pathsep}{APPS}",
    }
    found = {name: [] for name in CONTENDERS}
    for turn, (name, (app, algorithm)) in product(range(arguments.turns), CONTENDERS.items()):
        with NETWORKS[app](folder / f"{turn} {name}", environment) as network:
            shutil.copytree(APPS, network.folder / "app")
            pyproject = PYPROJECT.format(app=app, device=APP_FILES[app], clients=CLIENTS)
            (network.folder / "app" / "pyproject.toml").write_text(pyproject)
            for client in range(CLIENTS):
                network.add_node(str(client))
            found[name].append(measure(network, algorithm))
            print(f"{name}: {found[name][-1][0]:.2f} s a round", file=sys.stderr, flush=True)
    shutil.rmtree(folder)
    rows = [(name, *_columns(turns, found["Flower's FedAvg"])) for name, turns in found.items()]
    show([("contender", "s/round", "over Flower's", "MB/round", "server MiB", "device MiB"), *rows])


def _columns(turns, theirs):
    ratio = statistics.median(ours[0] / other[0] for ours, other in zip(turns, theirs, strict=True))
    seconds, sent, server, device = (statistics.median(values) for values in zip(*turns, strict=True))
    return f"{seconds:.2f}", f"{ratio:.2f}", f"{sent / 1e6:.2f}", f"{server:.0f}", f"{device:.0f}"


if __name__ == "__main__":
    main()
