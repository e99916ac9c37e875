"""The devices that torch sees."""

from __future__ import annotations

import os
from collections.abc import Iterator

import torch


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
