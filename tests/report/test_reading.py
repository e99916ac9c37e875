import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from federation import Fit
from made_up_runs import rounds, write_csv
from mutated_runs import as_log

import lightning_spectral as ls
from lightning_spectral.errors import ReportError
from lightning_spectral.report.dashboard import client_tables, spectra
from lightning_spectral.report.media import LoggedTable
from lightning_spectral.report.names import CLIENT_TABLE, SPECTRUM
from lightning_spectral.report.reading import read_run, read_runs
from lightning_spectral.report.runs import NOT_ENDED, LoggedRun
from lightning_spectral.report.wandb_file import BLOCK_BYTES, FILE_HEADER, whole_records

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")  # in wandb
LONG = "x" * 100_000  # longer than three blocks of the file


@pytest.fixture(scope="module")
def wandb_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An offline run of three rounds with everything that a report reads."""
    wandb = pytest.importorskip("wandb", reason="wandb is in the `report` extra")
    folder = tmp_path_factory.mktemp("offline")
    settings = wandb.Settings(mode="offline", silent=True, x_disable_stats=True, console="off")
    config = {"federation": {"seed": 3, "algorithm": "FedAvg()"}, "notes": LONG}
    with wandb.init(project="test", name="a run", dir=folder, config=config, settings=settings) as run:
        for index in range(3):
            loss = math.nan if index == 1 else 0.5
            run.log({"fl/round": index, "fl/bytes_down": 2e6, "fl/loss": loss, "note": "text"})
            run.log({"fl/round": index, "val_acc": 0.1 * index, "nested": {"val_acc": 0.5}})
            run.log({SPECTRUM + "head": wandb.Histogram(np_histogram=([1, 2], [0.0, 1.0, 2.0]))})
            run.log({CLIENT_TABLE: wandb.Table(columns=["client_id", "val_acc"], data=[[index, 0.25]])})
    wandb.teardown()  # the first setup in a process decides whether a later `WandbLogger` can be offline
    (path,) = folder.glob("wandb/offline-run-*/*.wandb")
    return path


def test_an_offline_run_of_wandb_is_read_whole(wandb_file: Path) -> None:
    run = read_run(wandb_file)
    assert (run.name, run.notes) == ("a run", ())
    assert run.identity
    assert run.identity in wandb_file.name
    assert run.config == {"federation": {"seed": 3, "algorithm": "FedAvg()"}, "notes": LONG}
    assert [row["fl/round"] for row in run.rows] == [0, 1, 2]
    assert [row["val_acc"] for row in run.rows] == pytest.approx([0, 0.1, 0.2])
    assert [math.isnan(row["fl/loss"]) for row in run.rows] == [False, True, False]
    assert run.rows[0]["nested.val_acc"] == 0.5
    assert run.from_clients == {"fl/round", "fl/bytes_down", "fl/loss"}
    assert client_tables(run) == {"": (2, LoggedTable(("client_id", "val_acc"), ((2, 0.25),)))}
    found = spectra(run)
    assert {layer: list(by_round) for layer, by_round in found.items()} == {"head": [0, 1, 2]}
    np.testing.assert_array_equal(found["head"][1], [1.5, 1.5, 0.5])


@pytest.mark.parametrize("left", range(10))
def test_records_are_read_across_the_ends_of_blocks(left: int) -> None:
    records = [b"a" * (BLOCK_BYTES - len(FILE_HEADER) - 7 - left), b"b" * 70_000, b"", b"c"]
    assert list(whole_records(as_log(records))) == records


@pytest.mark.parametrize(
    "damage",
    [
        lambda content, at: content[:at],
        lambda content, at: content[:at] + bytes(2000),
        lambda content, at: content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :],
    ],
    ids=["cut", "zeros", "flipped"],
)
def test_of_a_killed_run_everything_before_the_damage_is_read(wandb_file: Path, tmp_path: Path, damage: Any) -> None:
    whole, content = read_run(wandb_file), wandb_file.read_bytes()
    broken = tmp_path / wandb_file.name
    broken.write_bytes(damage(content, content.rindex(b"fl/bytes_down", 0, content.rindex(b"fl/bytes_down")) + 5))
    run = read_run(broken)
    assert run.rows[0] == whole.rows[0]
    assert 0 < sum(map(len, run.rows)) < sum(map(len, whole.rows))
    assert run.notes[0].startswith("the file ends before the run does: it was killed")
    assert "tables are not in the folder `files`" in run.notes[1]


def test_of_a_killed_run_of_tensorboard_all_whole_records_are_read(
    lit: Any, data: Any, tmp_path: Path, fit: Fit
) -> None:
    pytest.importorskip("tensorboard", reason="comes with the `report` extra")
    from lightning.pytorch.loggers import TensorBoardLogger

    fit(lit, data, max_epochs=3, trainer={"logger": TensorBoardLogger(tmp_path)})
    (path,) = tmp_path.rglob("events.out.tfevents.*")
    whole, content = read_run(path), path.read_bytes()
    path.write_bytes(content[: content.rindex(b"fl/bytes_down") + 5])
    assert read_run(path).rows[:2] == whole.rows[:2]
    assert 0 < len(read_run(path).rows[2]) < len(whole.rows[2])


def test_without_tensorboard_its_files_name_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard.backend.event_processing.event_file_loader", None)
    path = tmp_path / "events.out.tfevents.1.host.2.0"
    path.write_bytes(b"")
    with pytest.raises(ReportError, match=r'not installed: pip install "lightning-spectral\[report\]"'):
        read_run(path)


METRICS = b"fl/round,val_acc\n0,0.5\n"


@pytest.mark.parametrize(
    ("files", "says"),
    [
        ({"other.json": b"[1]"}, "other.json is not a run: it was not written by `RoundHistory.save`"),
        ({"h.json": b'{"rows": [1], "from_clients": [], "config": {}}'}, "h.json is not a run: it was not written by"),
        ({"run-x.wandb": b"no run"}, "run-x.wandb is not a wandb run"),
        ({"metrics.csv": b"\n"}, "metrics.csv has no logged round. Train at least one"),
        ({"metrics.csv": METRICS + b"\xff\n"}, "metrics.csv cannot be read: 'utf-8' codec .* Correct or remove it"),
        (
            {"metrics.csv": METRICS, "dashboard/histograms_000000.csv": b"histogram,left,right,count\na,0.5"},
            "histograms_000000.csv cannot be read: its last row is cut off. Correct or remove it",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_is_not_a_run_is_named_with_the_remedy(tmp_path: Path, files: dict[str, bytes], says: str) -> None:
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ReportError, match=f"(?s){says}"):
        read_runs([tmp_path / next(iter(files))])


def test_in_a_folder_what_cannot_be_read_is_left_out_by_name(tmp_path: Path) -> None:
    write_csv(tmp_path / "good", rounds([0.5]))
    write_csv(tmp_path / "empty", [])
    runs, left_out = read_runs([tmp_path, tmp_path / "good"])
    assert [run.path.parent.name for run in runs] == ["good"]
    assert len(left_out) == 1
    assert "empty" in left_out[0]


def test_a_last_row_that_was_cut_is_left_out_with_a_remark(tmp_path: Path) -> None:
    path = write_csv(tmp_path / "run", rounds([0.5, 0.625])) / "metrics.csv"
    whole = read_run(path)
    assert (len(whole.rows), whole.rows[1]["val_acc"], whole.notes) == (2, 0.625, ())
    for cut in (2, 5):  # line ends, and within a number
        path.write_bytes(path.read_bytes()[:-cut])
        assert "val_acc" not in read_run(path).rows[1]
        assert read_run(path).notes == (NOT_ENDED,)


def test_of_a_dashboard_only_its_own_files_are_read_and_only_ends_of_lines_end_a_row(tmp_path: Path) -> None:
    folder = write_csv(tmp_path / "run", rounds([0.5]))
    (folder / "dashboard").mkdir()
    (folder / "dashboard/notes.csv").write_text("a,b\n1,2\n")
    (folder / "dashboard/clients_000000.csv").write_text('client,why\n7,a\u2028b\n8,"c\nd"\n', encoding="utf-8")
    table = LoggedTable(("client", "why"), ((7, "a\u2028b"), (8, "c\nd")))
    assert client_tables(read_run(folder / "metrics.csv")) == {"": (0, table)}


def test_names_are_the_same_with_a_prefix_of_the_logger(tmp_path: Path) -> None:
    rows = rounds([0.5, 0.625])
    plain = write_csv(tmp_path / "plain", rows) / "metrics.csv"
    renamed = [{name if name == "step" else f"mine-{name}": value for name, value in row.items()} for row in rows]
    prefixed = write_csv(tmp_path / "prefixed", renamed) / "metrics.csv"
    assert read_run(prefixed).rows == read_run(plain).rows
    assert read_run(prefixed).from_clients == read_run(plain).from_clients


def test_settings_never_run_what_a_file_says(tmp_path: Path) -> None:
    folder = write_csv(tmp_path / "run", rounds([0.5]))
    (folder / "hparams.yaml").write_text(
        f"a: !!python/object/apply:os.mkdir ['{tmp_path}/made']\nb: !unknown 1\nc: 2\n"
    )
    assert read_run(folder / "metrics.csv").config == {"a": "os.mkdir", "b": "!unknown", "c": 2}
    assert not (tmp_path / "made").exists()


def test_a_resumed_run_says_that_earlier_bytes_are_missing(tmp_path: Path) -> None:
    run: LoggedRun = read_run(write_csv(tmp_path / "run", rounds([0.1, 0.2, 0.3])[2:]) / "metrics.csv")
    assert run.notes == ("starts at round 1: what earlier rounds sent is not counted",)


def test_a_history_that_cannot_be_saved_or_loaded_says_why(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"`config` must be an instance of Mapping, got 0.2"):
        ls.RoundHistory().save(tmp_path / "h.json", config=0.2)
    assert not (tmp_path / "h.json").exists()
    for text in ("{}", "no JSON", "[1]"):
        (tmp_path / "h.json").write_text(text)
        with pytest.raises(ValueError, match=r"h.json was not written by `RoundHistory.save`"):
            ls.RoundHistory.load(tmp_path / "h.json")


def test_a_saved_history_is_plain_json(tmp_path: Path) -> None:
    ls.RoundHistory().save(tmp_path / "h.json", config={"algorithm": ls.TopN()})
    assert json.loads((tmp_path / "h.json").read_text())["config"] == {"algorithm": "TopN()"}
