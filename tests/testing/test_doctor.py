"""``python -m lightning_spectral doctor``: it finds nothing where nothing is wrong, and reports what is."""

import sys
from pathlib import Path
from typing import Any

import pytest

import lightning_spectral as ls
from lightning_spectral.__main__ import main as command_line
from lightning_spectral.algorithms.fed_avg import DenseRound
from lightning_spectral.testing import doctor

CPU = ["--device", "cpu"]


@pytest.mark.slow  # `test_check_algorithm` checks the same algorithms
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
    checked = lines[lines.index("algorithms on cpu") + 1 : -2]
    assert [line[:18].rstrip() for line in checked] == list(doctor.ALGORITHMS)
    assert {line[18:].split()[0] for line in checked} == {"ok"}
    assert list(tmp_path.iterdir()) == []


def test_all_public_algorithms_are_checked() -> None:
    public = [getattr(ls, name) for name in ls.__all__]
    algorithms = {cls.__name__ for cls in public if isinstance(cls, type) and issubclass(cls, ls.Algorithm)}
    assert algorithms - {"Algorithm"} <= doctor.ALGORITHMS.keys()


class DriftingRound(DenseRound):
    def close(self) -> None:
        super().close()
        for parameter in self.half.server.parameters():
            parameter.grad += 1e-3 * parameter.detach()


class Drifts(ls.FedAvg):
    round = DriftingRound


class Breaks(ls.FedAvg):
    def check(self, plan: Any) -> None:
        raise RuntimeError("no such kernel\non this device")


@pytest.mark.slow
def test_algorithms_that_fail_are_one_line_each_and_the_others_go_on(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.main(CPU, {"odd": (Drifts(), True), "broken": (Breaks(), True), "FedAvg": (ls.FedAvg(), True)}) == 1
    *_, odd, broken, right, _, last = capsys.readouterr().out.splitlines()
    assert odd.startswith("odd               fails    AssertionError: Drifts(")
    assert "nobody trained, but the server's weights changed" in odd
    assert broken.startswith("broken            fails    AssertionError: Breaks(")
    assert right.startswith("FedAvg            ok ")
    assert last == "odd, broken: not as it should be"


def test_a_device_that_is_not_there_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.main(["--device", "abacus"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: --device abacus: ")
    assert err.count("\n") == 1


def test_a_missing_package_comes_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(package: str) -> Any:
        if package == doctor.PACKAGE:
            return "0"
        raise doctor.PackageNotFoundError(package)

    monkeypatch.setattr(doctor, "version", missing)
    lines = list(doctor.version_lines())
    assert f"{'peft':<20} not installed  lightning-spectral[peft]" in lines
    assert f"{'torch':<20} not installed" in lines
    assert not any(line.startswith("pytest ") for line in lines)
