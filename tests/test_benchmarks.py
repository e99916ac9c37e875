"""Benchmarks that have a size for tests run, and count what they say."""

import json
import re
import runpy
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from study_files import study_files

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
Run = Callable[..., str]


@pytest.fixture
def run(tmp_path_factory: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> Iterator[Run]:
    """Runs a script in this process, and returns what it prints: to import torch takes longer than most of them."""

    def script(name: str, *arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        runpy.run_path(str(BENCHMARKS / name), run_name="__main__")
        printed: str = capsys.readouterr().out
        return printed

    with study_files(BENCHMARKS, (), tmp_path_factory.mktemp("benchmarks")):
        yield script


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("kind", "sums"), [("float32", 2), ("bf16", 4)])
def test_a_round_of_fed_avg_holds_few_copies_of_the_model(kind: str, sums: int, run: Run) -> None:
    """The server, the clients' memory and int64 sums; a gradient and a momentum only while a client trains."""
    found = json.loads(run("large.py", "--model", "tiny", "--case", "FedAvg", kind).splitlines()[-1])
    assert found["sample"] == pytest.approx(2 + sums, abs=0.1)
    assert found["between"] == pytest.approx(4 + sums, abs=0.1)  # as training ends
    assert found["refresh"] == pytest.approx(2 + sums, abs=0.1)  # nothing is left of the round before


def test_secure_sums_double_what_clients_send(run: Run) -> None:
    rows = [line.split()[-6:] for line in run("secure_sums.py", "--clients", "3", "--rounds", "2").splitlines()[1:]]
    assert [row[-1] for row in rows] == ["1.00", "2.00", "1.00", "2.00"]
    assert [row[3] for row in rows] == ["1.00", "1.00", "1.00", "1.00"]


@pytest.mark.slow
def test_budgets_of_memory_share_what_is_counted(run: Run) -> None:
    printed = run("budgets.py", "--model", "tiny", "--budgets", "3")
    assert int(printed.split()[2]) <= 6
    assert printed.count(".") == 3  # keep ratios


def test_the_suites_slowest_tests_are_written_where_its_page_shows_them(tmp_path: Path, run: Run) -> None:
    suite = runpy.run_path(str(BENCHMARKS / "suite.py"))
    (tmp_path / "1").write_text("0.50\ttests/test_a.py::test_it[x]\n2.00\ttests/b/test_b.py::test_it\n")
    (tmp_path / "2").write_text("".join(f"1.00\ttests/test_c.py::test_it[{number}]\n" for number in range(19)))
    table = suite["slowest"](suite["seconds_of"](tmp_path))
    assert table.startswith("21 tests take 22 CPU seconds; the slowest 20, 98%:\n")
    assert table.splitlines()[4] == "| 2.0 | `b/test_b.py::test_it` |"
    assert "test_a" not in table
    assert table in suite["TABLE"].sub(lambda _: table, (BENCHMARKS.parent / "CONTRIBUTING.md").read_text())


@pytest.mark.slow
def test_what_runs_on_a_gpu_runs_on_the_cpu_at_toy_size(tmp_path: Path, run: Run) -> None:
    """All but the tests on the device and the doctor, which have their own tests."""
    for name in (*(f"data_batch_{part}" for part in range(1, 6)), "test_batch"):
        np.random.default_rng(0).integers(0, 10, (60, 1 + 3 * 32 * 32), np.uint8).tofile(tmp_path / f"{name}.bin")
    toy = ("gpu.py", "--device", "cpu", "--toy", "--cifar10")
    parts = "rounds", "factorise", "shared", "stacked", "captured", "cifar10"
    said = run(*toy, str(tmp_path), "--parts", *parts)
    beside = [r"tiny +\d+\.\d +\d+\.\d +\d+\.\d\d +\d+\.\d +\d+\.\d\d", r"GPT +\d", r"tiny, 2 +\d+\.\d +\d"]
    beside += [r"tiny +\d+\.\d +\d+\.\d +\d\.\d\d +(0e\+00|\de-0[789])"]  # the same weights, to rounding
    beside += [r"tiny, sharded +\d.* 0e\+00 +0e\+00"]  # the same bits
    for row in (*beside, r"12x20( +\d+\.\d){5}", r"2 +\d+\.\d\d +\d.*%"):
        assert re.search(rf"^{row}", said, re.MULTILINE), said
    assert "failed" not in said
    missing = run(*toy, str(tmp_path / "nowhere"), "--parts", "cifar10", "factorise")
    assert re.search(r"nowhere +failed: FileNotFoundError: .*data_batch_1.bin", missing)
    assert "12x20" in missing, "the others go on"
