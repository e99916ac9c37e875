"""What a process has started ends with it, wherever it is."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lightning_spectral.network.cli.processes import end, processes

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="Flower's processes need POSIX")
# starts another in a session of its own, which starts a third; both ignore that they are asked to end
FAMILY = """\
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
depth, folder = int(sys.argv[1]), sys.argv[2]
open(f"{folder}/{depth}", "w").write(str(os.getpid()))
if depth:
    subprocess.Popen([sys.executable, "-c", sys.argv[3], str(depth - 1), *sys.argv[2:]], start_new_session=depth == 2)
time.sleep(600)
"""


@pytest.mark.parametrize("without_warning", [True, False])
def test_all_that_a_process_has_started_ends_with_it(tmp_path: Path, without_warning: bool) -> None:
    command = [sys.executable, "-c", FAMILY, "2", str(tmp_path), FAMILY]
    process = subprocess.Popen(command, start_new_session=True)
    files = [tmp_path / str(depth) for depth in (2, 1, 0)]
    until = time.monotonic() + 60
    while not all(file.exists() and file.read_text() for file in files):
        assert time.monotonic() < until
        time.sleep(0.05)
    end(process, without_warning=without_warning)
    assert process.returncode == -signal.SIGKILL
    assert not {int(file.read_text()) for file in files} & {pid for pid, _ in processes()}
