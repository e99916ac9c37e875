"""What several places say about the package is the same in all of them."""

import sys
from importlib.metadata import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from packaging.requirements import Requirement
from packaging.version import Version

import lightning_spectral as ls
from lightning_spectral.partition import Partition, report
from lightning_spectral.testing.doctor import version_lines

tomllib: Any = pytest.importorskip("tomllib" if sys.version_info >= (3, 11) else "tomli")
ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
REQUIREMENTS = {requirement.name: requirement for requirement in map(Requirement, PROJECT["dependencies"])}


def pinned(constraints: str) -> dict[str, Version]:
    """The versions in a file of constraints."""
    lines = [line.split("==") for line in (ROOT / constraints).read_text().splitlines() if not line.startswith("#")]
    return {name: Version(version) for name, version in lines}


def test_the_version_is_the_same_everywhere() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    newest = (ROOT / "CHANGELOG.md").read_text().split("\n## ")[1]
    assert ls.__version__ == citation["version"] == newest.split(",")[0]


def test_an_extra_that_errors_name_exists(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)  # as if it were not installed
    monkeypatch.delitem(sys.modules, "lightning_spectral.report.printed", raising=False)
    needs = 'this needs matplotlib; install it: pip install "lightning-spectral\\[examples\\]"'
    assert "examples" in metadata("lightning-spectral").get_all("Provides-Extra", [])
    history = ls.RoundHistory()
    history.rows = [{"fl/round": 0.0, "fl/loss": 1.0}]
    with pytest.raises(ModuleNotFoundError, match=needs):
        history.plot("fl/loss", tmp_path / "loss.png")
    net = torch.nn.Sequential(*[torch.nn.Linear(4, 4) for _ in range(3)])
    with pytest.raises(ModuleNotFoundError, match=needs):
        ls.cost_table(net, ls.FedAvg(), [1], torch.zeros(1, 4)).plot()
    with pytest.raises(ModuleNotFoundError, match=needs):
        report(Partition.from_lists([[0]])).plot(tmp_path / "partition.png")


def test_malicious_releases_of_lightning_are_excluded() -> None:
    """https://github.com/Lightning-AI/pytorch-lightning/security/advisories/GHSA-w37p-236h-pfx3"""
    allowed = REQUIREMENTS["lightning"].specifier
    assert not {"2.6.2", "2.6.3"} & {*allowed.filter(["2.4.0", "2.6.1", "2.6.2", "2.6.3", "2.6.6"])}
    for path in ROOT.glob("constraints*.txt"):
        assert not {Version("2.6.2"), Version("2.6.3")} & {
            pinned(path.name)[n] for n in ("lightning", "pytorch-lightning")
        }


def test_the_oldest_versions_that_are_tested_are_those_that_are_promised() -> None:
    oldest = pinned("constraints-oldest.txt")
    for name, requirement in REQUIREMENTS.items():
        (promised,) = (spec.version for spec in requirement.specifier if spec.operator == ">=")
        assert oldest[name] == Version(promised)
    assert PROJECT["requires-python"] == ">=3.10"
    assert "Programming Language :: Python :: 3.10" in PROJECT["classifiers"]


def test_the_doctor_names_what_is_required_and_the_extra_of_what_is_not() -> None:
    extras = {f"{PROJECT['name']}[{extra}]": lines for extra, lines in PROJECT["optional-dependencies"].items()}
    told = [line.split() for line in version_lines()]
    wanted = {(Requirement(line).name, extra) for extra, lines in extras.items() for line in lines}
    developers = {extra for extra in extras if extra.endswith(("[docs]", "[test]"))}
    assert {(line[0], line[-1]) for line in told if line[-1] in extras} == {w for w in wanted if w[1] not in developers}
    assert {line[0] for line in told if line[-1] not in extras} == {"python", PROJECT["name"], *REQUIREMENTS}
