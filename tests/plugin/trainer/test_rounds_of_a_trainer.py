"""A stock Trainer runs rounds: its hooks, options and loggers."""

import copy
import csv
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from federation import Fit, same_state
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, Timer
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.tuner.tuning import Tuner
from mixed_federation import MIXED, federate
from observed_runs import acting
from torch import nn

import lightning_spectral as ls


def test_an_epoch_is_a_round_and_its_only_batch_all_clients(lit: Any, data: Any, fit: Fit) -> None:
    calls: list[str] = []

    spy = acting(
        on_train_epoch_start=lambda trainer, model: calls.append(f"round {trainer.current_epoch}"),
        on_train_batch_start=lambda trainer, model, batch, batch_idx: calls.append(f"{len(batch.units)} clients"),
        on_client_start=lambda trainer, model, turn: calls.append("sent" if turn.download and not turn.upload else "?"),
        on_client_end=lambda trainer, model, turn: calls.append("trained" if turn.upload is not None else "too early"),
        on_round_end=lambda trainer, model, summary: calls.append(f"aggregated {summary.round_idx}"),
        on_train_batch_end=lambda trainer, *_: calls.append(f"step {trainer.global_step}"),
        on_validation_start=lambda *_: calls.append("validate"),
    )
    fitted = fit(lit, data, clients_per_round=2, max_epochs=2, callbacks=[spy])
    assert calls == [
        *("round 0", "2 clients", "sent", "trained", "sent", "trained", "aggregated 0", "step 1", "validate"),
        *("round 1", "2 clients", "sent", "trained", "sent", "trained", "aggregated 1", "step 2", "validate"),
    ]
    assert fitted.trainer.global_step == 2


def test_a_round_takes_each_client_once_and_rounds_differ(lit: Any, data: Any, fit: Fit) -> None:
    ledger = fit(lit, data, clients_per_round=5, max_epochs=4).ledger
    cohorts = [tuple(row.client_id for row in ledger.rows if row.round_idx == r) for r in range(4)]
    assert all(len(set(cohort)) == 5 for cohort in cohorts)
    assert len(set(cohorts)) == 4


def test_own_boundary_callbacks_replace_ours(lit: Any, data: Any, fit: Fit) -> None:
    class Counting(ls.SVDRefresh):
        count = 0

        def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
            Counting.count += 1
            super().on_train_epoch_start(trainer, pl_module)

    trainer = fit(lit, data, max_epochs=2, callbacks=[Counting(), ls.Aggregation()]).trainer
    kinds = [type(callback) for callback in trainer.callbacks]
    assert Counting.count == 2
    assert ls.SVDRefresh not in kinds
    assert kinds.count(ls.Aggregation) == kinds.count(ls.SubmodelSampling) == 1


@pytest.mark.parametrize("place", [None, 0, 1, 2])
def test_aggregation_acts_last_wherever_it_is_listed(place: int | None, lit: Any, data: Any, fit: Fit) -> None:
    calls: list[tuple[Any, ...]] = []

    class Spy(ls.RoundCallback):
        def __init__(self, name: str) -> None:
            self.name = name

        def on_client_end(self, trainer: pl.Trainer, pl_module: Any, turn: Any) -> None:
            calls.append(("client end", self.name, turn.unit.client_id, num_received(pl_module)))

        def on_cohort_end(self, trainer: pl.Trainer, pl_module: Any, round_idx: int) -> None:
            calls.append(("cohort end", self.name, round_idx, num_received(pl_module), trainer.global_step))

        def on_round_end(self, trainer: pl.Trainer, pl_module: Any, summary: Any) -> None:
            assert not pl_module.engine.round_is_open
            calls.append(("round end", self.name, summary.round_idx, trainer.global_step))

    def num_received(pl_module: Any) -> int:
        return len(pl_module.engine.round.outcomes)

    callbacks: list[pl.Callback] = [Spy("A"), Spy("B")]
    if place is not None:
        callbacks.insert(place, ls.Aggregation())
    fitted = fit(lit, data, clients_per_round=2, max_epochs=2, callbacks=callbacks)
    assert sum(isinstance(callback, ls.Aggregation) for callback in fitted.trainer.callbacks) == 1
    expected: list[tuple[Any, ...]] = []
    for round_idx in (0, 1):
        ids = [row.client_id for row in fitted.ledger.rows if row.round_idx == round_idx]
        for received, client_id in enumerate(ids):
            expected += [("client end", name, client_id, received) for name in "AB"]
        expected += [("cohort end", name, round_idx, 2, round_idx) for name in "AB"]
        expected += [("round end", name, round_idx, round_idx + 1) for name in "AB"]
    assert calls == expected


@pytest.mark.parametrize("metric", ["fl/loss", "train_loss"])
def test_early_stopping_on_metrics_of_rounds_and_of_clients(metric: str, lit: Any, data: Any, fit: Fit) -> None:
    stop = EarlyStopping(metric, patience=1, min_delta=1e9, check_on_train_epoch_end=True)
    assert fit(lit, data, max_epochs=20, callbacks=[stop]).trainer.current_epoch == 2


@pytest.mark.sampled(2)
@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true", "64-true", "32-true"])
def test_precision(precision: Any, lit: Any, data: Any, fit: Fit) -> None:
    seen: dict[bool, set[torch.dtype]] = {True: set(), False: set()}
    lit.net[0].register_forward_hook(lambda module, args, output: seen[module.training].add(output.dtype))
    fit(lit, data, max_epochs=2, trainer={"precision": precision})
    expected = {"bf16": torch.bfloat16, "64": torch.float64, "32": torch.float32}
    assert seen[True] == seen[False] == {expected[precision.split("-")[0]]}  # clients train, the server evaluates


@pytest.mark.parametrize("fast", [True, 2])
def test_fast_dev_run(fast: Any, lit: Any, data: Any, tmp_path: Path, monkeypatch: Any) -> None:
    pytest.importorskip("tensorboard", reason="without it, Lightning warns that its default logger is another")
    monkeypatch.chdir(tmp_path)
    trainer = pl.Trainer(fast_dev_run=fast, accelerator="cpu", enable_progress_bar=False)
    trainer.fit(federate(lit), data)
    assert trainer.current_epoch == 1
    assert list(tmp_path.iterdir()) == []


def test_limited_cohort_is_what_strategies_are_told(lit: Any, data: Any, fit: Fit) -> None:
    sizes: list[float] = []

    class Spy(ls.Collective):
        def __call__(self, singular_values: Any, num_terms: int, cohort_size: float) -> Any:
            sizes.append(cohort_size)
            return super().__call__(singular_values, num_terms, cohort_size)

    limits = {"limit_train_batches": 3, "limit_val_batches": 1}
    fit(lit, data, algorithm=ls.SpectralSharding(Spy(), 0.3), clients_per_round=6, trainer=limits)
    assert sizes[-1] == 3


def test_pseudo_gradients_do_not_stay(lit: Any, data: Any, fit: Fit) -> None:
    fit(lit, data)
    assert all(parameter.grad is None for parameter in lit.parameters())


@pytest.mark.parametrize("fails", [False, True])
def test_trainer_gets_its_settings_back(fails: bool, lit: Any, data: Any, quiet: Any) -> None:
    def settings() -> tuple[Any, ...]:
        limits = trainer.limit_train_batches, trainer.limit_val_batches
        return trainer.accumulate_grad_batches, trainer.log_every_n_steps, *limits

    class Fails(ls.RoundCallback):
        def on_round_end(self, trainer: pl.Trainer, pl_module: Any, summary: Any) -> None:
            if fails:
                raise RuntimeError("enough")

    data.val = None
    trainer = pl.Trainer(max_epochs=1, callbacks=[callback := Fails()], **quiet)
    before = settings()
    with pytest.raises(RuntimeError, match="enough") if fails else nullcontext():
        trainer.fit(federate(lit), data)
    assert settings() == before
    trainer.callbacks.remove(callback)
    trainer.fit(federate(lit), data)
    assert trainer.current_epoch == 1


def test_timer_stops_between_whole_rounds(lit: Any, data: Any, fit: Fit) -> None:
    before = copy.deepcopy(lit.state_dict())
    algorithm = replace(MIXED, spectral_start=None)
    none = fit(lit, data, algorithm=algorithm, max_epochs=-1, callbacks=[Timer({"seconds": 0}, interval="epoch")])
    assert none.trainer.global_step == 0
    assert same_state(none.state, before)
    some = fit(lit, data, max_epochs=-1, callbacks=[Timer({"milliseconds": 30})])
    assert some.trainer.global_step == len(some.rows) >= 1
    assert {row["fl/clients"] for row in some.rows} == {4.0}


def test_test_and_predict_run_the_aggregated_model(lit: Any, data: Any, toy: Any, fit: Fit) -> None:
    fitted = fit(lit, data)
    (scores,) = fitted.trainer.test(fitted.model, data, verbose=False)
    x, y = toy.tensors
    with torch.no_grad():
        expected = nn.functional.cross_entropy(lit.eval()(x), y)
    assert scores["test_loss"] == pytest.approx(float(expected), rel=1e-5)
    torch.testing.assert_close(fitted.model(x), lit(x))


def test_the_tuner_is_refused_as_the_callback_that_it_adds(lit: Any, data: Any, quiet: Any) -> None:
    tuner = Tuner(pl.Trainer(max_epochs=1, **quiet))
    with pytest.raises(ValueError, match=r"^BatchSizeFinder cannot act on a federation: "):
        tuner.scale_batch_size(federate(lit), datamodule=data)


@pytest.mark.parametrize("number", [-1.5, 1.5, "2"])
def test_a_number_of_rounds_that_is_no_int(number: Any, lit: Any, data: Any, fit: Fit) -> None:
    with pytest.raises(TypeError, match=f"`max_epochs` must be an int, the number of rounds, .* got {number!r}"):
        fit(lit, data, max_epochs=number)


def test_x_axis_counts_rounds(lit: Any, data: Any, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="comes with the `test` extra")
    trainer = pl.Trainer(
        max_epochs=3,
        accelerator="cpu",
        logger=[CSVLogger(tmp_path, name="csv", version=0), TensorBoardLogger(tmp_path, name="tb", version=0)],
        callbacks=[LearningRateMonitor()],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(federate(lit, local_epochs=2), data)
    with (tmp_path / "csv" / "version_0" / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    for name in ("fl/loss", "fl/bytes_up", "fl/terms_visited", "train_loss", "train_acc", "val_acc", "lr-SGD"):
        assert [row["step"] for row in rows if row.get(name)] == ["0", "1", "2"], name
    for row in rows:
        assert not row["fl/round"] or float(row["fl/round"]) == float(row["step"])
    lrs = [float(row["fl/lr"]) for row in rows if row["fl/lr"]]
    assert lrs[0] == pytest.approx(0.1)
    assert lrs[0] > lrs[1] > lrs[2]


def test_logged_values_are_what_clients_saw(lit: Any, data: Any, fit: Fit) -> None:
    (row,) = fit(lit, data).rows
    assert row["train_loss"] == pytest.approx(row["fl/loss"], rel=1e-6)
    assert row["fl/examples"] == 40
    assert row["fl/clients"] == 4
    assert 0 < row["fl/terms_visited"] <= 1
    assert 0 < row["fl/inclusion_entropy"] <= 1
    assert row["fl/largest_multiplier"] >= 1


def test_ledger_counts_what_travels(lit: Any, data: Any, fit: Fit) -> None:
    fitted = fit(lit, data, max_epochs=2)
    ledger, history = fitted.ledger, fitted.history
    dense = 6 * 12 + 12 + 12 + 12 * 3 + 3
    for ratio, (down, up) in ledger.bytes_per_client().items():
        n = {0.3: 4, 0.6: 8}[ratio]
        assert up == 4 * (dense + n * 24)
        assert down == up + 4 * n
    assert sum(row.uplink_bytes for row in ledger.rows if row.round_idx == 0) == history.rows[0]["fl/bytes_up"]
    assert ledger.total_bytes == sum(row["fl/bytes_up"] + row["fl/bytes_down"] for row in history.rows)


def test_history_draws_a_picture(lit: Any, data: Any, fit: Fit, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="comes with the `examples` extra")
    history = fit(lit, data, max_epochs=2).history
    history.plot("val_acc", tmp_path / "new/acc.png")
    assert (tmp_path / "new/acc.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(
        ValueError, match=r"no round has a metric 'accuracy'; known metrics: .*fl/loss.*, val_acc, val_loss\."
    ):
        history.plot("accuracy", tmp_path / "accuracy.png")
    with pytest.raises(ValueError, match=r"no round has a metric 'val_acc'; known metrics: none"):
        ls.RoundHistory().plot("val_acc", tmp_path / "accuracy.png")
    assert not (tmp_path / "accuracy.png").exists(), "an empty plot"


def test_a_history_of_another_fit_is_refused_and_one_that_continues_is_not(lit: Any, data: Any, quiet: Any) -> None:
    history = ls.RoundHistory()
    model = ls.FederatedModule(lit, clients_per_round=2)
    trainer = pl.Trainer(**quiet, max_epochs=1, callbacks=[history])
    trainer.fit(model, data)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(model, data)
    assert history.column("fl/round") == [0, 1]
    with pytest.raises(ValueError, match=r"already holds 2 rounds of another fit.*give each fit its own"):
        pl.Trainer(**quiet, max_epochs=1, callbacks=[history]).fit(model, data)
