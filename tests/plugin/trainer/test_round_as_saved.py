"""A round in which any hook fails is saved as it was right after the server's step, and resumed as if none failed."""

import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from federation import Fit, Fitted, same_state, seeded
from lightning.pytorch import callbacks as theirs
from lightning.pytorch.loggers import CSVLogger
from lightning_versions import needs_2_5_3
from toy_models import LitMLP

import lightning_spectral as ls

pytestmark = [
    needs_2_5_3,
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty"),
    pytest.mark.skipif(not hasattr(theirs, "EMAWeightAveraging"), reason="this Lightning has none"),
]
EVALUATION = [f"validation_{when}" for when in ("start", "epoch_start", "batch_start", "batch_end", "epoch_end", "end")]
AFTER_THE_STEP = ["round_end", "train_batch_end", *EVALUATION, "train_epoch_end"]
BEFORE_IT = ["train_epoch_start", "round_start", "train_batch_start", "client_start", "client_end", "cohort_end"]


class Fails(ls.RoundCallback):
    """Fails once, in one hook of a round, whoever else is called after it."""

    def __init__(self, hook: str) -> None:
        setattr(self, f"on_{hook}", self._fail)

    def _fail(self, trainer: pl.Trainer, pl_module: Any, *args: Any) -> None:
        if trainer.current_epoch == 1:
            raise RuntimeError("in user code")


class Counts(ls.RoundCallback):
    """A callback of a user's own, which counts what it sees, and logs its number of rounds."""

    def __init__(self) -> None:
        self.counts = {"batches": 0, "validations": 0, "epochs": 0}

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.counts["batches"] += len(batch.units)
        pl_module.log("batches", float(self.counts["batches"]), on_step=False, on_epoch=True, batch_size=1)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self.counts["validations"] += 1

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self.counts["epochs"] += 1

    def state_dict(self) -> dict[str, Any]:
        return dict(self.counts)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.counts = dict(state_dict)


def logged(folder: Path) -> dict[tuple[str, str], set[str]]:
    """The values in the files of all parts of a run, by their epoch and name."""
    found: dict[tuple[str, str], set[str]] = {}
    for path in folder.rglob("metrics.csv"):
        for row in csv.DictReader(path.read_text().splitlines()):
            for name, value in row.items():
                if value and "seconds" not in name and name != "step":
                    found.setdefault((row["epoch"] or row["step"], name), set()).add(value)
    return found


Run = Callable[..., Fitted]


@pytest.fixture
def run(data: Any, fit: Fit, tmp_path: Path) -> Run:
    def run(name: str, first: Any = (), last: Any = (), ckpt_path: Any = None) -> Fitted:
        averages = theirs.EMAWeightAveraging(decay=0.5)
        recorders = [theirs.LearningRateMonitor(), ls.RoundDashboard(), ls.plugin.callbacks.UpdateAlignment(1)]
        own = [averages, *recorders, Counts(), theirs.EarlyStopping("val_loss", patience=9)]
        saver = theirs.ModelCheckpoint(tmp_path / name / "checkpoints", every_n_epochs=9, save_on_exception=True)
        trainer = {"enable_checkpointing": True, "logger": CSVLogger(tmp_path / name)}
        callbacks = [*first, *own, *last, saver]
        return fit(seeded(LitMLP), data, max_epochs=3, callbacks=callbacks, trainer=trainer, ckpt_path=ckpt_path)

    return run


def outcome(fitted: Fitted, folder: Path) -> dict[Any, Any]:
    """Everything that a resumed run shares with the uninterrupted one, except weights."""
    callbacks: Any = fitted.trainer.callbacks
    kept = (ls.RoundDashboard, Counts, theirs.EarlyStopping)
    states = {type(one).__name__: one.state_dict() for one in callbacks if isinstance(one, kept)}
    rows = {(index, name): value for index, row in enumerate(fitted.rows) for name, value in row.items()}
    return {**rows, **fitted.logged, **logged(folder), **states, "ledger": fitted.ledger.rows}


WHOLE: list[tuple[dict[str, Any], dict[Any, Any]]] = []  # weights and outcome of the uninterrupted run, once there


def check(run: Run, folder: Path, **failing: Any) -> None:
    if not WHOLE:
        whole = run("whole")
        WHOLE.append((whole.tensors, outcome(whole, folder / "whole")))
    with pytest.raises(RuntimeError, match="in user code"):
        run("parts", **failing)
    resumed = run("parts", ckpt_path=ls.latest_checkpoint(folder / "parts" / "checkpoints"))
    tensors, expected = WHOLE[0]
    assert same_state(resumed.tensors, tensors)
    found = outcome(resumed, folder / "parts")
    assert {k: (found.get(k), expected.get(k)) for k in {*found, *expected} if found.get(k) != expected.get(k)} == {}


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("place", "hook"),
    [*(("first", hook) for hook in AFTER_THE_STEP), *(("last", hook) for hook in (*BEFORE_IT, *AFTER_THE_STEP))],
)
def test_a_failure_in_any_hook_costs_no_weight_and_no_record(place: str, hook: str, run: Run, tmp_path: Path) -> None:
    check(run, tmp_path, **{place: [Fails(hook)]})
