import os
import platform
import subprocess
import sys

import pytest

import lightning_spectral as ls

# Two megabytes, freed and asked for again: by default a mapping of its own each time, and 512 new pages.
PROGRAM = """
import resource, torch
from lightning_spectral.allocator import tune_allocator
torch.set_num_threads(1)
if {tuned}:
    assert tune_allocator()
def churn():
    for _ in range(100):
        torch.zeros(2**19) + 1
churn()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
churn()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def page_faults(tuned: bool) -> int:
    program = [sys.executable, "-c", PROGRAM.format(tuned=tuned)]
    clean = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    return int(subprocess.run(program, capture_output=True, text=True, check=True, env=clean).stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the settings are glibc's")
def test_a_tuned_process_takes_no_page_faults_for_memory_it_had() -> None:
    assert page_faults(tuned=False) > 100 * 512  # the control: every block's pages, every time
    assert page_faults(tuned=True) < 512  # less than one block's, in all


@pytest.mark.skipif(platform.libc_ver()[0] == "glibc", reason="only where the C library is another")
def test_elsewhere_nothing_is_changed() -> None:
    assert not ls.tune_allocator()
