"""The record of a run: a line per round, continued and cut when the run is resumed, and read by a report."""

import io
import json
import math
import os
import random
import re
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from federation import Fit, seeded
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from made_up_runs import lines_of, made_run, rounds, write_run
from observed_runs import acting
from toy_models import variant

import lightning_spectral as ls
from lightning_spectral.errors import ReportError
from lightning_spectral.plugin.callbacks.record import LedgerRow, PackedTurns
from lightning_spectral.plugin.settings import as_config
from lightning_spectral.protocol.records import ClientOutcome, WorkUnit
from lightning_spectral.report import runs as records
from lightning_spectral.report.measures import client_tables, megabytes, spectra, spread
from lightning_spectral.report.page import write_report
from lightning_spectral.report.runs import NAME, NOT_ENDED, OUTPUT, LoggedRun, Table, read_record, read_run, read_runs

SPECTRAL = ls.SpectralSharding(keep_ratio={0.25: 0.5, 0.5: 0.5})
pytestmark = [
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* is not empty"),  # of the resumed run
    pytest.mark.filterwarnings("ignore:Experiment logs directory .* exists and is not empty"),
]


def logging(folder: Path, version: str = "one") -> CSVLogger:
    return CSVLogger(folder, name="runs", version=version)


def record_of(folder: Path, version: str = "one") -> Path:
    return folder / "runs" / version / NAME


def saving(folder: Path, version: str = "one", *callbacks: Any) -> dict[str, Any]:
    """Options of a fit that has a record and keeps a checkpoint of every round."""
    keep_all = ModelCheckpoint(folder / "saved", filename="{epoch}", save_top_k=-1)
    trainer = {"logger": logging(folder, version), "enable_checkpointing": True}
    return {"callbacks": [keep_all, *callbacks], "trainer": trainer}


def check_holds(run: LoggedRun, rows: list[dict[str, float]]) -> None:
    """Fail unless a record has the rows of a history, bit for bit."""
    assert [repr(dict(sorted(row.items()))) for row in run.rows] == [repr(dict(sorted(row.items()))) for row in rows]


def test_a_round_is_in_the_file_as_soon_as_it_ends(lit: Any, data: Any, fit: Fit, tmp_path: Path) -> None:
    seen: list[int] = []
    reads = acting(on_train_epoch_end=lambda trainer, model: seen.append(len(read_record(record_of(tmp_path)).lines)))
    fitted = fit(lit, data, max_epochs=3, callbacks=[reads], trainer={"logger": logging(tmp_path)})
    assert seen == [1, 2, 3]
    run = read_run(record_of(tmp_path))
    check_holds(run, fitted.history.rows)
    assert run.name == "runs/one"
    assert run.notes == ()
    assert run.config["federation"] == as_config(fitted.model.hparams["federation"])
    assert run.config["data"]["num_clients"] == 12
    assert "val_acc" in run.names - run.from_clients
    assert "train_acc" in run.from_clients


def test_without_a_logger_or_in_a_quick_try_nothing_is_written(
    lit: Any, data: Any, fit: Fit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    fit(lit, data)
    fit(lit, data, trainer={"logger": logging(tmp_path), "fast_dev_run": True})
    assert not list(tmp_path.rglob(NAME))


def test_a_history_writes_where_it_is_told_and_says_settings(lit: Any, data: Any, quiet: Any, tmp_path: Path) -> None:
    history = ls.RoundHistory(tmp_path / "new/mine.jsonl", config={"variant": "b"})
    pl.Trainer(max_epochs=1, callbacks=[history], **quiet).fit(ls.FederatedModule(lit, clients_per_round=2), data)
    run = read_run(tmp_path / "new/mine.jsonl")
    check_holds(run, history.rows)
    assert (run.name, run.config["variant"]) == ("mine", "b")


def test_a_resumed_run_continues_its_file_and_cuts_what_follows_the_checkpoint(
    lit_mlp: Any, data: Any, fit: Fit, tmp_path: Path
) -> None:
    lost = fit(seeded(lit_mlp), data, algorithm=SPECTRAL, max_epochs=4, **saving(tmp_path, "one", ls.RoundDashboard(1)))
    before = read_run(record_of(tmp_path))
    with record_of(tmp_path).open("a") as file:
        file.write('{"round": 4, "tra')  # as a kill would leave it
    assert read_run(record_of(tmp_path)).notes == (NOT_ENDED,)
    more = saving(tmp_path, "one", ls.RoundDashboard(1))
    options = {"max_epochs": 5, "ckpt_path": tmp_path / "saved/epoch=1.ckpt"}
    resumed = fit(seeded(lit_mlp), data, algorithm=SPECTRAL, **options, **more)
    run = read_run(record_of(tmp_path))
    check_holds(run, resumed.history.rows)
    assert [row["fl/round"] for row in run.rows] == [0, 1, 2, 3, 4]
    assert run.rows[:2] == before.rows[:2]
    assert run.rows[2]["fl/seconds_train"] != lost.history.rows[2]["fl/seconds_train"], "lines of lost rounds are cut"
    assert run.notes == ()
    assert {name: list(by_round) for name, by_round in run.shown.items()}["tables/clients"] == [0, 1, 2, 3, 4]
    sent = megabytes(run)
    assert sent is not None
    assert sent.last == resumed.ledger.total_bytes / 1e6
    assert read_record(record_of(tmp_path)).head["run"] == resumed.history._run == lost.history._run


@pytest.mark.slow
def test_a_run_resumed_in_another_folder_has_all_its_rounds_there_and_is_one_run(
    lit_mlp: Any, data: Any, fit: Fit, tmp_path: Path
) -> None:
    fit(seeded(lit_mlp), data, algorithm=SPECTRAL, max_epochs=3, **saving(tmp_path, "one", ls.RoundDashboard(1)))
    again = saving(tmp_path, "two", ls.RoundDashboard(1))
    options = {"max_epochs": 5, "ckpt_path": tmp_path / "saved/epoch=1.ckpt"}
    resumed = fit(seeded(lit_mlp), data, algorithm=SPECTRAL, **options, **again)
    runs, left_out = read_runs([tmp_path])
    (run,) = runs
    assert run.path == record_of(tmp_path, "two")
    check_holds(run, resumed.history.rows)
    assert sorted(run.shown["tables/clients"]) == [0, 1, 2, 3, 4], "tables are copied"
    assert left_out == [f"{record_of(tmp_path)}, which {record_of(tmp_path, 'two')} continues."]
    record_of(tmp_path).unlink()
    third = saving(tmp_path, "three")
    fit(seeded(lit_mlp), data, algorithm=SPECTRAL, **options, **third)
    (alone,), _ = read_runs([record_of(tmp_path, "three")])
    assert alone.rows[:2] == run.rows[:2], "the checkpoint has the rows"


def test_another_fit_in_the_same_folder_begins_the_file_anew(lit_mlp: Any, data: Any, fit: Fit, tmp_path: Path) -> None:
    fit(seeded(lit_mlp), data, max_epochs=3, trainer={"logger": logging(tmp_path)})
    again = fit(seeded(lit_mlp), data, max_epochs=1, trainer={"logger": logging(tmp_path)})
    check_holds(read_run(record_of(tmp_path)), again.history.rows)


def test_a_history_added_when_a_run_is_resumed_says_what_it_lacks(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "run", rounds([0.1, 0.2, 0.3])[2:]) / NAME)
    assert run.notes == ("starts at round 1: what earlier rounds sent is not counted",)


def test_what_is_evaluated_after_a_fit_belongs_to_its_last_round(
    lit_mlp: Any, data: Any, toy: Any, fit: Fit, tmp_path: Path
) -> None:
    lit = seeded(variant(lit_mlp, test_step=lambda self, batch, batch_idx: self.log("test_acc", 0.25)))
    fitted = fit(lit, data, max_epochs=2, trainer={"logger": logging(tmp_path)})
    loader = torch.utils.data.DataLoader(toy, batch_size=8)
    (validated,) = fitted.trainer.validate(fitted.model, loader, verbose=False)
    fitted.trainer.test(fitted.model, loader, verbose=False)
    check_holds(read_run(record_of(tmp_path)), fitted.history.rows)
    last = fitted.history.rows[-1]
    assert (last["val_acc"], last["test_acc"]) == (pytest.approx(validated["val_acc"]), 0.25)
    assert len(read_record(record_of(tmp_path)).lines) == 4


@pytest.mark.slow
def test_a_report_has_what_dashboard_and_evaluation_found(lit_mlp: Any, toy: Any, fit: Fit, tmp_path: Path) -> None:
    data = ls.FederatedDataModule(toy, ls.IIDPartitioner(8), val=toy, batch_size=4, client_val_fraction=0.4)
    watching = [ls.RoundDashboard(1), ls.ClientEvaluation(clients="participants")]
    options = {"callbacks": watching, "trainer": {"logger": logging(tmp_path)}}
    fitted = fit(seeded(lit_mlp), data, algorithm=SPECTRAL, max_epochs=3, **options)
    run = read_run(record_of(tmp_path))
    found = spectra(run)
    assert {layer: sorted(by_round) for layer, by_round in found.items()} == {"net.2": [0, 1, 2]}
    assert len(found["net.2"][0]) == 12
    assert (np.diff(found["net.2"][0]) <= 0).all()
    assert spread(run, "val_acc") is not None
    ((index, table),) = client_tables(run).values()
    assert index == 2
    at = table.columns.index("client")
    assert [row[at] for row in table.rows] == [row.client_id for row in fitted.ledger.rows if row.round_idx == 2]
    assert write_report([tmp_path], tmp_path / "r.html") == [tmp_path / "r.html"]


def test_a_history_is_saved_and_loaded(lit: Any, data: Any, fit: Fit, tmp_path: Path) -> None:
    history = fit(lit, data, max_epochs=2).history
    history.save(tmp_path / "new/run.jsonl", config={"algorithm": ls.TopN(), "seed": 1})
    loaded = ls.RoundHistory.load(tmp_path / "new/run.jsonl")
    assert (loaded.rows, loaded.turns, loaded.outcomes()) == (history.rows, history.turns, history.outcomes())
    assert [len(turns) for turns in loaded.turns.values()] == [4, 4]
    run = read_run(tmp_path / "new/run.jsonl")
    check_holds(run, history.rows)
    assert run.config == {"algorithm": {"name": "TopN"}, "seed": 1}


def torch_saved(state: Any) -> Any:
    """What a checkpoint gives back."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def test_turns_are_read_as_they_were_added() -> None:
    """Of two models, of clients left out, measured, and with times only later; some rounds have no turn."""
    turns, expected = PackedTurns(), dict[int, list[LedgerRow]]()
    for round_idx in (0, 1, 4, 5):
        for model in ("words", "images"):
            rows = []
            for client, left_out in ((round_idx, None), (3, "late"), (2**31 - 1, None)):
                seconds = 1 / 3 if round_idx > 1 and client == 3 else None
                own = (client, 0.2 + client % 2, 80 * client, 40, left_out, seconds, model, client == 3, 8)
                rows.append(LedgerRow(round_idx, *own, 1.5 / (round_idx + 1) if round_idx > 2 and client < 9 else None))
            turns.add(rows)
            expected.setdefault(round_idx, []).extend(rows)
        assert dict(turns) == expected
        kinds = turns.state_dict()["kinds"]
        turns = PackedTurns(**torch_saved(turns.state_dict()))
        assert dict(turns) == expected
    assert len(kinds) == len({(*row[2:6], *row[7:10]) for rows in expected.values() for row in rows})
    with pytest.raises(AssertionError, match="round by round"):
        turns.add([expected[1][0]])


def test_a_checkpoint_has_every_row_of_a_history_and_grows_by_the_numbers_alone() -> None:
    history, sizes = ls.RoundHistory(), []
    for index in range(3000):
        history.rows.append({"fl/round": float(index), "fl/loss": math.nan if index == 7 else 1 / (index + 1)})
        if index % 3 == 1:
            history.rows[-1] |= {"val_acc": math.inf, "fl/loss": -0.0}
        outcomes = [ClientOutcome(index, WorkUnit(client), 0.5, 10, 1, 1 / client, 80, 40) for client in range(1, 11)]
        history.turns.add(LedgerRow.of(outcome, False) for outcome in outcomes)
        if index in (0, 5, 999, 1999, 2999):
            saved = io.BytesIO()
            torch.save(history.state_dict(), saved)
            sizes.append(saved.tell())
            again = ls.RoundHistory()
            again.load_state_dict(torch_saved(history.state_dict()))
            assert [repr(row) for row in again.rows] == [repr(row) for row in history.rows]
            assert again.turns == history.turns
            history.rows[-1]["test_acc"] = 0.5  # evaluated after it was saved
            history = again if index == 5 else history
    assert sizes[4] - sizes[3] == pytest.approx(sizes[3] - sizes[2], rel=0.01)
    per_round = 10 * 8 + 12 + 4 + 8 * 7 / 3  # turns, round and their number, which names, and numbers
    assert (sizes[4] - sizes[3]) / 1000 < per_round + 2


def test_a_history_that_cannot_be_saved_or_loaded_says_why(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="`path` must be an instance of str, got 3"):
        ls.RoundHistory(3)  # type: ignore[arg-type]
    for act in (lambda: ls.RoundHistory(config=0.2), lambda: ls.RoundHistory().save(tmp_path / "h.jsonl", config=0.2)):  # type: ignore[arg-type]
        with pytest.raises(TypeError, match=r"`config` must be an instance of Mapping, got 0.2"):
            act()
    assert not (tmp_path / "h.jsonl").exists()
    for text in ("{}\n", "no JSON\n", "[1]\n", ""):
        (tmp_path / "h.jsonl").write_text(text)
        with pytest.raises(ValueError, match=r"h.jsonl was not written by a RoundHistory: "):
            ls.RoundHistory.load(tmp_path / "h.jsonl")


@pytest.mark.parametrize("cut", [1, 5, 200])
def test_a_last_line_that_was_cut_is_left_out_with_a_remark(tmp_path: Path, cut: int) -> None:
    path = write_run(tmp_path / "run", rounds([0.5, 0.625])) / NAME
    whole = read_run(path)
    path.write_bytes(path.read_bytes()[:-cut])
    assert read_run(path).rows[0] == whole.rows[0]
    assert "val_acc" not in read_run(path).rows[-1] or cut == 200
    assert read_run(path).notes == (NOT_ENDED,)


def test_lines_of_a_round_need_not_be_adjacent(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    first, second = lines_of(rounds([0.5]))
    records.write_record(path, "id", {}, [first])
    records.append_line(path, {"round": 1, "evaluated": {"val_acc": 0.25}})
    records.append_line(path, second)
    assert [row["val_acc"] for row in read_run(path).rows] == [0.5, 0.25]


HEAD = json.dumps({"run": "a", "begun": 0.0, "config": {}}) + "\n"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (HEAD, "has no logged round. Train at least one"),
        (HEAD + '{"round": -1}\n', "cannot be read: line 2 has the round -1; rounds are numbered 0, 1, 2"),
        (HEAD + '{"round": 0.5}\n', "line 2 has the round 0.5"),
        (HEAD + '{"round": true}\n', "line 2 has the round True"),
        (HEAD + "[1]\n", "line 2 is a list, not an object"),
        (HEAD + "{}}\n" + '{"round": 0, "evaluated": {"acc": 1}}\n', "line 2 is not JSON"),
        (HEAD + '{"round": 0, "evaluated": [1]}\n', "cannot be read: "),
        (HEAD + '{"round": 0, "tables": {"t": {"columns": ["a"], "rows": [[1, 2]]}}}\n', "a row of a table is not as"),
        (HEAD + '{"round": 0, "histograms": {"h": {"edges": [1, 0], "counts": [1]}}}\n', "of a histogram descend"),
        (HEAD + '{"round": 0, "histograms": {"h": {"edges": [0], "counts": [1]}}}\n', "has 1 edges and 1 counts"),
        ("loss,acc\n1,2\n", "line 1 is not JSON"),
        ('{"run": 3, "config": {}}\n', "its first line does not say which run it is"),
        ("", "its first line does not say which run it is"),
    ],
)
def test_what_is_no_record_is_refused_in_one_line_and_left_out_of_folders(tmp_path: Path, text: str, says: str) -> None:
    write_run(tmp_path / "runs/good", rounds([0.5]))
    bad = tmp_path / "runs/bad" / NAME
    bad.parent.mkdir()
    bad.write_text(text)
    with pytest.raises(ReportError, match=re.escape(f"{bad} ") + ".*" + re.escape(says)) as refused:
        read_run(bad)
    assert "\n" not in str(refused.value)
    runs, left_out = read_runs([tmp_path / "runs"])
    assert [run.path.parent.name for run in runs] == ["good"]
    assert left_out == [str(refused.value)]


def test_a_run_that_failed_before_its_first_round_is_named(tmp_path: Path) -> None:
    for name in ("good", "bad"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / OUTPUT).write_text("what it printed")
    write_run(tmp_path / "runs/good", rounds([0.5]))
    _, left_out = read_runs([tmp_path / "runs"])
    assert left_out == [f"{tmp_path / 'runs/bad' / OUTPUT}: failed, or no round yet."]


def test_what_is_no_file_is_not_opened(tmp_path: Path) -> None:
    write_run(tmp_path / "runs/good", rounds([0.5]))
    (tmp_path / "runs/pipe").mkdir()
    os.mkfifo(tmp_path / "runs/pipe" / NAME)
    runs, (reason,) = read_runs([tmp_path / "runs"])
    assert len(runs) == 1
    assert "is not a run" in reason


def test_what_has_diverged_is_infinite_and_what_is_no_number_is_ignored() -> None:
    given = {"a": 1e300, "b": -1e39, "c": 3.4e38, "d": float("nan"), "e": "1", "f": True, "g": None}
    (row,) = made_run("run", {}, [{"fl/round": 0, **given}]).rows
    assert repr(dict(row)) == repr({"fl/round": 0.0, "a": math.inf, "b": -math.inf, "c": 3.4e38, "d": math.nan})


ODD = (
    *("NaN", "Infinity", "-1", "0.5", "1e400", "9" * 5000, "", "null", "true", "[]", "{}", '"x"', "[" * 3000),
    *("$\\frac{$", "<script>alert(1)</script>", '"', "\n", "\0", "\u202e", "a" * 3000, "fl/round", "round", "name"),
)


def mutated(content: bytes, rng: random.Random) -> bytes:
    """The content with one to three changes, such as damage, accident or malice leave."""
    for _ in range(rng.choice((1, 1, 2, 3))):
        start = rng.randrange(len(content) + 1)
        end = min(len(content), start + rng.choice((1, 4, 40, 400)))
        odd = rng.choice((rng.choice(ODD).encode(), rng.randbytes(8)))
        words = list(re.finditer(rb"[^\s,:\"{}\[\]|]+", content)) or [re.match(b"", content)]
        word = rng.choice(words)
        assert word is not None
        changed = (
            content[: word.start()] + odd + content[word.end() :],
            content[:start] + odd + content[start:],
            content[:start],
            content[:start] + content[end:],
            content[:end] + content[start:],
        )
        content = rng.choice(changed)
    return content


def write_damaged(folder: Path, seed: int) -> Path:
    shown = {
        "round": 0,
        "tables": {"tables/clients": {"columns": ["client", "val_acc"], "rows": [[3, 0.5], [4, None]]}},
        "histograms": {"singular_values/net": {"edges": [0.0, 0.5, 1.0], "counts": [3, 2]}},
    }
    ends = {f"fl/clients/val_acc/{end}": 0.3 for end in ("lowest_decile", "mean", "highest_decile")}
    logged = rounds([0.5, 0.6, 0.7], **ends, **{"fl/terms_visited": 0.4, "fl/bit_entropy": 0.8})
    path = write_run(folder, logged, {"federation": {"algorithm": {"name": "FedAvg"}, "seed": seed}}, [shown]) / NAME
    path.write_bytes(mutated(path.read_bytes(), random.Random(seed)))
    return path


@pytest.mark.slow
@pytest.mark.parametrize("seeds", [range(20), pytest.param(range(1000), marks=pytest.mark.slow)], ids=["few", "many"])
def test_a_damaged_record_spoils_no_page(tmp_path: Path, seeds: range) -> None:
    refusals: dict[Path, str] = {}
    for seed in seeds:
        path = write_damaged(tmp_path / str(seed // 20) / str(seed), seed)
        try:
            read_run(path)
        except ReportError as error:
            refusals[path] = str(error)
    for path, reason in refusals.items():
        assert re.fullmatch(f"{re.escape(str(path))} .{{,900}}", reason)
    for folder in tmp_path.iterdir():
        write_run(folder / "good", rounds([0.5, 0.6, 0.7]), {"lr": 0.2, "seed": 0})
        (page,) = write_report([folder], tmp_path / "r.html", metric="val_acc")
        text = page.read_text(encoding="utf-8")
        assert "<script" not in text
        assert re.search(r"[\x00-\x08\x0b-\x1f\x7f\u202e]", text) is None
        page.unlink()


def test_a_table_is_what_it_was(tmp_path: Path) -> None:
    cells = {"columns": ["client", "why"], "rows": [[7, "a\u2028b"], [8, None]]}
    path = write_run(tmp_path, rounds([0.5]), {}, [{"round": 0, "tables": {"tables/clients": cells}}]) / NAME
    assert client_tables(read_run(path)) == {"": (0, Table(("client", "why"), ((7, "a\u2028b"), (8, None))))}
