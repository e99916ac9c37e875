"""``python -m lightning_spectral doctor``: it finds nothing where nothing is wrong, and reports what is."""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from toy_models import LitMLP

import lightning_spectral as ls
from lightning_spectral.__main__ import main as command_line
from lightning_spectral.plugin.doctor import command
from lightning_spectral.plugin.doctor.command import main
from lightning_spectral.plugin.doctor.federations import FEDERATIONS, ModuleAndData
from lightning_spectral.protocol.stage_clock import STAGES

CPU = ["--accelerator", "cpu"]


def test_every_algorithm_is_right_and_nothing_stays_behind(
    capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["lightning_spectral", "doctor", *CPU])
    with pytest.raises(SystemExit, match=r"^0$"):
        command_line()
    out, err = capfd.readouterr()
    lines = out.splitlines()
    assert err == ""
    assert lines[-1] == "all is well"
    checked = lines[lines.index(next(line for line in lines if "weights" in line)) + 1 :]
    assert [line[:18].rstrip() for line in checked[: len(FEDERATIONS)]] == list(FEDERATIONS)
    for line in checked[: len(FEDERATIONS)]:
        verdict, difference, resumed, *seconds = line[18:].split()
        assert (verdict, float(difference), resumed, len(seconds)) == ("ok", 0.0, "equal", len(STAGES))
    assert list(tmp_path.iterdir()) == []


def test_all_public_algorithms_are_checked() -> None:
    public = [getattr(ls, name) for name in ls.__all__]
    algorithms = {cls.__name__ for cls in public if isinstance(cls, type) and issubclass(cls, ls.Algorithm)}
    assert algorithms - {"Algorithm"} <= FEDERATIONS.keys()


def other_in_run(index: int) -> Callable[[], ModuleAndData]:
    """A federation that has other images in one of its runs: the reference, the whole run, the resumed one."""
    runs = itertools.count()

    def make() -> ModuleAndData:
        model, data = FEDERATIONS["FedAvg"]()
        data.train.tensors[0].mul_(1.001 if next(runs) == index else 1.0)
        return model, data

    return make


DIFFERS = r"\de-\d\d +"


@pytest.mark.parametrize(
    ("run", "verdict"),
    [(1, rf"differ +{DIFFERS}{DIFFERS}"), (2, rf"differ +0e\+00 +{DIFFERS}"), (3, r"ok +0e\+00 +equal")],
    ids=["the run that is compared", "the one that resumes it", "neither"],
)
def test_weights_that_differ_are_reported(run: int, verdict: str, capsys: pytest.CaptureFixture[str]) -> None:
    status = main(CPU, {"odd": other_in_run(run), "FedAvg": FEDERATIONS["FedAvg"]})
    out = capsys.readouterr().out
    assert re.search(rf"^odd +{verdict}", out, re.MULTILINE)
    assert (status, "\nodd: not as on the CPU" in out) == ((0, False) if run == 3 else (1, True))


def test_an_algorithm_that_fails_is_one_line_and_the_others_go_on(capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> ModuleAndData:
        raise RuntimeError("no such kernel\non this device")

    assert main(CPU, {"broken": fail, "FedAvg": FEDERATIONS["FedAvg"]}) == 1
    lines = capsys.readouterr().out.splitlines()
    assert "broken            fails    RuntimeError: no such kernel" in lines
    assert any(line.startswith("FedAvg            ok ") for line in lines)
    assert lines[-1] == "broken: not as on the CPU"


def test_a_weight_that_is_no_number_differs(capsys: pytest.CaptureFixture[str]) -> None:
    def make() -> ModuleAndData:
        model, data = FEDERATIONS["FedAvg"]()
        model.module.register_buffer("odd", LitMLP().net[0].weight.detach() * float("nan"))
        return model, data

    assert main(CPU, {"odd": make}) == 1
    assert "nan" in capsys.readouterr().out


def test_an_accelerator_that_is_not_there_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--accelerator", "abacus"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: --accelerator abacus: ")
    assert err.count("\n") == 1


def test_a_missing_package_comes_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(package: str) -> Any:
        raise command.PackageNotFoundError(package)

    monkeypatch.setattr(command, "version", missing)
    lines = list(command.version_lines())
    remedy = 'pip install "lightning-spectral[peft]"'
    assert f"{'peft':<20} not installed  for models with PEFT's adapters: {remedy}" in lines
    assert f"{'torch':<20} not installed" in lines
