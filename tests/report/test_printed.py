"""Figures of studies, examples and benchmarks: one look, seeds as bands, rounds as whole numbers."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from study_files import study_files

from lightning_spectral.report import printed
from lightning_spectral.report.printed import BASELINE, COLOURS, GRID, INK

ROOT = Path(__file__).parents[2]


@pytest.fixture
def draw_seeds(tmp_path: Path) -> Iterator[Any]:
    with study_files(".", ["seed_curves"], tmp_path) as files:
        yield files.seed_curves.draw_seeds


def test_a_curve_is_the_mean_of_the_seeds_and_its_band_goes_from_the_worst_to_the_best(draw_seeds: Any) -> None:
    axes = Figure().subplots()
    draw_seeds(axes, [1, 2], [[0.0, 4.0], [2.0, 4.0], [4.0, 10.0]], printed.look(1), "ours")
    (line,), (band,) = axes.lines, axes.collections
    assert line.get_xydata().tolist() == [[1, 2], [2, 6]]
    assert to_hex(line.get_color()).upper() == to_hex(band.get_facecolor()[0]).upper() == COLOURS[1]
    low, high = band.get_paths()[0].vertices.min(0), band.get_paths()[0].vertices.max(0)
    assert (low.tolist(), high.tolist()) == ([1, 0], [2, 10])
    assert sorted(set(map(tuple, band.get_paths()[0].vertices.tolist()))) == [(1, 0), (1, 4), (2, 4), (2, 10)]


@pytest.mark.parametrize(("runs", "lines"), [([], 0), ([[1.0, 2.0]], 1)])
def test_without_repetitions_there_is_no_band_and_without_runs_nothing(
    runs: list[list[float]], lines: int, draw_seeds: Any
) -> None:
    axes = Figure().subplots()
    draw_seeds(axes, [1, 2], runs, BASELINE, "dense")
    assert (len(axes.lines), len(axes.collections)) == (lines, 0)


@pytest.mark.parametrize("last", [1, 2, 3, 50, 100])
def test_rounds_are_marked_at_whole_numbers(last: int) -> None:
    axes = Figure().subplots()
    axes.plot(np.arange(1, last + 1), np.zeros(last))
    printed.round_axis(axes)
    ticks = axes.get_xticks()
    assert len(ticks)
    assert (ticks == ticks.round()).all()
    assert last != 100 or set(ticks) >= {20, 40, 60, 80, 100}


def test_a_long_curve_has_few_markers_and_panels_share_one_legend(tmp_path: Path) -> None:
    with printed.printed(tmp_path / "it.png", 4.0, 3.0) as figure:
        for axes in figure.subplots(1, 2):
            printed.draw_line(axes, range(200), np.zeros(200), printed.look(0), "ours")
        printed.legend_above(figure, columns=3)
    assert (tmp_path / "it.png").read_bytes().startswith(b"\x89PNG")
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["ours"]
    assert figure.axes[0].lines[0].get_markevery() == (0, 20)


@pytest.mark.parametrize("folder", ["benchmarks", "examples", "studies"])
def test_every_script_draws_in_this_look(folder: str) -> None:
    drawing = [path for path in (ROOT / folder).rglob("*.py") if "savefig(" in path.read_text()]
    assert not drawing, "write figures with `lightning_spectral.report.printed.printed`"


def test_an_svg_has_no_background_and_changes_its_colours_on_dark_pages(tmp_path: Path) -> None:
    with printed.printed(tmp_path / "a.svg", 2.0, 2.0) as figure:
        figure.add_subplot().plot([0, 1], [0, 1], color=INK)
    style, drawn = (tmp_path / "a.svg").read_text().split("</style>", 1)
    assert "prefers-color-scheme: dark" in style
    assert all(f'[style*="stroke: {colour}"]' in style for colour in (INK, GRID))
    assert "fill: #ffffff" not in drawn
    assert {INK, GRID} <= set(re.findall(r"stroke: (#\w{6})", drawn))
