"""However Lightning starts the processes, they end, and with the same weights as a single process."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from federation import same_state
from ports import free_port

import lightning_spectral as ls

SCRIPT = Path(__file__).with_name("launched_run.py")
pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="one way to start processes is a fork")


def start(file: Path, strategy: str, devices: int = 2, num_nodes: int = 1, **env: str) -> "subprocess.Popen[bytes]":
    command = [sys.executable, str(SCRIPT), str(file), strategy, str(devices), str(num_nodes)]
    path = str(Path(ls.__file__).parents[1])
    return subprocess.Popen(
        command, env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, **env}, stderr=subprocess.DEVNULL
    )


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Any:
    file = tmp_path_factory.mktemp("alone") / "weights"
    assert start(file, "auto", devices=1).wait(120) == 0
    return torch.load(file, weights_only=True)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["client_parallel", "client_parallel_spawn", "client_parallel_fork"])
def test_processes_started_by_the_script_by_spawn_or_by_fork(strategy: str, alone: Any, tmp_path: Path) -> None:
    assert start(tmp_path / "weights", strategy).wait(120) == 0
    assert same_state(torch.load(tmp_path / "weights", weights_only=True), alone)


@pytest.mark.slow
def test_two_processes_on_each_of_two_devices(alone: Any, tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), str(tmp_path / "weights"), "2", "2", "1", "cpu"]
    assert subprocess.run(command, stderr=subprocess.DEVNULL, timeout=120, check=False).returncode == 0
    assert same_state(torch.load(tmp_path / "weights", weights_only=True), alone)


def test_processes_that_share_a_device_do_not_use_nccl() -> None:
    with pytest.raises(ValueError, match="processes_per_device=2 needs process_group_backend='gloo', got 'nccl'"):
        ls.plugin.ClientParallelStrategy(processes_per_device=2, process_group_backend="nccl")
    with pytest.raises(ValueError, match="`processes_per_device` must be at least 1, got 0"):
        ls.plugin.ClientParallelStrategy(processes_per_device=0)


@pytest.mark.slow
def test_two_nodes_that_are_one_machine(alone: Any, tmp_path: Path) -> None:
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    file = tmp_path / "weights"
    nodes = [start(file, "client_parallel", 1, 2, NODE_RANK=str(rank), **meeting) for rank in range(2)]
    assert [node.wait(120) for node in nodes] == [0, 0]
    assert same_state(torch.load(file, weights_only=True), alone)
