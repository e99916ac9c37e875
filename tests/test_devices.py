"""Everything in `devices/` passes on a pretended device and, if there is one, on a GPU."""

from pathlib import Path

import pretend_device
import pytest
import torch
from forks import finished

FOLDER = Path(__file__).with_name("devices")
DEVICES = [
    pytest.param(
        "pretended",
        marks=pytest.mark.skipif(not pretend_device.is_supported(), reason="this torch has no devices in Python"),
    ),
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")),
]


def check_devices(folder: Path, device: str, *options: str) -> None:
    """Run tests of `devices/` in a process of their own: the pretended device changes torch for good."""
    said, arguments = folder / "said", ["--device", device, "-p", "no:cacheprovider", "-p", "no:xdist", *options]
    assert finished(said, 600, pytest.main, arguments, unused=True) == 0, said.read_text()


@pytest.mark.parametrize("device", DEVICES)
def test_a_device_gives_what_the_cpu_gives(device: str, tmp_path: Path) -> None:
    check_devices(tmp_path, device, str(FOLDER / "test_waits.py"), str(FOLDER / "test_modules.py"))


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
def test_a_device_gives_what_the_cpu_gives_in_more_combinations(device: str, tmp_path: Path) -> None:
    check_devices(tmp_path, device, "-m", "slow or not slow", str(FOLDER))
