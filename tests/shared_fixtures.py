"""A tiny federation that the tests share: fixtures only, which `conftest` loads in processes that run tests."""

import signal
import sys
from collections.abc import Iterator
from functools import cache, partial
from typing import Any

import federation
import pytest
import torch
from federation import Fit, seeded
from forks import set_aside
from hypothesis import settings
from lightning.fabric.utilities import registry
from torch.utils.data import TensorDataset
from toy_models import LitMLP, Remembering, toy_examples

import lightning_spectral as ls

torch.set_num_threads(1)  # tensors here are tiny: threads only wait for each other
registry.entry_points = cache(registry.entry_points)  # each of thousands of Trainers would read all packages' metadata


def pytest_sessionstart() -> None:
    set_aside()


settings.register_profile("reproducible", derandomize=True, max_examples=50)  # a failure here is a failure everywhere
settings.load_profile("reproducible")


@pytest.fixture(autouse=True)
def _the_same_draws_in_every_run(request: pytest.FixtureRequest) -> None:
    """A test that draws without a generator of its own draws the same numbers every time; an example seeds itself."""
    if isinstance(request.node, pytest.Function):
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
