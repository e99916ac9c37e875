"""Pages of wandb, built offline. ``python tests/plugin/test_workspaces.py`` rewrites the expected one."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from lightning_spectral.plugin.callbacks.workspaces import comparison_view, main, run_view, workspace

pytest.importorskip("wandb_workspaces", reason="comes with the `dashboards` extra")
pytestmark = pytest.mark.filterwarnings("ignore:Pydantic V1 style:DeprecationWarning")  # that package's own
EXPECTED = Path(__file__).parents[1] / "fixtures/workspace_comparison.json"


def sent(made: Any) -> Any:
    """What publishing would send, without empty settings and random ids."""
    return without_noise(json.loads(made._to_model().model_dump_json(by_alias=True)))


def without_noise(node: Any) -> Any:
    if isinstance(node, dict):
        return {k: without_noise(v) for k, v in node.items() if v is not None and k not in ("__id__", "ref", "id")}
    return [without_noise(entry) for entry in node] if isinstance(node, list) else node


def panels(made: Any) -> list[dict[str, Any]]:
    sections = sent(made)["spec"]["section"]["panelBankConfig"]["sections"]
    return [panel for section in sections for panel in section.get("panels", [])]


def test_the_comparison_is_the_one_on_file() -> None:
    assert sent(workspace(comparison_view("val_acc"), "team", "spectral")) == json.loads(EXPECTED.read_text())


def test_a_runs_page_has_every_panel_of_its_specification() -> None:
    view = run_view("accuracy", model="words")
    lines = [panel for section in view["sections"].values() for panel in section if panel["panel"] == "lines"]
    made = workspace(view, "team", "spectral")
    drawn = [p["config"] for p in panels(made) if p["viewType"] == "Run History Line Plot"]
    assert [(c["xAxis"], c["metrics"]) for c in drawn] == [(panel["over"], panel["metrics"]) for panel in lines]
    for name in ("clients", "keep_ratios", "layers"):
        assert json.dumps(sent(made)).count(f'"words/tables/{name}"') == 1


def test_a_runs_page_has_its_pictures_and_the_histograms_that_were_asked_for(capsys: Any) -> None:
    key = "singular_values/net.2"
    drawn = panels(workspace(run_view("acc", model="words", histograms=[key]), "team", "spectral"))
    media = [panel["config"]["mediaKeys"] for panel in drawn if panel["viewType"] == "Media Browser"]
    assert media == [["words/pictures/spectra"], ["words/pictures/partition"]]
    lines = [panel["config"]["metrics"] for panel in drawn if panel["viewType"] == "Run History Line Plot"]
    assert [f"words/{key}"] in lines
    main(["team", "spectral", "--histogram", key])
    (run, _) = json.loads(capsys.readouterr().out)
    assert {"panel": "bins", "name": key} in run["sections"]["Spectra"]


def test_a_key_may_be_written_as_in_a_report() -> None:
    by_dots, by_slashes = (comparison_view("acc", group_by=f"data{sep}partitioner{sep}alpha") for sep in "./")
    assert by_dots == by_slashes
    drawn = panels(workspace(by_slashes, "team", "spectral"))
    assert {panel["config"]["groupBy"] for panel in drawn} == {"data.value.partitioner.alpha"}  # as wandb stores it


def test_publishing_without_the_extra_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb_workspaces", None)  # as if it were not installed
    monkeypatch.delitem(sys.modules, "wandb_workspaces.workspaces", raising=False)
    with pytest.raises(ModuleNotFoundError, match=r'install it: pip install "lightning-spectral\[dashboards\]"'):
        main(["team", "spectral", "--publish"])


def test_nothing_is_sent_unless_asked(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from wandb_workspaces.workspaces import Workspace

    saved = []
    monkeypatch.setattr(Workspace, "save", lambda self: saved.append(self.name) or self)
    monkeypatch.setattr(Workspace, "url", "somewhere")
    main(["team", "spectral", "--metric", "acc"])
    assert not saved
    run, comparison = json.loads(capsys.readouterr().out)
    assert (run["name"], run["group_by"]) == ("One run: acc", None)
    assert (comparison["name"], comparison["group_by"]) == ("Comparison: acc", "federation.algorithm.strategy.name")
    assert comparison["sections"]["Accuracy"][0] == {"panel": "lines", "metrics": ["acc"], "over": "fl/round"}
    main(["team", "spectral", "--metric", "acc", "--publish"])
    assert saved == ["One run: acc", "Comparison: acc"]


if __name__ == "__main__":
    text = json.dumps(sent(workspace(comparison_view("val_acc"), "team", "spectral")), indent=1)
    EXPECTED.write_text(text + "\n")
