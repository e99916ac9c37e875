"""However Lightning starts the processes, they end, and with the weights of a single one."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import lightning_spectral as ls

SCRIPT = Path(__file__).with_name("launched_run.py")


def weights(strategy: str, folder: Path) -> Any:
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(ls.__file__).parents[1])}
    command = [sys.executable, str(SCRIPT), strategy, str(folder / strategy)]
    subprocess.run(command, env=env, capture_output=True, check=True, timeout=120)
    return torch.load(folder / strategy)


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="one way to start processes is a fork")
def test_started_by_the_script_by_spawn_or_by_fork_processes_come_to_the_same(tmp_path: Path) -> None:
    alone = weights("auto", tmp_path)
    for strategy in ("client_parallel", "client_parallel_spawn", "client_parallel_fork"):
        together = weights(strategy, tmp_path)
        assert alone.keys() == together.keys()
        assert all(torch.equal(value, together[name]) for name, value in alone.items()), strategy
