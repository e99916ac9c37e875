"""Rounds are epochs of a real Trainer, with its hooks, stopping rules and schedules."""

from typing import Any

import lightning.pytorch as pl
import pytest
from federation import Fit
from observed_runs import acting

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
