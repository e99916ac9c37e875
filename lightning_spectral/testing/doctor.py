"""``python -m lightning_spectral doctor``: versions, devices, and the contract of every algorithm on this machine."""

from __future__ import annotations

import os
import platform
import re
import sys
import time
import warnings
from argparse import ArgumentParser
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, requires, version
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from lightning_spectral import algorithms as ours
from lightning_spectral.protocol.rng import derived_generator, isolated_rng
from lightning_spectral.testing.algorithms import check_algorithm

DESCRIPTION = """Check this installation, in about half a minute: versions, devices, and every algorithm on a small
network, on a device against the CPU. Paste what it prints into an issue."""

NUM_CLASSES, SIZE = 4, 8
# Each with whether the server's weights stay as they are if nobody trains.
ALGORITHMS: Mapping[str, tuple[ours.Algorithm, bool]] = MappingProxyType(
    {
        "FedAvg": (ours.FedAvg(), True),
        "SpectralSharding": (ours.SpectralSharding(), False),
        "  .published": (ours.SpectralSharding.published(), True),
        "Zampling": (ours.Zampling(compression=4, degree=4), False),
        "WidthSharding": (ours.WidthSharding(), True),
        "FIARSE": (ours.FIARSE(), True),
        "LoRA": (ours.LoRA(2), True),
        "Scaffold": (ours.Scaffold(), True),
        "FedDyn": (ours.FedDyn(), False),
        "Ditto": (ours.Ditto(), True),
        "QFedAvg": (ours.QFedAvg(), True),
        "StaleUpdates": (ours.StaleUpdates(), True),
        "FedBuff": (ours.FedBuff(concurrency=4), True),
    }
)

PACKAGE = "lightning-spectral"


class SmallNet(nn.Module):
    """Classifies images. It has no kinks, such as those of ReLU, where a rounding error decides on a gradient."""

    example_input_array = torch.zeros(2, 1, SIZE, SIZE)

    def __init__(self) -> None:
        super().__init__()
        with isolated_rng(0):
            self.net = nn.Sequential(
                *(nn.Conv2d(1, 8, 3, stride=2, padding=1), nn.BatchNorm2d(8), nn.GELU()),
                *(nn.Conv2d(8, 8, 3, padding=1), nn.GELU(), nn.Flatten()),
                *(nn.Linear(8 * (SIZE // 2) ** 2, 16), nn.GELU(), nn.Linear(16, NUM_CLASSES)),
            )

    def forward(self, x: Tensor) -> Any:
        return self.net(x)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """The loss of a batch."""
        x, labels = batch
        return nn.functional.cross_entropy(self(x), labels)


def main(argv: Sequence[str] | None = None, algorithms: Mapping[str, tuple[ours.Algorithm, bool]] = ALGORITHMS) -> int:
    """Run the command; return 0, or 1 if an algorithm fails or there is no such device."""
    parser = ArgumentParser("python -m lightning_spectral doctor", description=DESCRIPTION)
    parser.add_argument("--device", help="where to train, e.g. cuda:1 (default: an accelerator if there is one)")
    accelerators = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    name = parser.parse_args(argv).device or next(name for name, is_here in accelerators.items() if is_here)
    try:
        device = torch.zeros(1, device=name).device
    except (RuntimeError, AssertionError) as error:  # as torch raises them, by device
        print(f"error: --device {name}: {_first_line(error)}", file=sys.stderr)
        return 1
    print("versions", *version_lines(), "", "devices", *device_lines(), "", f"algorithms on {device}", sep="\n")
    problems = [name for name, choice in algorithms.items() if not _is_right(name, *choice, device)]
    print(f"\n{', '.join(map(str.strip, problems))}: not as it should be" if problems else "\nall is well", flush=True)
    return 1 if problems else 0


def _is_right(name: str, algorithm: ours.Algorithm, rests: bool, device: torch.device) -> bool:
    """Print one line on an algorithm; whatever fails, the others can be checked."""
    x = torch.randn(16, 1, SIZE, SIZE, generator=derived_generator(0, "images of the self-check"))
    batch = x, x.mean((2, 3)).squeeze(1).argsort().argsort() % NUM_CLASSES
    start, threads = time.perf_counter(), torch.get_num_threads()
    torch.set_num_threads(1)  # tensors are tiny
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            check_algorithm(algorithm, SmallNet(), batch, rests=rests, device=device)
    except Exception as error:
        print(f"{name:<18}fails    {_first_line(error)}", flush=True)
        return False
    finally:
        torch.set_num_threads(threads)
    print(f"{name:<18}ok {time.perf_counter() - start:>6.1f} s", flush=True)
    return True


def _first_line(error: Exception) -> str:
    first, *_ = str(error).strip().split("\n")
    return f"{type(error).__name__}: {first}"


def version_lines() -> Iterator[str]:
    """One line for Python, for this package, and for each that it requires, perhaps only for an extra."""
    yield f"{'python':<20} {platform.python_version():<14} {platform.platform()}"
    yield f"{PACKAGE:<20} {_version(PACKAGE) or 'not installed'}"
    for requirement in requires(PACKAGE) or () if _version(PACKAGE) else ():
        package, extras = re.split(r"[^\w.-]", requirement)[0], re.findall(r"extra == ['\"]([\w-]+)", requirement)
        if not {*extras} & {"docs", "test"}:  # which are for developers
            found, extra = _version(package) or "not installed", f"{PACKAGE}[{extras[0]}]" if extras else ""
            yield f"{package:<20} {found:<14} {extra}".rstrip()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def device_lines() -> Iterator[str]:
    """One line for the CPU and one for each accelerator."""
    yield f"cpu      {os.cpu_count()} cores, {torch.get_num_threads()} threads"
    library = f"ROCm {torch.version.hip}" if torch.version.hip else f"CUDA {torch.version.cuda}"
    for index in range(torch.cuda.device_count()):
        found = torch.cuda.get_device_properties(index)
        yield f"cuda:{index}   {found.name}, {found.total_memory / 2**30:.1f} GiB, {library}"
    if torch.backends.mps.is_available():
        yield f"mps      {torch.mps.recommended_max_memory() / 2**30:.1f} GiB"
