"""Of a folder that somebody else filled, a report reads ordinary files of runs, and nothing outside it."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from made_up_runs import rounds, write_csv
from mutated_runs import TABLE, write_csv_run, write_wandb

from lightning_spectral.errors import ReportError
from lightning_spectral.report import files
from lightning_spectral.report.dashboard import client_tables, spectra
from lightning_spectral.report.figures.heat_maps import matrix
from lightning_spectral.report.media import LoggedHistogram
from lightning_spectral.report.reading import read_run, read_runs
from lightning_spectral.report.runs import LoggedRun, build_run

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")  # in wandb
SECRET = "value that only another folder holds"


@pytest.fixture(autouse=True)
def quick() -> Iterator[None]:
    began = time.perf_counter()
    yield
    assert time.perf_counter() - began < 30, "time must be bounded"


def socket_file(path: Path) -> None:
    here = Path.cwd()
    os.chdir(path.parent)  # addresses are short
    try:
        socket.socket(socket.AF_UNIX).bind(path.name)
    finally:
        os.chdir(here)


def outside(path: Path) -> None:
    """A link to a whole file of the same kind in another folder."""
    (runs,) = (parent for parent in path.parents if parent.name == "runs")
    other = runs.with_name("other")
    write_csv_run(other, 7)
    path.symlink_to(next(other.rglob(path.name)))


MAKE: dict[str, Callable[[Path], None]] = {
    "pipe": lambda path: os.mkfifo(path),
    "socket": socket_file,
    "device": lambda path: path.symlink_to("/dev/zero"),
    "circle": lambda path: path.symlink_to(path.name),
    "dangling": lambda path: path.symlink_to("nothing"),
    "folder": lambda path: path.symlink_to("."),
    "outside": outside,
}


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no such files")
@pytest.mark.parametrize("file", ["metrics.csv", "hparams.yaml", "dashboard/clients_000000.csv"])
@pytest.mark.parametrize("make", MAKE)
def test_what_is_no_file_of_the_run_leaves_the_run_out_by_name(tmp_path: Path, make: str, file: str) -> None:
    write_csv(tmp_path / "runs/good", rounds([0.5]), {"seed": 0})
    write_csv_run(tmp_path / "runs/bad", 1)
    path = tmp_path / "runs/bad" / file
    path.unlink()
    MAKE[make](path)
    runs, left_out = read_runs([tmp_path / "runs"])
    assert [run.path.parent.name for run in runs] == ["good"]
    assert len(left_out) == 1
    assert left_out[0].startswith(f"{path} ")
    assert "\n" not in left_out[0]


@pytest.mark.parametrize("name", ["dashboard", "files"])
def test_a_folder_of_a_run_that_leads_elsewhere_is_not_read(tmp_path: Path, name: str) -> None:
    write_csv_run(tmp_path / "runs/csv", 0)
    write_wandb(tmp_path / "runs/wandb", 1)
    (run,) = (path.parent for path in (tmp_path / "runs").rglob(name))
    (run / name).rename(tmp_path / "other")
    (run / name).symlink_to(tmp_path / "other")
    runs, left_out = read_runs([tmp_path / "runs"])
    told = [*left_out, *(note for one in runs for note in one.notes)]
    assert len(told) == 1
    assert f"points outside {run}" in told[0]
    assert all(client_tables(one) == {} for one in runs if one.path.parent == run)


def test_a_link_to_a_run_that_is_in_the_folder_or_is_named_is_followed(tmp_path: Path) -> None:
    write_csv(tmp_path / "runs/a", rounds([0.5]), {"seed": 0})
    (tmp_path / "runs/latest").mkdir()
    (tmp_path / "runs/latest/metrics.csv").symlink_to(tmp_path / "runs/a/metrics.csv")
    (tmp_path / "link").symlink_to(tmp_path / "runs")
    assert [len(found) for found in read_runs([tmp_path / "link"])] == [1, 0]
    write_csv(tmp_path / "b", rounds([0.5]), {"seed": 1})
    (tmp_path / "runs/metrics.csv").symlink_to(tmp_path / "b/metrics.csv")
    assert [len(found) for found in read_runs([tmp_path / "link"])] == [1, 1]
    assert len(read_run(tmp_path / "runs/metrics.csv").rows) == 1


@pytest.mark.parametrize("absolute", [True, False])
def test_a_table_of_wandb_is_read_from_the_run_only(tmp_path: Path, absolute: bool) -> None:
    pytest.importorskip("wandb", reason="wandb is in the `report` extra")
    secret = tmp_path / "other.json"
    secret.write_text(json.dumps({**TABLE, "columns": ["client", SECRET]}))
    inside = "media/table/clients.table.json"
    write_wandb(tmp_path / "run", 0, str(secret) if absolute else f"{inside}/../../../../../other.json")
    run = read_run(tmp_path / "run/run-x.wandb")
    assert client_tables(run) == {}
    assert SECRET not in str(run)
    (note,) = run.notes
    assert note.startswith("1 tables or histograms are left out, the first because `tables/clients` cannot be read: ")
    assert f"points outside {tmp_path / 'run/files'}" in note


def test_a_table_of_wandb_that_is_no_table_is_left_out_and_the_run_is_read(tmp_path: Path) -> None:
    pytest.importorskip("wandb", reason="wandb is in the `report` extra")
    write_wandb(tmp_path, 0)
    for text in ("[1]", "{}", '{"columns": ["a"], "data": [[1, 2]]}', "[" * 100_000, '{"columns": 3, "data": []}', ""):
        (tmp_path / "files/media/table/clients.table.json").write_text(text)
        run = read_run(tmp_path / "run-x.wandb")
        assert client_tables(run) == {}
        assert list(spectra(run)) == ["net"]
        assert "`tables/clients` cannot be read" in run.notes[0]


def doubled(first: str, line: str) -> str:
    """Ten lines of aliases, each of which stands for the line before it nine times."""
    pairs = zip("abcdefghi", "bcdefghij", strict=True)
    return first + "".join(line.format(new, ", ".join([f"*{before}"] * 9)) for before, new in pairs)


NESTED = doubled("a: &a [1, 1, 1]\n", "{0}: &{0} [{1}]\n")
MERGED = doubled("a: &a {x: 1}\n", "{0}: &{0} {{<<: [{1}]}}\n")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (NESTED, "its aliases expand to too much"),
        (MERGED, "its aliases expand to too much"),
        ("a: &a {b: *a}", "nested too deeply"),
        ("a: [", "while parsing"),
        ("a: " + "[" * 100_000, "RecursionError|recursion"),
        (f"a: {'9' * 5000}", "it has a number of 5000 digits"),
        (f"a: 0x{'f' * 5000}", "it has a number of 5002 digits"),
        ("a: 2001-99-99", "month must be in 1..12"),
        ("a: !!int x", "invalid literal for int"),
        ("[1, 2]", "it is a list, not a mapping"),
        ("text", "it is a str, not a mapping"),
        ("a" * (2**20 + 1), "has 1 MB; a report reads at most 1"),
        ("\n".join(f"a{index}: 1" for index in range(10_001)), "there are more than 10000"),
    ],
    ids=lambda value: value[:20],
)
def test_settings_that_lead_to_too_much_or_are_none_are_refused(tmp_path: Path, text: str, says: str) -> None:
    (write_csv(tmp_path / "run", rounds([0.5])) / "hparams.yaml").write_text(text)
    with pytest.raises(ReportError, match=says) as refused:
        read_run(tmp_path / "run/metrics.csv")
    assert "\n" not in str(refused.value)


def test_settings_of_ordinary_runs_may_share_values_and_hold_long_lists(tmp_path: Path) -> None:
    shared = "weights: &w [0.5, 0.25]\nagain: *w\nbase: &b {lr: 0.1}\nother: {<<: *b, seed: 1}\n"
    text = f"{shared}classes: {[1] * 20_000}"
    (write_csv(tmp_path / "run", rounds([0.5])) / "hparams.yaml").write_text(text)
    config = read_run(tmp_path / "run/metrics.csv").config
    assert (config["again"], config["other"]) == ([0.5, 0.25], {"lr": 0.1, "seed": 1})
    assert len(config["classes"]) == 20_000


def test_a_file_beyond_all_runs_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_csv(tmp_path / "run", rounds([0.5])) / "metrics.csv"
    assert len(read_run(path).rows) == 1
    with path.open("r+b") as file:
        file.truncate(files.TEXT_MEGABYTES * files.MEGABYTE + 1)  # a hole: the disk holds no more than before
    with pytest.raises(ReportError, match=r"metrics.csv has 256 MB; a report reads at most 256. Remove it"):
        read_run(path)


@pytest.mark.parametrize("round_idx", ["-1", "0.5", "1e18"])
def test_a_round_that_is_none_leaves_the_run_out(tmp_path: Path, round_idx: str) -> None:
    path = tmp_path / "metrics.csv"
    path.write_text(f"fl/round,val_acc\n{round_idx},0.5\n")
    with pytest.raises(ReportError, match=r"has a round .*; rounds are numbered 0, 1, 2, \.\.\. Leave this run out"):
        read_run(path)


def test_the_epoch_of_a_row_without_a_round_may_have_a_fraction(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    path.write_text("epoch,val_acc\n1.5,0.5\n")
    assert [row["fl/round"] for row in read_run(path).rows] == [1]


def test_numbers_of_any_length_are_numbers_and_what_has_diverged_is_infinite(tmp_path: Path) -> None:
    inf = float("inf")
    given = {10**400: inf, -(10**400): -inf, "9" * 5000: inf, 1e300: inf, "-1e39": -inf, 3.4e38: 3.4e38}
    logged = {str(index): value for index, value in enumerate(given)}
    (row,) = build_run("run", tmp_path, {}, [{"fl/round": 0, **logged}]).rows
    assert [row[name] for name in logged] == [*given.values()]


def test_a_row_of_another_length_than_its_header_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    for row, cells in (("0", 1), ("0,0.5,1", 3)):
        path.write_text(f"fl/round,val_acc\n0,0.5\n{row}\n")
        with pytest.raises(ReportError, match=rf"metrics.csv cannot be read: row 2 has {cells} cells, and the header"):
            read_run(path)


def test_counts_and_rounds_of_spectra_take_no_more_memory_than_a_figure_needs() -> None:
    def run(*counts: float) -> LoggedRun:
        media = {"singular_values/net": {0: LoggedHistogram((0.0, 0.5, 1.0), counts)}}
        return LoggedRun("run", Path("run"), {}, ({"fl/round": 0.0, "val_acc": 0.5},), media)

    assert spectra(run(1e12, 2)) == {}
    assert spectra(run(0, 0)) == {}
    terms = spectra(run(30_000, 10_000))["net"][0]
    indices, values = matrix(dict.fromkeys(range(1000), terms))
    assert values.size <= 4_000_000
    assert indices.tolist() == list(range(0, 1000, 10))
    assert len(matrix(dict.fromkeys(range(1000), terms[:4000]))[0]) == 1000, "as many cells as are allowed"
