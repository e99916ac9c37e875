"""Apps beside this file that Flower runs, what they should come to, and waiting for it."""

import shutil
import time
import warnings
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

TESTS = Path(__file__).parent
PYPROJECT = """\
[project]
name = "loopback"
version = "0.1.0"
description = "a test"
license = "Apache-2.0"
dependencies = []
[tool.flwr.app]
publisher = "tests"
[tool.flwr.app.components]
serverapp = "{module}:server"
clientapp = "device:device"
[tool.flwr.app.config]
rounds = 2
algorithm = "fedavg"
folder = "."
resume = ""
patience = 300.0
deadline = 600.0
"""
DEVICE = """\
from lightning_spectral.network import client_app

device = client_app({modules}, "{module}:client", trusted=["ternary"])
"""
MODULES = {
    "loopback_app": dict.fromkeys(("", "dense", "sharded"), "loopback_app:LitNet"),
    "other_packages_app": {name: f"other_packages_app:{name}" for name in ("gpt2", "bert", "densenet")},
}


def write_app(folder: Path, module: str, *imported: str) -> None:
    """Make one of the modules beside these tests an app, in a folder of its name."""
    app = folder / module
    app.mkdir()
    for name in (module, "ternary", *imported):
        shutil.copy(TESTS / f"{name}.py", app)
    (app / "device.py").write_text(DEVICE.format(module=module, modules=MODULES[module]))
    (app / "pyproject.toml").write_text(PYPROJECT.format(module=module))


def run_config(settings: dict[str, Any]) -> str:
    """Settings of a run, as `flwr run --run-config` reads them."""
    return " ".join(f'{n}="{value}"' if isinstance(value, str) else f"{n}={value}" for n, value in settings.items())


def weights(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = torch.load(folder / "last.ckpt", weights_only=False)["state_dict"]
    return found


def expected(folder: Path, app: str = "loopback_app", **settings: Any) -> dict[str, torch.Tensor]:
    simulated = import_module(app).simulated
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found: dict[str, torch.Tensor] = simulated({"folder": str(folder), **settings})
    return found


def same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def wait_for(condition: Callable[[], object], seconds: float = 900.0) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "it has not happened in time"
        time.sleep(0.1)
