"""What several places say about the package is the same in all of them."""

import sys
from importlib.metadata import metadata
from pathlib import Path

import pytest
import torch
import yaml

import lightning_spectral as ls
from lightning_spectral.partition import Partition, report

ROOT = Path(__file__).parents[1]


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
        ls.cost_table(net, example_input=torch.zeros(1, 4)).plot()
    with pytest.raises(ModuleNotFoundError, match=needs):
        report(Partition.from_lists([[0]])).plot(tmp_path / "partition.png")
