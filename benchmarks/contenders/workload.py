"""The workload of all contenders and the report of a turn; needs only torch, for environments without our package.

100 clients x 100 examples of CIFAR's shape, 10 clients a round, batch 20, one local epoch, SGD with momentum, one
thread. A contender gives the seconds of its rounds to `main`, which leaves out the first and prints one line of JSON.
"""

import argparse
import json
import runpy
import sys
from collections.abc import Callable, Iterable
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

NUM_CLIENTS, EXAMPLES, COHORT, BATCH_SIZE, LR, MOMENTUM = 100, 100, 10, 20, 0.01, 0.9
PACKAGE = Path(__file__).parents[2] / "lightning_spectral"


def cnn() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(64, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(1024, 128), nn.ReLU(), nn.Linear(128, 10)),
    )


def resnet() -> nn.Module:
    """Our ResNet-18, read from its file: the package itself may not be there."""
    attention = SimpleNamespace(**runpy.run_path(str(PACKAGE / "models" / "attention.py")))
    with mock.patch.dict(sys.modules, {"lightning_spectral.models.attention": attention}):
        model: nn.Module = runpy.run_path(str(PACKAGE / "models" / "vision.py"))["ResNet18"]()
    return model


def mlp() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(3072, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 10))


MODELS: dict[str, Callable[[], nn.Module]] = {"cnn": cnn, "resnet": resnet, "mlp": mlp}


def make_model(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name]()


def tensors() -> tuple[Tensor, Tensor]:
    """Return images and labels; those of client i start at ``100 i``."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(NUM_CLIENTS * EXAMPLES, 3, 32, 32, generator=generator)
    return x, torch.randint(10, (len(x),), generator=generator)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser()
    made.add_argument("--model", choices=MODELS, default="cnn")
    made.add_argument("--rounds", type=int, default=8)
    return made


def main(run: Callable[[str, int], Iterable[float]], packages: list[str]) -> None:
    """Take one turn.

    Args:
        run: Maps the model's name and a number of rounds to the seconds of each round.
        packages: Packages whose versions are reported.
    """
    options = parser().parse_args()
    torch.set_num_threads(1)
    print_report(list(run(options.model, options.rounds + 1))[1:], packages)


def print_report(seconds: list[float], packages: list[str], **more: Any) -> None:
    versions = {name: version(name) for name in ["torch", *packages]}
    print(json.dumps({"seconds": seconds, "versions": versions, **more}), flush=True)
