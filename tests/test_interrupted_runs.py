"""A run that is killed, or told to end, at any moment goes on from its last whole round and ends as if undisturbed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from lightning_versions import needs_2_5_3
from torch.testing import assert_close

HERE = Path(__file__).parent
OFTEN = [",".join([start, *20 * [name]]) for start, name in (("1", "SIGKILL"), ("1", "SIGTERM"), ("2", "SIGTERM"))]


@needs_2_5_3
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs processes that fork")
@pytest.mark.slow
@pytest.mark.parametrize("plan", ["1,SIGKILL,SIGTERM", "2,SIGTERM,SIGTERM,SIGKILL", *OFTEN])
def test_a_run_that_is_interrupted_ends_as_if_it_had_not_been(plan: str, tmp_path: Path) -> None:
    command = [sys.executable, str(HERE / "interrupted_runs.py"), str(tmp_path), plan]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE.parent), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env, timeout=900)
    assert done.returncode == 0, done.stderr
    results = (tmp_path / plan / folder / "result.pt" for folder in (".", "uninterrupted"))
    interrupted, whole = (torch.load(result, weights_only=True) for result in results)
    assert interrupted["global_step"] == whole["global_step"] == plan.count("SIG") + 3
    assert interrupted["rounds"] == whole["rounds"]
    assert interrupted["ledger"] == whole["ledger"]
    assert_close(interrupted["weights"], whole["weights"], rtol=0, atol=0)
    assert_close(interrupted["server_optimizer"]["state"], whole["server_optimizer"]["state"], rtol=0, atol=0)
