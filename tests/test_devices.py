"""Everything in `devices/` passes on a pretended device and, if there is one, on a GPU."""

import subprocess
import sys
from pathlib import Path

import pretend_device
import pytest
import torch

FOLDER = Path(__file__).with_name("devices")
DEVICES = [
    pytest.param(
        "pretended",
        marks=pytest.mark.skipif(not pretend_device.is_supported(), reason="this torch has no devices in Python"),
    ),
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")),
]


def check_devices(device: str, *options: str) -> None:
    """Run tests of `devices/` in a process of their own: the pretended device changes torch for good."""
    command = [sys.executable, "-m", "pytest", "--device", device, "-p", "no:cacheprovider", *options]
    done = subprocess.run(command, cwd=FOLDER.parents[1], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("device", DEVICES)
def test_a_device_gives_what_the_cpu_gives(device: str) -> None:
    check_devices(device, str(FOLDER / "test_waits.py"), str(FOLDER / "test_modules.py"))


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
def test_a_device_gives_what_the_cpu_gives_in_more_combinations(device: str) -> None:
    check_devices(device, "-m", "slow or not slow", str(FOLDER))
