"""Whatever a file holds, a report is written or the file is left out with one line that names it."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest
from made_up_runs import rounds, write_csv
from mutated_runs import FORMATS, write_mutated

from lightning_spectral.errors import ReportError
from lightning_spectral.report.names import SWITCH_ON
from lightning_spectral.report.reading import read_run
from lightning_spectral.report.write import write_report

pytest.importorskip("matplotlib", reason="matplotlib is in the `report` extra")
pytest.importorskip("wandb", reason="wandb is in the `report` extra")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")  # in wandb
PER_PAGE = 40
DRAWN = ("histograms", "client table", "wandb table")  # a page shows few of these
OTHERS = [kind for kind in FORMATS if kind not in DRAWN]
SECONDS = 20.0  # for a file; nearly all take milliseconds


def write_runs(kind: str, folder: Path, seeds: range) -> list[Path]:
    """Write mutated runs, check that each is read or refused by name, and return those that are read."""
    reasons = {path: refusal(path) for path in (write_mutated(kind, folder / str(seed), seed) for seed in seeds)}
    for path, reason in reasons.items():
        assert not reason or reason.startswith(str(path.parent))
        assert "\n" not in reason
        assert len(reason) < 1000
    return [path for path, reason in reasons.items() if not reason]


def refusal(path: Path) -> str:
    """Why a run is not read; empty if it is."""
    began = time.perf_counter()
    try:
        read_run(path)
    except ReportError as error:
        return str(error)
    except BaseException as error:
        raise AssertionError(f"{path} was neither read nor refused") from error
    finally:
        assert time.perf_counter() - began < SECONDS, path
    return ""


def check_page(folder: Path, read: list[Path]) -> None:
    """Check that a page is written on a good run and those beside it."""
    write_csv(folder / "good", rounds([0.5, 0.6, 0.7]), {"lr": 0.2, "seed": 0})
    named = [path for path in read if path.suffix == ".json"]
    (page,) = write_report([folder, *named], folder / "r.html", metric="val_acc")
    text = page.read_text(encoding="utf-8")
    assert "<script" not in text
    assert re.search(r"[\x00-\x08\x0b-\x1f\x7f\u202e]", text) is None


@pytest.mark.parametrize("kinds", [*([kind] for kind in DRAWN), [*OTHERS]], ids=str)
def test_a_mutated_file_spoils_no_page(kinds: list[str], tmp_path: Path) -> None:
    read = [path for kind in kinds for path in write_runs(kind, tmp_path / kind, range(5))]
    check_page(tmp_path, read)


@pytest.mark.slow
@pytest.mark.parametrize("kind", FORMATS)
def test_a_thousand_mutated_files_spoil_no_page(kind: str, tmp_path: Path) -> None:
    for first in range(0, 1000, PER_PAGE):
        read = write_runs(kind, tmp_path / str(first), range(first, first + PER_PAGE))
        if first % (4 * PER_PAGE) == 0:  # drawing takes the time
            check_page(tmp_path / str(first), read)


def test_runs_that_share_no_round_have_no_bits_to_draw(tmp_path: Path) -> None:
    for seed in range(2):
        logged = [{"fl/round": index, "val_acc": 0.5} for index in range(2)]
        logged[seed]["fl/bit_entropy"] = 0.5
        write_csv(tmp_path / str(seed), logged, {"seed": seed})
    (page,) = write_report([tmp_path], tmp_path / "r.html")
    assert SWITCH_ON["bits"].partition(":")[0] in page.read_text(encoding="utf-8")
