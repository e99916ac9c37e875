"""A round over Flower: ours beside Flower's own FedAvg, on the same clients of this machine.

    python benchmarks/network.py cnn

Needs an environment with Flower (constraints-network.txt). One SuperLink and three SuperNodes run all contenders, one
after another, in turns. The table shows, per contender, seconds of a round (the median of the differences between a
long run and a short one, so that starting the run does not count), bytes over loopback in a round, and the largest
resident memory of the server's process and of a device's.
"""

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path

from page import show

from lightning_spectral.network.local_network import LocalNetwork

APPS = Path(__file__).parent / "network_apps"
CLIENTS, SHORT, LONG = 3, 1, 4
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
    """Watches the resident memory of the processes of server and devices, in MiB."""

    def __init__(self):
        super().__init__(daemon=True)
        self.peaks, self.going = dict.fromkeys(PROCESSES, 0), True

    def run(self):
        while self.going:
            for folder in Path("/proc").glob("[0-9]*"):
                try:
                    command = (folder / "cmdline").read_bytes()
                    kind = next((kind for kind, parts in PROCESSES.items() if any(p in command for p in parts)), None)
                    if kind:
                        status = (folder / "status").read_text()
                        peak = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM"))
                        self.peaks[kind] = max(self.peaks[kind], peak // 1024)
                except (OSError, StopIteration):  # the process has ended
                    continue
            time.sleep(0.2)


def run(network, app, rounds, algorithm):
    """Seconds and bytes of one run."""
    config = f'rounds={rounds} algorithm="{algorithm}"'
    start, before = time.monotonic(), loopback_bytes()
    printed = network.run(["flwr", "run", str(network.folder / app), "server", "--stream", "--run-config", config])
    if not any(end in printed for end in ENDS):
        raise RuntimeError(printed)
    return time.monotonic() - start, loopback_bytes() - before


def measure(network, app, algorithm):
    """Seconds and bytes of a round, and the peaks of memory."""
    watch = PeakMemory()
    watch.start()
    short, long = (run(network, app, rounds, algorithm) for rounds in (SHORT, LONG))
    watch.going = False
    seconds, sent = ((b - a) / (LONG - SHORT) for a, b in zip(short, long, strict=True))
    return seconds, sent, watch.peaks["server"], watch.peaks["device"]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=["cnn", "resnet"])
    parser.add_argument("--turns", type=int, default=2)
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp())
    for app, device in APP_FILES.items():
        shutil.copytree(APPS, folder / app)
        (folder / app / "pyproject.toml").write_text(PYPROJECT.format(app=app, device=device, clients=CLIENTS))
    environment = {
        "BENCHMARK_MODEL": arguments.model,
        "PYTHONPATH": f"{Path(__file__).parent.parent}{os.pathsep}{APPS}",
    }
    found = {name: [] for name in CONTENDERS}
    with LocalNetwork(folder, environment) as network:
        for client in range(CLIENTS):
            network.add_node(str(client))
        for _ in range(arguments.turns):
            for name, (app, algorithm) in CONTENDERS.items():
                found[name].append(measure(network, app, algorithm))
                print(f"{name}: {found[name][-1][0]:.1f} s a round", file=sys.stderr, flush=True)
    shutil.rmtree(folder)
    rows = [(name, *_columns(turns, found["Flower's FedAvg"])) for name, turns in found.items()]
    show([("contender", "s/round", "over Flower's", "MB/round", "server MiB", "device MiB"), *rows])


def _columns(turns, theirs):
    ratio = statistics.median(ours[0] / other[0] for ours, other in zip(turns, theirs, strict=True))
    seconds, sent, server, device = (statistics.median(values) for values in zip(*turns, strict=True))
    return f"{seconds:.1f}", f"{ratio:.2f}", f"{sent / 1e6:.2f}", f"{server:.0f}", f"{device:.0f}"


if __name__ == "__main__":
    main()
