"""A tiny federation that the tests share.

It holds fixtures and hooks only: each folder may have its own ``conftest``, so nothing can be imported from here by
name.
"""

import gc
import random
import signal
import sys
from collections.abc import Generator, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings
from torch.utils.data import TensorDataset

import lightning_spectral as ls

sys.path.insert(0, str(Path(__file__).parent))  # every test can import the modules beside this file by name
import federation
from federation import Fit, seeded
from lightning.fabric.utilities import registry
from toy_models import LitMLP, Remembering, toy_examples

torch.set_num_threads(1)  # tensors here are tiny: threads only wait for each other
registry.entry_points = cache(registry.entry_points)  # each of thousands of Trainers would read all packages' metadata


def pytest_configure(config: pytest.Config) -> None:
    config.option.loadscopereorder = False  # xdist would begin with files of many tests; those of few take longest


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """Collect without collecting garbage, and then spare all that is imported: it stays."""
    gc.disable()
    found = yield
    gc.freeze()
    gc.enable()
    return found


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave to the slow tests which cases of a test that is marked as `sampled` are not drawn."""
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("sampled") and not item.get_closest_marker("slow"):
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for name, found in cases.items():
        number = found[0].get_closest_marker("sampled").args[0]  # type: ignore[union-attr]
        drawn = random.Random(name).sample(found, min(number, len(found)))
        for item in found:
            if item not in drawn:
                item.add_marker("slow")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", choices=["pretended", "cuda"], help="run the tests in tests/devices, on this device")


settings.register_profile("reproducible", derandomize=True)  # a failure here is a failure everywhere
settings.load_profile("reproducible")


@pytest.fixture(autouse=True)
def _the_same_draws_in_every_run() -> None:
    """A test that draws without a generator of its own draws the same numbers every time."""
    torch.default_generator.manual_seed(0)  # `torch.manual_seed` writes a stack trace for each type of accelerator


@pytest.fixture
def remembering() -> type[Remembering]:
    return Remembering


@pytest.fixture
def lit_mlp() -> type[LitMLP]:
    return LitMLP


@pytest.fixture
def lit() -> LitMLP:
    return seeded(LitMLP)


@pytest.fixture
def toy() -> TensorDataset:
    return toy_examples()


@pytest.fixture
def data(toy: TensorDataset) -> ls.FederatedDataModule:
    return ls.FederatedDataModule(toy, ls.IIDPartitioner(num_clients=12), val=toy, test=toy, batch_size=4)


@pytest.fixture
def quiet(tmp_path: Any) -> dict[str, Any]:
    """Trainer options that write and print nothing."""
    return {
        "accelerator": "cpu",
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "default_root_dir": tmp_path,
    }


@pytest.fixture
def fit(quiet: dict[str, Any]) -> Fit:
    """Trains a module federatedly: see `federation.fit`."""
    return partial(federation.fit, quiet)


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Ctrl-C is heeded, even if these tests run in the background of a shell and ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="module")
def command_line() -> Iterator[pytest.MonkeyPatch]:
    """Undo whatever a command line does to the process: arguments, variables, paths, the generators' seeds."""
    with pytest.MonkeyPatch.context() as patch, torch.random.fork_rng(devices=[]):
        patch.setattr(sys, "argv", ["program"])
        for name in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS"):
            patch.setenv(name, "0")
        patch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")
        yield patch
