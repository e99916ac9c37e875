"""A run that was interrupted and resumed is one run in a report, and two runs are never one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from federation import Fit
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from made_up_runs import rounds

from lightning_spectral.report.measures import megabytes
from lightning_spectral.report.media import LoggedTable
from lightning_spectral.report.reading import read_run, read_runs
from lightning_spectral.report.resumed import join_resumed
from lightning_spectral.report.runs import LoggedRun, build_run

pytestmark = pytest.mark.filterwarnings("ignore:Checkpoint directory .* is not empty")  # of the resumed run
SETTINGS = {"federation": {"algorithm": "FedAvg()", "seed": 0}}
OTHER_SEED = {"federation": {"algorithm": "FedAvg()", "seed": 1}}


def part(
    name: str, first: int, last: int, value: float, config: dict[str, Any] | None = None, identity: str = ""
) -> LoggedRun:
    """A part with the given rounds, identified by the value of its evaluations and seconds."""
    logged = rounds([value] * (last + 1), **{"fl/seconds_train": value})[2 * first :]
    table = LoggedTable(("client",), ((value,),))
    shown = [{"fl/round": index, "tables/clients": table} for index in range(first, last + 1)]
    path = Path("runs") / name / "metrics.csv"
    return build_run(name, path, SETTINGS if config is None else config, [*logged, *shown]).identified(identity)


def values(run: LoggedRun) -> list[float]:
    """The evaluation of each round, which tells the part it is from."""
    assert [row["fl/round"] for row in run.rows] == list(range(len(run.rows)))
    return [row["val_acc"] for row in run.rows]


def saving(folder: Path, **trainer: Any) -> dict[str, Any]:
    """Options of a fit that keeps a checkpoint of every round."""
    keep_all = ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1)
    return {"callbacks": [keep_all], "trainer": {**trainer, "enable_checkpointing": True}}


@pytest.mark.parametrize(
    "logger", [lambda folder: CSVLogger(folder), lambda folder: TensorBoardLogger(folder)], ids=["csv", "tensorboard"]
)
def test_a_resumed_run_reads_like_its_history(
    lit: Any, data: Any, fit: Fit, tmp_path: Path, logger: Callable[[Path], Any], request: pytest.FixtureRequest
) -> None:
    if request.node.callspec.id == "tensorboard":
        pytest.importorskip("tensorboard", reason="comes with the `report` extra")
    lost = fit(lit, data, max_epochs=3, **saving(tmp_path / "saved", logger=logger(tmp_path)))
    more = saving(tmp_path / "saved", logger=logger(tmp_path))
    resumed = fit(lit, data, max_epochs=5, ckpt_path=tmp_path / "saved/epoch=1.ckpt", **more)
    parts, left_out = read_runs([tmp_path])
    assert ([len(one.rows) for one in parts], left_out) == ([3, 3], [])
    (run,) = join_resumed(parts)
    for found, expected in zip(run.rows, resumed.history.rows, strict=True):
        assert found == pytest.approx(expected)
    assert run.rows[2]["fl/seconds_train"] != pytest.approx(lost.history.rows[2]["fl/seconds_train"])
    sent = megabytes(run)
    assert sent is not None
    assert sent.last == pytest.approx(resumed.ledger.total_bytes / 1e6)
    assert [note.partition(" ")[0] for note in run.notes] == ["continues"]


def test_a_history_that_was_resumed_replaces_the_one_that_was_not(
    lit: Any, data: Any, fit: Fit, tmp_path: Path
) -> None:
    lost = fit(lit, data, max_epochs=3, **saving(tmp_path / "saved"))
    lost.history.save(tmp_path / "run_1.json", config=SETTINGS)
    resumed = fit(lit, data, max_epochs=4, ckpt_path=tmp_path / "saved/epoch=1.ckpt", **saving(tmp_path / "saved"))
    resumed.history.save(tmp_path / "run_2.json", config=SETTINGS)
    again = fit(lit, data, max_epochs=3)
    again.history.save(tmp_path / "run_3.json", config=SETTINGS)
    joined = join_resumed([read_run(tmp_path / f"run_{index}.json") for index in (1, 2, 3)])
    assert [len(one.rows) for one in joined] == [4, 3]
    assert joined[0].rows == tuple(resumed.history.rows)


def test_rounds_after_the_checkpoint_are_those_of_the_last_part_that_did_them() -> None:
    parts = [part("version_2", 0, 6, 0.1), part("version_9", 3, 7, 0.2), part("version_10", 5, 5, 0.3)]
    (run,) = join_resumed(parts[::-1])
    assert values(run) == [0.1, 0.1, 0.1, 0.2, 0.2, 0.3]
    assert [table.rows[0][0] for table in run.media["tables/clients"].values()] == values(run)
    assert run.name == "version_2"
    assert run.notes == (
        "continues version_2/metrics.csv from round 3 on",
        "continues version_9/metrics.csv from round 5 on",
    )


def test_a_part_belongs_to_the_last_run_before_it() -> None:
    names = [("version_0", 0, 0.1), ("version_1", 2, 0.2), ("version_2", 0, 0.3), ("version_3", 2, 0.4)]
    joined = join_resumed([part(name, first, 3, value) for name, first, value in names])
    assert [values(run) for run in joined] == [[0.1, 0.1, 0.2, 0.2], [0.3, 0.3, 0.4, 0.4]]


def test_a_part_with_the_id_of_a_run_belongs_to_it_whatever_a_crash_undid() -> None:
    one, other = part("a", 0, 4, 0.1, identity="one"), part("b", 0, 2, 0.2, identity="other")
    joined = join_resumed([one, other, part("c", 3, 5, 0.3, identity="one")])
    assert [values(run) for run in joined] == [[0.1, 0.1, 0.1, 0.3, 0.3, 0.3], [0.2, 0.2, 0.2]]


def test_of_repetitions_that_were_all_resumed_no_part_is_dropped() -> None:
    """Without a seed it is unknown which part continues which run; a crash that undid a part is less likely."""
    names = [("version_0", 0, 2, 0.1), ("version_1", 0, 2, 0.2), ("version_2", 3, 4, 0.3), ("version_3", 3, 4, 0.4)]
    joined = join_resumed([part(*own) for own in names])
    assert [values(run) for run in joined] == [[0.1, 0.1, 0.1, 0.4, 0.4], [0.2, 0.2, 0.2, 0.3, 0.3]]


@pytest.mark.parametrize(
    "second",
    [
        part("version_1", 3, 5, 0.2, OTHER_SEED),
        part("version_1", 0, 5, 0.2),
        part("version_1", 4, 5, 0.2),
        part("version_1", 3, 5, 0.2, {}),
        part("version_1", 3, 5, 0.2, OTHER_SEED, identity="id"),
    ],
    ids=["another seed", "from the beginning", "rounds are missing", "no settings", "another seed, with the same id"],
)
def test_runs_that_do_not_continue_each_other_stay_apart(second: LoggedRun) -> None:
    first = part("version_0", 0, 2, 0.1, identity="id")
    assert join_resumed([first, second]) == [first, second]
    nothing_known = part("version_0", 0, 2, 0.1, {})
    assert join_resumed([nothing_known, second]) == [nothing_known, second]


def test_with_the_same_id_other_settings_may_differ() -> None:
    longer = {"federation": {"algorithm": "FedAvg()", "seed": 0}, "max_epochs": 9}
    parts = [part("a", 0, 2, 0.1, identity="id"), part("b", 2, 4, 0.2, longer, identity="id")]
    (run,) = join_resumed(parts)
    assert values(run) == [0.1, 0.1, 0.2, 0.2, 0.2]
    evaluated = build_run("c", Path("c"), longer, [{"epoch": 4, "test_acc": 0.5}]).identified("id")
    (tested,) = join_resumed([*parts, evaluated])
    assert tested.rows == (*run.rows[:4], {**run.rows[4], "test_acc": 0.5})
