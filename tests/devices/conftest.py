"""Everything runs with the module on another device: a pretended one, or a real GPU.

These tests need a process of their own, because the pretended device changes torch for good (see `pretend_device`).
`tests/test_devices.py` starts one. By hand: ``pytest tests/devices --device pretended``, or ``--device cuda``.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pretend_device
import pytest
import torch
from federation import HARDLY_MOVED, Fit, Fitted
from torch import Tensor


@dataclass(frozen=True)
class Device:
    """The device on which these tests train."""

    torch: torch.device
    trainer: Callable[[], dict[str, Any]]  # makes the options of a Trainer that uses it

    @property
    def is_pretended(self) -> bool:
        """Whether it computes as the CPU does, and counts where the host waits."""
        return self.torch.type == pretend_device.NAME


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Collect nothing unless a device is asked for."""
    return True if config.getoption("--device", None) is None else None


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--device", None) is not None:
        for harmless in (HARDLY_MOVED, "ignore:Round 0. sub-models of keep ratio:lightning_spectral.SpectralWarning"):
            config.addinivalue_line("filterwarnings", harmless)
    if config.getoption("--device", None) == "pretended":
        pretend_device.install()


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> Device:
    if request.config.getoption("--device") == "pretended":
        return Device(torch.device(pretend_device.NAME, 0), pretend_device.trainer_options)
    convolutions: Any = getattr(torch.backends.cudnn, "conv", None)  # in 32 bits, as on the CPU
    if convolutions is None:  # before torch 2.9
        torch.backends.cudnn.allow_tf32 = False
    else:
        convolutions.fp32_precision = "ieee"
    return Device(torch.device("cuda", 0), lambda: {"accelerator": "cuda", "devices": 1})


@pytest.fixture
def quiet(quiet: dict[str, Any]) -> dict[str, Any]:
    """Two batches of validation are enough."""
    return {**quiet, "limit_val_batches": 2}


@pytest.fixture
def fit(fit: Fit) -> Fit:
    """Three clients a round are enough as well."""
    return partial(fit, clients_per_round=3)


@pytest.fixture
def there(fit: Fit, device: Device) -> Fit:
    """The fixture `fit`, but on the device."""

    def fit_there(*args: Any, trainer: Mapping[str, Any] | None = None, **options: Any) -> Fitted:
        return fit(*args, trainer={"accelerator": "auto", **device.trainer(), **(trainer or {})}, **options)

    return fit_there


@pytest.fixture
def agree(device: Device) -> Callable[[Fitted, Fitted], None]:
    """Fails unless two runs end with the same weights and metrics, up to rounding of the device."""
    return partial(assert_agree, tolerance=1e-6 if device.is_pretended else 1e-4)


def assert_agree(one: Fitted, two: Fitted, tolerance: float) -> None:
    here, there = with_chosen_signs(one.tensors), with_chosen_signs(two.tensors)
    torch.testing.assert_close(there, here, rtol=tolerance, atol=tolerance)
    for row, other in zip(one.rows, two.rows, strict=True):
        assert other == pytest.approx(row, rel=tolerance, abs=tolerance, nan_ok=True)


def with_chosen_signs(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """On the CPU, with the largest entry of every row of an adapter's A positive: each device chooses signs itself."""
    found = {name: tensor.cpu().clone() for name, tensor in tensors.items()}
    for name, a in found.items():
        if name.endswith(".A"):
            signs = a.gather(1, a.abs().argmax(1, keepdim=True)).sign()
            a *= signs
            found[name[:-1] + "B"] *= signs.T
    return found
