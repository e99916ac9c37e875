import os
import platform
import subprocess
import sys

import pytest

import lightning_spectral as ls

# Two blocks of 40 MiB, freed and asked for again ten times: by default glibc always maps blocks above 32 MiB anew.
PROGRAM = """
import resource, torch
from lightning_spectral.plugin.processes import tune_allocator
torch.set_num_threads(1)
if {tuned}:
    assert tune_allocator()
def churn():
    for _ in range(10):
        torch.zeros(10 * 2**20) + 1
churn()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
churn()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def page_faults(tuned: bool) -> int:
    program = [sys.executable, "-c", PROGRAM.format(tuned=tuned)]
    clean = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    return int(subprocess.run(program, capture_output=True, text=True, check=True, env=clean).stdout)


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the settings are glibc's")
def test_a_tuned_process_takes_no_page_faults_for_memory_it_had() -> None:
    default, tuned = page_faults(tuned=False), page_faults(tuned=True)
    assert default >= 10 * 2 * 20  # control: every block is mapped anew, at most 2 MiB per fault
    assert tuned <= default / 5  # at most one pair of blocks still faults after the first ten


@pytest.mark.skipif(platform.libc_ver()[0] == "glibc", reason="only where the C library is another")
def test_elsewhere_nothing_is_changed() -> None:
    assert not ls.plugin.tune_allocator()
