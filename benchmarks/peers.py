"""Seconds per round and peak memory of other simulators and of ours, on the workload of overhead.py.

    python benchmarks/peers.py cnn

Each framework gets its own virtual environment, under ``--environments``, with the torch version that runs here. One
that does not install or does not run is left out, and the reason is printed. In a turn all contenders run one after
another. A ratio to the bare loop compares the medians of one turn; the table shows the median, the smallest and the
largest ratio over turns. The start-up of a framework does not count.
"""

import argparse
import shutil
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from page import show, write
from turns import Contender, interleave, spread

ROUNDS = {"cnn": 6, "resnet": 1, "mlp": 40}  # per turn
HEADER = ("contender", "s/round", "over bare", "peak MiB")


@dataclass(frozen=True)
class Peer:
    """Another framework to measure.

    Attributes:
        script: Its script in contenders/.
        requirements: Packages that pip installs in addition to torch.
        alone: Packages that pip installs after these, without dependencies.
        python: Name of the interpreter, if ours is too old.
    """

    script: str
    requirements: tuple[str, ...]
    alone: tuple[str, ...] = ()
    python: str = ""

    def install(self, folder: Path) -> str:
        """Return the interpreter of an environment with the framework, created if missing.

        Raises:
            RuntimeError: If the installation fails.
        """
        python = folder / "bin" / "python"
        if not (folder / "installed").exists():
            if (interpreter := shutil.which(self.python) if self.python else sys.executable) is None:
                raise RuntimeError(f"it needs {self.python}, which is not on the path")
            _run(interpreter, "-m", "venv", "--clear", folder)
            _run(python, "-m", "pip", "install", f"torch=={torch.__version__.split('+')[0]}", *self.requirements)
            if self.alone:
                _run(python, "-m", "pip", "install", "--no-deps", *self.alone)
            (folder / "installed").touch()
        return str(python)


PEERS = {
    "pfl": Peer("pfl_simulation.py", ("pfl==0.6.0",)),
    "Flower, one worker": Peer("flower_simulation.py", ("flwr[simulation]>=1.41",)),
    # without torchvision: FedLab requires it, but it has no build for a torch without CUDA
    "FedLab": Peer(
        "fedlab_standalone.py", ("numpy", "pandas", "scikit-learn", "pynvml", "tqdm", "pillow"), ("fedlab==1.3.0",)
    ),
    # on another Python, pip may install a torch with CUDA, several gigabytes in size; the GPU is hidden from it
    "BlazeFL": Peer("blazefl_single.py", ("blazefl[contrib,reproducibility]==2.0.2",), python="python3.12"),
}


def _run(*command: str | Path) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(_last_error(done.stderr))


def _last_error(output: str) -> str:
    """Return the last error of pip or of a traceback, otherwise the first line."""
    lines = output.splitlines() or ["no output"]
    errors = [line for line in lines if line.startswith("ERROR") or "Error:" in line]
    return errors[-1] if errors else lines[0]


def contenders_of(model: str, environments: Path) -> dict[str, Contender]:
    """Return the bare loop, our own simulation, and every peer that installs and completes a turn."""
    found = {"bare loop": Contender(["bare.py", "--model", model]), "ours": Contender(["ours.py", "--model", model])}
    for name, peer in PEERS.items():
        try:
            trial = Contender([peer.script, "--model", model], peer.install(environments / peer.script.split("_")[0]))
            trial.take_turn(rounds=1)
        except RuntimeError as error:
            print(f"{name} is left out: {_last_error(str(error))}", file=sys.stderr)
        else:
            found[name] = Contender(trial.command, trial.python)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=ROUNDS)
    parser.add_argument("--turns", type=int, default=4, help="turns of each contender")
    parser.add_argument("--environments", type=Path, default=Path(__file__).parents[1] / ".peers")
    parser.add_argument("--write", action="store_true", help="write the table to docs/tables")
    options = parser.parse_args()
    contenders = contenders_of(options.model, options.environments.resolve())
    for progress in interleave(list(contenders.values()), options.turns, ROUNDS[options.model]):
        print(progress, file=sys.stderr)
    rows = [HEADER, *(_row(name, one, contenders["bare loop"]) for name, one in contenders.items())]
    show(rows)
    if options.write:
        versions = {name: number for one in contenders.values() for name, number in one.versions.items()}
        write(f"peers_{options.model}", versions, rows)


def _row(name: str, one: Contender, bare: Contender) -> tuple[str, ...]:
    return name, f"{statistics.median(one.seconds):.4f}", spread(one.over(bare)), f"{one.peak_mib:.0f}"


if __name__ == "__main__":
    main()
