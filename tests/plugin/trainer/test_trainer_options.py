"""Options of the Trainer: honoured, or refused by name."""

import copy
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from federation import Fit, same_state
from lightning.pytorch.callbacks import EarlyStopping, Timer
from lightning.pytorch.tuner.tuning import Tuner
from mixed_federation import MIXED, federate
from torch import nn

import lightning_spectral as ls


@pytest.mark.parametrize("metric", ["fl/loss", "train_loss"])
def test_early_stopping_on_metrics_of_rounds_and_of_clients(metric: str, lit: Any, data: Any, fit: Fit) -> None:
    stop = EarlyStopping(metric, patience=1, min_delta=1e9, check_on_train_epoch_end=True)
    assert fit(lit, data, max_epochs=20, callbacks=[stop]).trainer.current_epoch == 2


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
