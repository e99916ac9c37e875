"""Sweeps from the command line: of a user's own module, with mistakes, interrupted and resumed."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import yaml

from lightning_spectral.plugin.cli import FederatedCLI
from lightning_spectral.report.runs import read_record, read_runs
from lightning_spectral.sweep.command import alone_in, main
from lightning_spectral.sweep.plan import begin, differences, planned_runs
from lightning_spectral.sweep.run import resolved, train

pytest.importorskip("jsonargparse", reason="comes with the `test` extra")
pytest.importorskip("matplotlib", reason="matplotlib is in the `report` extra")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Lightning 2.6 calls methods by their old names

CODE = """
import os
import time
from pathlib import Path
from typing import Literal

import torch
from torch.utils.data import TensorDataset

from lightning_spectral.models import MLP, LitClassifier


def points(num_points: int = 40) -> TensorDataset:
    x = torch.randn(num_points, 6, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, x[:, :3].argmax(1))


class LitPoints(LitClassifier):
    def __init__(self, kind: Literal["fine", "raises", "ends"] = "fine", width: int = 4, seconds: float = 0.0):
        super().__init__(MLP(6, [width, width], 3), num_classes=3)
        self.kind, self.seconds = kind, seconds
        with Path("processes.txt").open("a") as file:
            file.write(f"{os.getpid()}\\n")

    def training_step(self, batch, batch_idx):
        time.sleep(self.seconds)
        if self.kind == "raises":
            raise ValueError("of the user's own")
        if self.kind == "ends":
            os._exit(3)
        return super().training_step(batch, batch_idx)
"""
RUN = """
model:
  module: my_swept_points.LitPoints
  algorithm: {class_path: SpectralSharding, init_args: {keep_ratio: 0.5, spectral_start: null}}
  clients_per_round: 2
data:
  train: my_swept_points.points
  val: my_swept_points.points
  partitioner: {class_path: DirichletPartitioner, init_args: {num_clients: 4, alpha: 1.0}}
  batch_size: 5
trainer: {accelerator: cpu, max_epochs: 2, enable_model_summary: false, callbacks: [RoundProgressBar]}
"""
TWO = """
model:
  models: {a: {module: my_swept_points.LitPoints}, b: {module: my_swept_points.LitPoints}}
  participation: {class_path: LossVarianceReduced, init_args: {active: 3}}
data: {modules: {a: ONE, b: ONE}}
trainer: {accelerator: cpu, max_epochs: 2, enable_model_summary: false}
""".replace(
    "ONE",
    "{train: my_swept_points.points, val: my_swept_points.points, "
    "partitioner: {class_path: IIDPartitioner, init_args: {num_clients: 4}}}",
)
KINDS = ["--config", "run.yaml", "--vary", "model.module.kind=ends,raises,fnie,fine"]


class Told(NamedTuple):
    status: int
    out: str
    err: list[str]  # lines


@pytest.fixture(scope="module", autouse=True)
def folder(command_line: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with configs and a user's module, in which the command line is started."""
    folder = tmp_path_factory.mktemp("sweeps")
    (folder / "my_swept_points.py").write_text(CODE)
    (folder / "run.yaml").write_text(RUN)
    (folder / "two.yaml").write_text(TWO)
    command_line.chdir(folder)
    command_line.syspath_prepend(folder)
    yield folder
    sys.modules.pop("my_swept_points", None)


@pytest.fixture
def sweep(capfd: pytest.CaptureFixture[str]) -> Callable[..., Told]:
    def start(*arguments: str) -> Told:
        status = main(arguments)
        told = capfd.readouterr()
        return Told(status, told.out, told.err.splitlines())

    return start


@pytest.mark.slow
def test_what_fails_is_one_line_and_the_others_go_on(sweep: Callable[..., Told]) -> None:
    told = sweep(*KINDS, "--jobs", "2")
    assert told.status == 1
    assert told.err[0].startswith("error: kind=fnie"), "configs are read before a run begins"
    ended, wrong, raised = sorted(told.err)
    assert wrong.startswith("error: kind=fnie: model.module.kind: ")
    assert ended == "error: kind=ends: its process ended with status 3 (see sweeps/run/kind=ends/output.txt)"
    assert raised.startswith("error: kind=raises: lightning_spectral.errors.ClientError: Round 0, client ")
    assert raised.endswith("ValueError: of the user's own (see sweeps/run/kind=raises/output.txt)")
    assert "Traceback (most recent call last)" in Path("sweeps/run/kind=raises/output.txt").read_text()
    line = r"\[\d/3\] kind=fine, \d\.\d min left\n\n.*val_accuracy, last 5 +best +rounds +megabytes\n"
    assert re.search(rf"training 3 runs; .*\n{line}\S+ +1 +0\.\d+ +0\.\d+ +2 +0\.0\d+\n", told.out)
    assert Path("sweeps/run/report.html").read_text().count("<h2>Cost</h2>") == 1

    again = sweep("--config", "run.yaml", "--vary", "model.module.kind=fine")
    assert (again.status, again.err) == (0, [])
    assert again.out.startswith("1 of 1 runs are finished already\n\n")
    assert len(Path("processes.txt").read_text().split()) == 3, "each module was built once, in a process of its own"

    other = sweep("--config", "run.yaml", "--vary", "model.module.kind=fine", "--trainer.max_epochs=3")
    assert other.status == 2
    assert other.err == [
        "error: sweeps/run/kind=fine has a run with other settings: trainer.max_epochs is 2 there, 3 now. Change them "
        "back, or remove that folder, or choose another, with `-o` if this is a sweep.",
        "error: no run can be trained",
    ]


def test_a_wrong_key_is_told_once(sweep: Callable[..., Told]) -> None:
    wrong = ("--vary", "model.algorithm.keep_ratoi=0.1,0.2", "--seeds", "0,1", "-o", "wrong")
    told = sweep("--config", "run.yaml", *wrong)
    assert told.status == 2
    assert told.err == [
        "error: model.algorithm: Option 'keep_ratoi' is not accepted; did you mean 'keep_ratio'?",
        "error: no run can be trained",
    ]


def test_a_sweep_that_cannot_begin_says_so_in_one_line(sweep: Callable[..., Told]) -> None:
    no_folder = "run.yaml/there cannot be written: Not a directory"
    wrong = {"--vary a.b=": "`--vary a.b=` names no value", "--seeds 0 -o run.yaml/there": no_folder}
    for arguments, message in wrong.items():
        told = sweep("--config", "run.yaml", *arguments.split())
        assert (told.status, len(told.err)) == (2, 1)
        assert told.err[0].startswith(f"error: {message}")


def test_a_second_sweep_in_the_same_folder_is_refused(sweep: Callable[..., Told]) -> None:
    with alone_in(Path("taken")):
        told = sweep("--config", "run.yaml", "--seeds", "0", "-o", "taken")
    assert (told.status, told.err[0][:44]) == (2, "error: another sweep is at work in taken; wa")


SLOW = ("--config", "run.yaml", "--vary", "model.module.seconds=0.1", "--seeds", "1", "--trainer.max_epochs=6")


@pytest.mark.slow
@pytest.mark.usefixtures("interruptible")
def test_an_interrupted_sweep_ends_its_processes_and_keeps_its_bits(folder: Path, sweep: Callable[..., Told]) -> None:
    """Once by Ctrl-C and once by a kill, each after another round."""
    run = folder / "slow/seconds=0.1/seed=1"

    def check_ended() -> None:
        _wait_until(lambda: not _lives(int((folder / "processes.txt").read_text().split()[-1])))
        assert not (run / "finished").exists()

    def press() -> None:
        _wait_for_another(run / "last.ckpt")
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=press).start()
    told = sweep(*SLOW, "-o", "slow")
    assert (told.status, told.err) == (130, ["error: interrupted; run the same command again to continue"])
    check_ended()
    command = [sys.executable, "-m", "lightning_spectral", "sweep", *SLOW, "-o", "slow"]
    started = subprocess.Popen(command, cwd=folder, stderr=subprocess.PIPE, text=True, start_new_session=True)
    _wait_for_another(run / "last.ckpt")
    started.kill()
    assert started.communicate(timeout=60)[1] == ""
    check_ended()
    assert sweep(*SLOW, "-o", "slow").status == 0
    assert {path.name for path in run.glob("version_*")} == {"version_0", "version_1", "version_2"}

    arguments = ["--config", str(run / "config.yaml"), "--trainer.logger=false", "--trainer.default_root_dir=alone"]
    alone = FederatedCLI(arguments, run=False, save_config_callback=None)
    alone.trainer.fit(alone.model, alone.datamodule)
    resumed = torch.load(run / "last.ckpt", weights_only=False)["state_dict"]
    expected = alone.model.state_dict()
    assert resumed.keys() == expected.keys()
    assert all(torch.equal(resumed[name], expected[name]) for name in expected)
    (read,), left_out = read_runs([folder / "slow"])
    assert left_out == []
    assert read.path.name == "rounds.jsonl"
    assert [row["fl/round"] for row in read.rows] == [0, 1, 2, 3, 4, 5]
    assert all({"val_accuracy", "fl/bytes_up"} <= row.keys() for row in read.rows)
    assert read.config["sweep"] == {"seconds": "0.1", "seed": 1}


def _wait_for_another(file: Path) -> None:
    before = file.stat().st_mtime_ns if file.exists() else 0
    _wait_until(lambda: file.exists() and file.stat().st_mtime_ns > before)


def _wait_until(holds: Callable[[], Any], seconds: float = 240) -> None:
    ends = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < ends
        time.sleep(0.01)


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.slow
def test_seeds_reach_the_weights_and_all_draws_of_several_models(tmp_path: Path) -> None:
    first, second = planned_runs([], [0, 1])
    config = resolved(["--config", "two.yaml"], second)
    assert config.count("seed_everything: 1\n") == 1
    assert config.count(" seed: 1\n") == 3  # of the federation and both models
    for run in (first, second):
        begin(tmp_path / run.folder, resolved(["--config", "two.yaml"], run))
        train(tmp_path / run.folder, {"seed": run.seed})
    weights = [torch.load(tmp_path / run.folder / "last.ckpt", weights_only=False) for run in (first, second)]
    one, other = (found["state_dict"] for found in weights)
    assert any(not torch.equal(one[name], other[name]) for name in one)


def test_a_folder_names_the_settings_in_which_its_run_differs(tmp_path: Path) -> None:
    model = {"class_path": "M", "init_args": {"algorithm": "FedAvg", "lr": 0.1}}
    config = {"model": model, "trainer": {"callbacks": []}}
    folder, text = tmp_path / "run", yaml.safe_dump(config)
    assert differences(folder, text) == []  # there is no run
    begin(folder, text)
    assert differences(folder, text) == []
    model["init_args"] = {"algorithm": {"class_path": "LoRA", "init_args": {"rank": 4}}, "lr": 0.1}
    assert differences(folder, yaml.safe_dump(config)) == []  # nothing was trained there
    (folder / "last.ckpt").touch()
    assert differences(folder, yaml.safe_dump(config)) == [
        "model.algorithm is FedAvg there, LoRA now",
        "model.algorithm.rank is nothing there, 4 now",
    ]


def test_a_record_from_before_the_first_checkpoint_is_removed_and_others_are_kept(tmp_path: Path) -> None:
    (tmp_path / "rounds.jsonl").touch()
    for name in ("last.ckpt", "finished"):
        (tmp_path / name).touch()
        begin(tmp_path, "{}")
        assert (tmp_path / "rounds.jsonl").is_file()
        (tmp_path / name).unlink()
    begin(tmp_path, "{}")
    assert not (tmp_path / "rounds.jsonl").exists()


@pytest.mark.slow
def test_the_two_ends_stand_beside_each_federation(folder: Path, tmp_path: Path) -> None:
    (run,) = planned_runs(["data.partitioner.alpha=1.0"], [3])
    place = tmp_path / run.folder
    begin(place, resolved(["--config", "run.yaml", "--data.client_val_fraction=0.3", *run.arguments], run))
    train(place, run.settings, ends=True)
    written = {path: path.stat().st_mtime_ns for path in place.glob("*/*")}
    train(place, run.settings, ends=True)  # trains nothing
    assert {path: path.stat().st_mtime_ns for path in place.glob("*/*")} == written
    (found,), _ = read_runs([place / "federated"])
    train(place, {})  # the run alone has the same initial weights and draws
    (alone,), _ = read_runs([place / "rounds.jsonl"])
    assert [row["fl/loss"] for row in found.rows] == [row["fl/loss"] for row in alone.rows]
    assert found.config["sweep"] == {"alpha": "1.0", "seed": 3, "model": "federated"}
    lines = read_record(place / "federated" / "rounds.jsonl").lines
    assert sum("trained" in line for line in lines) == 2
    columns = lines[-1]["tables"]["val_loss/tables/clients"]["columns"]
    assert {f"val_loss, {kind}" for kind in ("alone", "pooled", "federated")} < {*columns}
    assert [(place / name).is_file() for name in ("compared", "finished")] == [True, True]


def test_ends_are_compared_on_what_clients_hold_out(sweep: Callable[..., Told]) -> None:
    for config in ("run.yaml", "two.yaml"):
        told = sweep("--config", config, "--seeds", "0", "--ends", "-o", f"ends of {config}")
        assert (told.status, told.out) == (2, "")
        assert "`--ends` compares clients of one model; add --data.client_val_fraction=0.2" in told.err[0]
