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


def cut(content: bytes, at: int) -> bytes:
    return content[:at]


def zeros(content: bytes, at: int) -> bytes:
    return content[:at] + bytes(2000)


def flipped(content: bytes, at: int) -> bytes:
    return content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]


@pytest.mark.parametrize("damage", [cut, zeros, flipped])
def test_of_a_killed_run_everything_before_the_damage_is_read(wandb_file: Path, tmp_path: Path, damage: Any) -> None:
    whole, content = read_run(wandb_file), wandb_file.read_bytes()
    broken = tmp_path / wandb_file.name
    broken.write_bytes(damage(content, content.rindex(b"fl/bytes_down", 0, content.rindex(b"fl/bytes_down")) + 5))
    run = read_run(broken)
    assert run.rows[0] == whole.rows[0]
    assert 0 < sum(map(len, run.rows)) < sum(map(len, whole.rows))
    assert run.notes[0].startswith("the file ends before the run does: it was killed")
    assert "tables are not in the folder `files`" in run.notes[1]


def test_all_loggers_and_the_history_tell_the_same(
    lit: Any, data: Any, tmp_path: Path, fit: Fit, monkeypatch: pytest.MonkeyPatch
) -> None:
    wandb = pytest.importorskip("wandb", reason="wandb is in the `report` extra")
    from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger, WandbLogger

    monkeypatch.setenv("WANDB_SILENT", "true")
    loggers = [
        WandbLogger(project="test", offline=True, save_dir=tmp_path),
        CSVLogger(tmp_path),
        TensorBoardLogger(tmp_path, name="tensorboard"),
    ]
    fitted = fit(lit, data, algorithm=ls.SpectralSharding(keep_ratio=0.5), max_epochs=2, trainer={"logger": loggers})
    wandb.finish()
    wandb.teardown()  # which waits until the file is written
    fitted.history.save(tmp_path / "new/run.json", config=dict(fitted.model.hparams))
    folders = [tmp_path / "wandb", tmp_path / "lightning_logs", tmp_path / "tensorboard"]
    (from_wandb, from_csv, from_tensorboard), left_out = read_runs(folders)
    from_history = read_run(tmp_path / "new/run.json")
    assert not left_out
    for run in (from_wandb, from_csv, from_tensorboard, from_history):
        assert len(run.rows) == 2
        for found, expected in zip(run.rows, fitted.history.rows, strict=True):
            assert found == pytest.approx(expected)
        assert run.config["federation"] == fitted.model.hparams["federation"]
        assert "val_acc" in run.names - run.from_clients
        assert "train_acc" in run.from_clients
    assert ls.RoundHistory.load(tmp_path / "new/run.json").state_dict() == fitted.history.state_dict()


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


def text_file(folder: Path) -> Path:
    (folder / "notes.txt").write_text("no run")
    return folder / "notes.txt"


def other_json(folder: Path) -> Path:
    (folder / "other.json").write_text("[1]")
    return folder / "other.json"


def other_wandb(folder: Path) -> Path:
    (folder / "run-x.wandb").write_bytes(b"no run")
    return folder / "run-x.wandb"


def header_only(folder: Path) -> Path:
    return write_csv(folder / "run", []) / "metrics.csv"


def broken_settings(folder: Path) -> Path:
    (write_csv(folder / "run", rounds([0.5])) / "hparams.yaml").write_text("a: [")
    return folder / "run"


def rows_of_numbers(folder: Path) -> Path:
    (folder / "h.json").write_text('{"rows": [1], "from_clients": [], "config": {}}')
    return folder / "h.json"


def not_utf8(folder: Path) -> Path:
    path = write_csv(folder / "run", rounds([0.5])) / "metrics.csv"
    path.write_bytes(path.read_bytes() + b"\xff\n")
    return path


def cut_histograms(folder: Path) -> Path:
    run = write_csv(folder / "run", rounds([0.5]))
    (run / "dashboard").mkdir()
    (run / "dashboard/histograms_000000.csv").write_text("histogram,left,right,count\nsingular_values/a,0.5")
    return run


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda folder: folder / "gone", "gone does not exist; expected a `.wandb` file"),
        (text_file, r"notes.txt is not a run; expected a `.wandb` file"),
        (other_json, r"other.json is not a run: it was not written by `RoundHistory.save`"),
        (other_wandb, r"run-x.wandb is not a wandb run"),
        (header_only, r"metrics.csv has no logged round. Train at least one"),
        (rows_of_numbers, r"h.json is not a run: it was not written by `RoundHistory.save`"),
        (not_utf8, r"metrics.csv cannot be read: 'utf-8' codec .* Correct or remove it"),
        (cut_histograms, r"histograms_000000.csv cannot be read: its last row is cut off. Correct or remove it"),
        (broken_settings, r"hparams.yaml cannot be read: .* Correct or remove it"),
        (lambda folder: folder, r"contains no run; expected a `.wandb` file"),
    ],
)
def test_what_is_not_a_run_is_named_with_the_remedy(tmp_path: Path, make: Any, says: str) -> None:
    with pytest.raises(ReportError, match=f"(?s){says}"):
        read_runs([make(tmp_path)])


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


def test_other_files_beside_those_of_the_dashboard_are_not_read(tmp_path: Path) -> None:
    folder = write_csv(tmp_path / "run", rounds([0.5]))
    (folder / "dashboard").mkdir()
    (folder / "dashboard/notes.csv").write_text("a,b\n1,2\n")
    (folder / "dashboard/clients_000000.csv").write_text("client\n7\n")
    assert client_tables(read_run(folder / "metrics.csv")) == {"": (0, LoggedTable(("client",), ((7,),)))}


def test_only_ends_of_lines_end_a_row(tmp_path: Path) -> None:
    folder = write_csv(tmp_path / "run", rounds([0.5]))
    (folder / "dashboard").mkdir()
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
