"""The page of a report: it loads nothing, has every section, says what is wrong, and shows names as text."""

import os
import re
import shutil
import subprocess
import sys
from html import escape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from made_up_runs import rounds, strategies, write_run
from matplotlib.figure import Figure

import lightning_spectral as ls
from lightning_spectral.errors import ReportError
from lightning_spectral.report import main
from lightning_spectral.report.compared import group_runs
from lightning_spectral.report.measures import HIGH, LOW, MIDDLE
from lightning_spectral.report.page import POLICY, write_report
from lightning_spectral.report.printed import draw_line, legend_above, look, printed
from lightning_spectral.report.runs import Histogram, LoggedRun, Table, printable, read_run
from lightning_spectral.report.sections import BITS, SWITCH_ON, Contents, all_sections, heat_map_title, pareto_section

PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
CLIENTS = {f"fl/clients/val_acc/{name}": x for name, x in ((LOW, 0.3), (MIDDLE, 0.5), (HIGH, 0.7))}
BITS_LOGGED = {"fl/bit_entropy": 0.8, "fl/bits_agreed": 0.1, "val_acc/sampling_gap": 0.02}
EVERYTHING = {**CLIENTS, **BITS_LOGGED, "fl/terms_visited": 0.4, "fl/expected_coverage": 0.5}
LOADS = {"src", "href", "xlink:href", "srcset", "data", "poster", "action", "background", "formaction"}


class Elements(HTMLParser):
    """All elements of a page, its texts, and the values of attributes that make a browser load something."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.texts: set[str] = set()
        self.loaded: list[str] = []
        self.ids: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.loaded += [value or "" for name, value in attrs if name in LOADS]
        self.ids += [value or "" for name, value in attrs if name == "id"]

    def handle_data(self, data: str) -> None:
        self.texts.add(data)


def made_up(folder: Path, logged: dict[str, float], media: Any = None, **config: Any) -> LoggedRun:
    return LoggedRun("run", folder, config, ({"fl/round": 0.0, "val_acc": 0.5, **logged},), media or {})


def sections_of(*runs: LoggedRun, metric: str = "val_acc") -> dict[str, Any]:
    contents = Contents(group_runs(runs)[0], metric, minimise=False)
    return {section.title: section for section in all_sections(contents)}


def svg_of(section: Any) -> str:
    assert section.picture is not None
    return section.picture.svg()


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a page and its figures, for runs that hold everything a logger of numbers can record."""
    folder = tmp_path_factory.mktemp("full")
    runs = strategies(folder / "runs", **EVERYTHING)
    assert main([str(runs), "-o", str(folder / "new/report.html"), "--png", str(folder / "png")]) == 0
    return folder


def test_a_page_loads_nothing(full: Path) -> None:
    page = (full / "new/report.html").read_text()
    elements = Elements(page)
    assert not {"script", "link", "iframe", "object", "embed", "base"} & set(elements.tags)
    assert [value for value in elements.loaded if not value.startswith(("#", "data:image/png;"))] == []
    assert re.findall(r"url\((?!#)|@import|fetch\(", page) == []
    assert f'http-equiv="Content-Security-Policy" content="{POLICY}"' in page


def test_references_within_a_page_are_unique_and_exist(full: Path) -> None:
    page = (full / "new/report.html").read_text()
    elements = Elements(page)
    assert len(elements.ids) == len(set(elements.ids))
    used = {value[1:] for value in elements.loaded if value.startswith("#")} | set(re.findall(r"url\(#([^)]+)\)", page))
    assert used
    assert used <= set(elements.ids)


def test_a_figure_that_is_too_wide_for_a_phone_scrolls_with_letters_of_ten_pixels(full: Path) -> None:
    page = (full / "new/report.html").read_text()
    (rem,) = re.findall(r"figure {[^}]*overflow-x: auto; }\nsvg {[^}]*min-width: (\d+)rem;", page)
    for svg in re.findall(r"<svg role=.*?</svg>", page, re.DOTALL):
        letters = map(float, re.findall(r"font-size: ([\d.]+)px", svg))
        wide = float(svg.split('viewBox="0 0 ')[1].split()[0])
        assert 16 * int(rem) * min(letters) / wide >= 10


def test_figures_are_in_the_page_and_in_files(full: Path) -> None:
    page = (full / "new/report.html").read_text()
    names = {"pareto", "curves", "fairness", "coverage", "bits", "seconds"}
    assert {path.stem for path in (full / "png").iterdir()} == names
    assert all(path.read_bytes().startswith(PNG_SIGNATURE) for path in (full / "png").iterdir())
    assert page.count("<svg role=") == len(names)
    assert "2 groups of 2 runs each, which differ in <code>federation/algorithm/strategy</code>." in page


@pytest.mark.slow
def test_the_same_runs_make_the_same_figure(full: Path) -> None:
    groups, _ = group_runs([read_run(full / "runs/TopN/version_0/rounds.jsonl")])
    one, two = (svg_of(pareto_section(Contents(groups, "val_acc", False))) for _ in range(2))
    assert one == two


def test_what_the_runs_lack_is_a_remark_on_what_to_switch_on(tmp_path: Path) -> None:
    sections = sections_of(made_up(tmp_path, {"fl/loss": 1.0}))
    del sections["Settings"]
    assert {section.remark for section in sections.values() if not section.picture} == set(SWITCH_ON.values())


def test_bits_have_a_panel_for_each_figure_that_some_run_has(tmp_path: Path) -> None:
    first = made_up(tmp_path / "a", {"fl/bit_entropy": 0.5, "val_acc/sampling_gap": 0.1})
    drawn = svg_of(sections_of(first, made_up(tmp_path / "b", {"fl/bits_agreed": 0.5}))["Bits"])
    titles = [words for words in (*BITS.values(), "val_acc: expected minus sampled") if f">{words}<" in drawn]
    assert titles == ["entropy of a bit", "bits on which all clients agree", "val_acc: expected minus sampled"]


def test_shares_have_a_whole_axis_and_small_moves_their_own(tmp_path: Path) -> None:
    picture = sections_of(made_up(tmp_path, {"fl/bits_agreed": 0.02, "fl/probs_moved": 0.02}))["Bits"].picture
    assert picture is not None
    shares, moves = (axes.get_ylim() for axes in picture.drawn().axes)
    assert shares == (0, 1.03)
    assert moves[0] == 0
    assert 0.02 < moves[1] < 0.03


def test_tables_of_a_dashboard_become_heat_maps_and_a_list_of_clients(tmp_path: Path) -> None:
    counted = Histogram((0.0, 1.0, 2.0), (3, 1))
    clients = Table(("round", "client_id", "val_acc"), ((0, 7, 0.123456),))
    spectra_of = {f"singular_values/{layer}": {0: counted, 10: counted} for layer in ("net.0", "net.2")}
    sections = sections_of(made_up(tmp_path, {}, {**spectra_of, "tables/clients": {0: clients}}))
    drawn = svg_of(sections["Singular values"])
    assert drawn.count(">net.0<") == drawn.count(">net.2<") == 1
    shown = Table(("client_id", "val_acc"), ((7, "0.1235"),))
    assert sections["Clients"].tables == (("run, round 1", shown),), "the caption has the round, counted from 1"


def test_one_of_several_models_is_enough_for_coverage_and_bits(tmp_path: Path) -> None:
    logged = {"a/fl/loss": 1.0, "b/fl/loss": 1.0, "a/fl/terms_visited": 0.4, "b/fl/bit_entropy": 0.5}
    sections = sections_of(made_up(tmp_path, logged))
    assert sections["Coverage"].picture is not None
    assert sections["Bits"].picture is not None


def test_runs_of_one_name_have_a_row_each_and_nan_is_remarked_on(tmp_path: Path) -> None:
    logged = {"fl/bytes_up": 8.0, **CLIENTS}
    first = made_up(tmp_path / "0", logged, seed=0)
    sections = sections_of(first, made_up(tmp_path / "1", {**logged, "val_acc": float("nan")}, seed=1))
    ((_, of_clients),) = sections["Fairness"].tables
    assert [row[0] for row in of_clients.rows] == ["run", "run"]
    _, (_, every_run) = sections["val_acc against megabytes"].tables
    assert [row[-1] for row in every_run.rows] == ["", "val_acc is nan in its last 5 evaluations"]


def test_bars_of_clients_whose_groups_sent_the_same_stand_side_by_side(tmp_path: Path) -> None:
    made = (made_up(tmp_path / str(mb), {"fl/bytes_up": mb * 1e6, **CLIENTS}, lr=mb) for mb in (1.0, 2.0, 1.01))
    figure = sections_of(*made)["val_acc against megabytes"].picture.drawn()
    figure.draw_without_rendering()
    places = [line.get_transform().transform((1.0, 0.5))[0] for line in figure.axes[1].lines[::2]]
    points = (np.array(places) - figure.axes[1].transData.transform((1.0, 0.5))[0]) * 72 / figure.dpi
    assert points.tolist() == pytest.approx([-4, 0, 4], abs=1e-6)


def test_heat_maps_do_not_show_what_is_smaller_than_a_bin(tmp_path: Path) -> None:
    """Of one large and nine tiny values, the histogram only says that nine are in the first of its four bins."""
    counted = Histogram((0.0, 0.25, 0.5, 0.75, 1.0), (9, 0, 0, 1))
    media = {"singular_values/a_layer.with.a_name.that_is.much_too_long": {index: counted for index in range(3)}}
    picture = sections_of(made_up(tmp_path, {}, media))["Singular values"].picture
    assert picture is not None
    panel, bar = picture.drawn().axes
    assert panel.collections[0].norm.vmin == 0.1  # the smallest share that is known is 1 / 7
    assert list(panel.get_xticks()) == [1, 2, 3]
    assert panel.collections[0].get_coordinates()[0, :, 0].tolist() == [0.5, 1.5, 2.5, 3.5]
    assert bar.get_xlim()[0] == pytest.approx(0.1)
    assert panel.get_title().splitlines() == ["a_layer.with.a_name.that_is.", "much_too_long", "run"]


def test_a_report_takes_texts_for_paths_and_refuses_what_it_does_not_know(tmp_path: Path) -> None:
    run = str(write_run(tmp_path / "run", [{"fl/round": 0, "val_acc": 0.5}]))
    assert write_report([run], str(tmp_path / "r.html"), png=str(tmp_path / "png"))[0] == tmp_path / "r.html"
    with pytest.raises(ReportError, match=r"`mode` must be 'min', 'max' or None, got 'maximum'"):
        write_report([run], tmp_path / "r.html", mode="maximum")
    with pytest.raises(ReportError, match=r"No run was given; expected a `rounds.jsonl`"):
        write_report([], tmp_path / "r.html")


def test_without_matplotlib_the_extra_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.startswith("lightning_spectral.report.")]:
        if name != "lightning_spectral.report.page":
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # as if it were not installed
    assert main([str(tmp_path)]) == 1
    assert 'this needs matplotlib; install it: pip install "lightning-spectral[report]"' in capsys.readouterr().err


def test_a_run_of_a_folder_without_the_metric_is_left_out_and_a_named_one_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path / "runs/whole", rounds([0.5]), {"seed": 0})
    killed = write_run(tmp_path / "runs/killed", rounds([0.5])[:1], {"seed": 1})
    options = ["-o", str(tmp_path / "r.html")]
    assert main([str(tmp_path / "runs"), *options]) == 0
    page = (tmp_path / "r.html").read_text()
    assert f"Left out: {killed / 'rounds.jsonl'} has no evaluation metric; it has <code>train_loss</code>." in page
    assert main([str(tmp_path / "runs"), "--metric", "val_loss", *options]) == 0
    page = (tmp_path / "r.html").read_text()
    assert f"Left out: {killed / 'rounds.jsonl'} has no metric <code>val_loss</code>" in page
    assert main([str(tmp_path / "runs/whole"), str(killed / "rounds.jsonl"), *options]) == 1
    assert "has no evaluation metric in common with the other runs" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["{gone}", "-o", "{run}"], "{run} is a folder, but the page is one file: name it, as in {run}/report.html."),
        (["{gone}", "-o", "{run}/r.pdf"], "its name must end in .html; got {run}/r.pdf"),
        (["{gone}", "-o", "{file}/new/r.html"], "{file}/new cannot be a folder: {file} is a file"),
        (["{gone}", "--png", "{file}"], "{file} cannot be a folder: {file} is a file"),
        (["{gone}"], "{gone} does not exist; expected a `rounds.jsonl`"),
        (["{long}"], "{long} cannot be read: File name too long"),
        (["{run}/notes.txt"], "{run}/notes.txt cannot be read: its first line does not say which run it is"),
        (["https://wandb.ai/a/b"], "does not exist; expected"),
        (["/dev/null"], "/dev/null is not a run; expected"),
        (["{run}", "{run}/../empty"], "{run}/../empty contains no run; expected"),
        (["{run}", "-o", "{pipe}"], "{pipe} is not an ordinary file, so no page can be written to it"),
        (["{run}", "-o", "{long}.html"], "{long}.html cannot be written: File name too long. Choose another"),
        (["{run}", "--png", "{long}"], "{long} cannot be written: File name too long. Choose another"),
        (["{run}", "-o", "/dev/null/r.html"], "/dev/null cannot be a folder: /dev/null is a file"),
        (["{run}", "--metric", "f1"], "has no metric `f1`; it has `train_loss`, `val_acc`, `val_loss`"),
        (["{run}", "--metric", ""], "has no metric ``; it has"),
        (["{run}", "--group-by", "nothing"], "No run has a setting `nothing`; known settings: lr"),
    ],
)
def test_a_mistake_in_the_arguments_is_one_line_on_standard_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], says: str
) -> None:
    places = {"gone": tmp_path / "gone", "run": write_run(tmp_path / "run", rounds([0.5]), {"lr": 0.1})}
    places |= {"long": tmp_path / ("x" * 300), "pipe": tmp_path / "pipe.html"}
    os.mkfifo(places["pipe"])
    (tmp_path / "empty").mkdir()
    places["file"] = places["run"] / "notes.txt"
    places["file"].write_text("")
    before = {*tmp_path.rglob("*")}
    options = [] if "-o" in arguments else ["-o", str(tmp_path / "r.html")]
    assert main([argument.format(**places) for argument in arguments] + options) == 1
    told = capsys.readouterr()
    assert told.out == ""
    assert re.fullmatch(rf"error: .*{says.format(**places)}.*\n", told.err)
    assert {*tmp_path.rglob("*")} == before


@pytest.mark.parametrize("arguments", [[], [""], ["--group-by", "lr", "run"], ["run", "--mode", "most"], ["run", "-x"]])
def test_arguments_that_cannot_be_parsed_end_with_status_2(capsys: Any, arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert "Traceback" not in capsys.readouterr().err


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


def write_odd_run(folder: Path, name: str, seed: int = 0) -> None:
    """A run whose metric, statistics, stage, layer, client table and setting have a name."""
    ends = {f"fl/clients/{name}/{end}": 0.5 for end in (LOW, MIDDLE, HIGH)}
    bits = {"fl/bit_entropy": 0.5, f"{name}/sampling_gap": 0.1}
    extra = {"fl/bytes_up": 1e6 + 1e6 * seed, f"fl/seconds_{name}": 0.3, **bits, **ends}
    rows = [{name if key == "val_acc" else key: row[key] for key in row} for row in rounds([0.5], **extra)]
    layer = f"singular_values/{name}"
    bins = {layer: {"edges": [0.0, 0.5, 1.0], "counts": [1, 1]}}
    clients = {"tables/clients": {"columns": ["client", layer], "rows": [[3, layer]]}}
    shown = {"round": 0, "tables": clients, "histograms": bins}
    write_run(folder, rows, {"seed": seed, "odd": name, name: seed}, [shown])


@pytest.mark.parametrize("name", [QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in ODD)])
def test_an_odd_name_is_text_wherever_it_is_shown(tmp_path: Path, name: str) -> None:
    write_odd_run(tmp_path / "runs/<b>a", name)
    write_odd_run(tmp_path / "runs/<b>b", name, seed=1)
    output = tmp_path / "r.html"
    assert main([str(tmp_path / "runs"), "-o", str(output), "--title", name]) == 0
    text = output.read_text(encoding="utf-8")
    page = Elements(text)
    assert not {"script", "b"} & {*page.tags}
    assert text.count("<svg role=") == 6
    assert re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\ud800-\udfff]", text) is None
    if name in (QUICK, *FORMULAS):
        shown = printable(name)
        assert {shown, f"{shown}, last 5", f"{shown}: expected minus sampled"} <= page.texts


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
    legend_above(figure, columns=3)
    assert len(figure.legends[0].get_texts()[0].get_text().splitlines()) == 8


# Shows a page in a frame, because a window has a minimum width, unfolds everything, and says how far it overflows.
FRAME = """<iframe srcdoc="{page}" style="width:{width}px;height:3000px;border:0"></iframe><script>
onload = () => {{
  const page = document.querySelector("iframe").contentDocument;
  page.querySelectorAll("details").forEach((part) => (part.open = true));
  const shown = [...page.querySelectorAll("svg")].filter((figure) => figure.getBoundingClientRect().width > 0);
  const root = page.documentElement;
  document.title = `${{root.scrollWidth - root.clientWidth}} too wide, ${{shown.length}}`;
}};
</script>"""


@pytest.mark.slow
@pytest.mark.parametrize("width", [360, 1280])
def test_a_browser_shows_the_page_without_complaint(full: Path, tmp_path: Path, width: int) -> None:
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if chromium is None:
        pytest.skip("no Chromium is installed")
    frame = tmp_path / "frame.html"
    frame.write_text(FRAME.format(page=escape((full / "new/report.html").read_text()), width=width))
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"]
    options += ["--disable-background-networking", "--disable-component-update", "--enable-logging=stderr"]
    command = [chromium, *options, f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", frame.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert "CONSOLE" not in done.stderr
    assert "<title>0 too wide, 6</title>" in done.stdout
