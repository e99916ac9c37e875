"""What notebooks show: tables, plans, reports and histories as HTML, figures as PNG; and the tutorial runs."""

import ast
import json
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from federation import Fit
from torch import nn

import lightning_spectral as ls
from lightning_spectral.partition import report
from lightning_spectral.plugin.callbacks import ClientRow, ClientTable

NOTEBOOK = Path(__file__).parents[1] / "examples/tutorial.ipynb"
PNG = b"\x89PNG\r\n\x1a\n"


class Cells(HTMLParser):
    """The texts of all cells of all tables, and the tags that are open."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.texts: list[str] = []
        self.open: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        if tag != "br":
            self.open.append(tag)
        if tag in ("td", "th"):
            self.texts.append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] in ("td", "th"):
            self.texts[-1] += data


def cells(shown: Any) -> list[str]:
    parsed = Cells(shown._repr_html_())
    assert not parsed.open
    return parsed.texts


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 24), nn.ReLU(), nn.Linear(24, 20), nn.BatchNorm1d(20), nn.Linear(20, 3))


def test_a_plan_shows_its_layers_and_buffers() -> None:
    plan = ls.validate(mlp(), torch.zeros(5, 6))
    shown = cells(plan)
    assert shown[:7] == ["layer", "type", "weight", "N", "in forward", "held", "reason"]
    assert {"3.running_mean", "first layer", "24x6"} <= set(shown)
    assert [word for line in str(plan).splitlines() for word in line.split()] == " ".join(shown).split()


def test_a_width_plan_shows_its_groups() -> None:
    shown = cells(ls.nn.width_plan(mlp(), torch.zeros(5, 6)))
    assert shown[:3] == ["group", "channels", "layers"]
    assert "24" in shown


def test_a_cost_table_shows_what_it_prints() -> None:
    table = ls.cost_table(mlp(), ls.SpectralSharding(), [0.5], torch.zeros(5, 6))
    assert " ".join(cells(table)).split() == str(table).split()


def test_a_split_shows_the_clients_that_it_prints(data: ls.FederatedDataModule) -> None:
    found = data.report()
    shown = cells(found)
    assert shown[:6] == ["client", "examples", "classes", "0", str(int(found.counts[0])), *found._mixture(0)]
    assert len(shown) == 3 * (1 + 10)
    assert "and 2 more clients" in found._repr_html_()
    assert cells(report(data.partition))[:4] == ["client", "examples", "0", str(int(found.counts[0]))]


def test_a_table_of_clients_shows_their_metrics_and_no_markup_of_users() -> None:
    table = ClientTable(0, (ClientRow(3, 7, {"<b>acc</b>": 0.5}),), "")
    assert cells(table) == ["client", "examples", "<b>acc</b>", "3", "7", "0.5"]


@pytest.fixture(scope="module")
def history() -> ls.RoundHistory:
    made = ls.RoundHistory()
    for i in range(12):
        made.rows.append({"fl/round": float(i), "fl/loss": 1.0 / (i + 1), "fl/seconds_train": 0.1, "acc": i / 12})
    made.rows[-1].pop("acc")
    return made


def test_a_history_shows_its_last_rounds_without_a_clock(history: ls.RoundHistory) -> None:
    shown = cells(history)
    assert shown[:3] == ["fl/round", "fl/loss", "acc"]
    assert shown[3:6] == ["2", "0.3333", "0.1667"]
    assert shown[-3:] == ["11", "0.08333", ""]
    assert "12 rounds" in history._repr_html_()
    assert ls.RoundHistory()._repr_html_() == "<p>0 rounds</p>"


def test_a_history_plots_without_a_path(history: ls.RoundHistory) -> None:
    pytest.importorskip("matplotlib", reason="comes with the `examples` extra")
    figure: Any = history.plot("acc")
    (axes,) = figure.axes
    assert [*axes.lines[0].get_xdata()] == [float(i + 1) for i in range(11)]
    assert figure._repr_png_().startswith(PNG)
    assert [panel.get_ylabel() for panel in history.plot().axes] == ["fl/loss", "acc"]
    with pytest.raises(ValueError, match="no round has a metric 'to plot'; known metrics: none"):
        ls.RoundHistory().plot()


def test_a_picture_of_costs_is_shown() -> None:
    pytest.importorskip("matplotlib", reason="comes with the `examples` extra")
    figure: Any = ls.cost_table(mlp(), ls.SpectralSharding(), [0.5], torch.zeros(5, 6)).plot()
    assert figure._repr_png_().startswith(PNG)


def test_the_loss_of_a_run_and_what_it_validates_are_plotted(lit: Any, data: Any, fit: Fit) -> None:
    pytest.importorskip("matplotlib", reason="comes with the `examples` extra")
    fitted = fit(lit, data, algorithm=ls.SpectralSharding(), max_epochs=2)
    labels = [panel.get_ylabel() for panel in fitted.history.plot().axes]
    assert labels[0] == "fl/loss"
    assert {"val_loss", "val_acc"} == set(labels[1:])


def test_the_tutorial_holds_the_outputs_of_one_run_from_top_to_bottom() -> None:
    notebook = json.loads(NOTEBOOK.read_text())
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == [*range(1, len(code) + 1)]
    kinds = [kind for cell in code for output in cell["outputs"] for kind in output.get("data", {})]
    assert kinds.count("text/html") == 3  # costs, split, history
    assert kinds.count("image/png") == 1
    assert len({cell["id"] for cell in notebook["cells"]}) == len(notebook["cells"])
    assert not re.search(r"0x[0-9a-f]{6}|/home/|/tmp/|Error", json.dumps([cell["outputs"] for cell in code]))


def displayed(namespace: dict[str, Any]) -> Iterator[Any]:
    """Run the notebook's cells as a kernel does, and yield what each shows: the value of its last line."""
    for cell in json.loads(NOTEBOOK.read_text())["cells"]:
        if cell["cell_type"] == "code":
            body = ast.parse("".join(cell["source"]))
            last = body.body.pop() if isinstance(body.body[-1], ast.Expr) else None
            exec(compile(body, NOTEBOOK.name, "exec"), namespace)
            if isinstance(last, ast.Expr):
                yield eval(compile(ast.Expression(last.value), NOTEBOOK.name, "eval"), namespace)
            if "ROUNDS" in namespace:
                namespace["ROUNDS"] = 2


def test_the_tutorial_runs_and_shows_tables_and_a_figure(tmp_path, monkeypatch, capsys):
    pytest.importorskip("sklearn", reason="comes with the `examples` extra")
    pytest.importorskip("matplotlib", reason="comes with the `examples` extra")
    monkeypatch.chdir(tmp_path)
    with torch.random.fork_rng(devices=[]):
        shown = [value for value in displayed({"__name__": "__main__"}) if value is not None]
        costs, ratio, split, history, figure = shown
    for table in (costs, split, history):
        assert len(cells(table)) > 10
    assert 0.1 < ratio < 0.5
    assert figure._repr_png_().startswith(PNG)
    printed = capsys.readouterr().out
    assert "sharded: " in printed
    plan = next(cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if "ls.validate" in "".join(cell["source"]))
    assert "".join(plan["outputs"][0]["text"]) in printed
    assert not list(tmp_path.iterdir())
