"""Names in a report are texts: no formulas, no markup, nothing that a terminal or a browser would act on."""

from __future__ import annotations

import os
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from made_up_runs import rounds, write_run
from matplotlib.figure import Figure
from slow_cases import slow_but

import lightning_spectral as ls
from lightning_spectral.report import main
from lightning_spectral.report.measures import HIGH, LOW, MIDDLE
from lightning_spectral.report.printed import PRINTED, Canvas, draw_line, legend_above, look, printed
from lightning_spectral.report.runs import printable
from lightning_spectral.report.sections import heat_map_title

FORMULAS = [r"$\frac{$", "x^$", "$a$ and $b$", r"\$5"]
QUICK = "<script>$\\frac{$\x07"
ODD = [
    *FORMULAS,
    'id="x" href="#y" font: 9px z #010203',
    "two\nlines\tand\rmore",
    "\u202egpj.exe",
    "名前 🙂 اسم",
    "_hidden",
    "long" * 60,
]


class Texts(HTMLParser):
    """The tags and texts of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.texts: set[str] = set()
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)

    def handle_data(self, data: str) -> None:
        self.texts.add(data)


def write_odd_run(folder: Path, name: str, seed: int = 0) -> None:
    """A run whose metric, statistics, stage, layer, client table and setting have a name."""
    ends = {f"fl/clients/{name}/{end}": 0.5 for end in (LOW, MIDDLE, HIGH)}
    extra = {f"fl/seconds_{name}": 0.3, "fl/bit_entropy": 0.5, f"{name}/sampling_gap": 0.1, **ends}
    rows = [{name if key == "val_acc" else key: row[key] for key in row} for row in rounds([0.5], **extra)]
    layer = f"singular_values/{name}"
    bins = {layer: {"edges": [0.0, 0.5, 1.0], "counts": [1, 1]}}
    clients = {"tables/clients": {"columns": ["client", layer], "rows": [[3, layer]]}}
    shown = {"round": 0, "tables": clients, "histograms": bins}
    write_run(folder, rows, {"seed": seed, "odd": name, name: seed}, [shown])


@pytest.mark.parametrize("name", slow_but([QUICK], [QUICK, *ODD]))
def test_an_odd_name_is_text_wherever_it_is_shown(tmp_path: Path, name: str) -> None:
    write_odd_run(tmp_path / "runs/<b>a", name)
    write_odd_run(tmp_path / "runs/<b>b", name, seed=1)
    output, figures = tmp_path / "r.html", tmp_path / "png"
    assert main([str(tmp_path / "runs"), "-o", str(output), "--png", str(figures), "--title", name]) == 0
    page = Texts(output.read_text(encoding="utf-8"))
    assert not {"script", "b"} & page.tags
    assert len(list(figures.iterdir())) == 6
    text = output.read_text(encoding="utf-8")
    assert re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\ud800-\udfff]", text) is None
    if name in (QUICK, *FORMULAS):
        shown = printable(name)
        assert {shown, f"{shown}, last evaluation", f"{shown}: expected minus sampled"} <= page.texts


@pytest.mark.parametrize("folder", [b"\xff\xfe", b"a\nb \x1b[31m"])
def test_the_name_of_a_folder_may_be_no_text(tmp_path: Path, folder: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        write_run(tmp_path / os.fsdecode(folder) / "run", rounds([0.5]))
        write_run(tmp_path / os.fsdecode(folder) / "empty", [])
    except OSError:
        pytest.skip("this file system knows no such names")
    output = tmp_path / os.fsdecode(folder) / "r.html"
    assert main([str(tmp_path), "-o", str(output)]) == 0
    assert output.read_text(encoding="utf-8").count("Left out: ") == 1
    told = capsys.readouterr().out
    assert told.count("\n") == 1
    assert "\x1b" not in told
    assert main([str(tmp_path / os.fsdecode(folder) / "empty")]) == 1
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("name", FORMULAS)
def test_names_are_text_in_separate_figures_too(tmp_path: Path, name: str) -> None:
    with printed(tmp_path / "figure.svg", 4.0, 3.0) as figure:
        draw_line(figure.subplots(), [1, 2], [1, 2], look(0), name)
        legend_above(figure, columns=1)
    assert f">{name}<" in (tmp_path / "figure.svg").read_text(encoding="utf-8")
    history = ls.RoundHistory()
    history.rows = [{"fl/round": 0, name: 1.0}]
    history.plot(name, tmp_path / "metric.svg")
    assert f">{name}<" in (tmp_path / "metric.svg").read_text(encoding="utf-8")


def test_a_formula_of_a_script_is_still_one(tmp_path: Path) -> None:
    with printed(tmp_path / "figure.svg", 4.0, 3.0) as figure:
        figure.supxlabel(r"$W^2$")
    assert ">$W^2$<" not in (tmp_path / "figure.svg").read_text(encoding="utf-8")


def test_a_name_takes_no_more_than_a_few_lines() -> None:
    assert len(heat_map_title("layer." * 1000, "group " * 1000)) <= 16
    figure = Figure()
    draw_line(figure.subplots(), [1], [1], look(0), "long " * 1000)
    Canvas(figure, PRINTED, "wide").legend()
    assert len(figure.legends[0].get_texts()[0].get_text().splitlines()) == 8
