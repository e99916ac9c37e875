"""A run that is resumed from a checkpoint of any round is the uninterrupted one."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from federation import HARDLY_MOVED, Fit, Fitted, check_resumes, same_state, seeded
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from mixed_federation import MIXED, federate

import lightning_spectral as ls
from lightning_spectral.algorithms import SpectralStart
from lightning_spectral.plugin.settings import TRAINER_SETTINGS, check_checkpoint

FitAndSave = Callable[..., Fitted]


@pytest.fixture
def fit(fit: Fit) -> Fit:
    return partial(fit, server_optimizer=partial(torch.optim.SGD, lr=1.0, momentum=0.5))


@pytest.fixture
def fit_and_save(fit: Fit, lit_mlp: Any, data: Any) -> FitAndSave:
    """A fit with a logger that leaves a checkpoint of every round in ``folder / "ckpt"``."""

    def fit_and_save(folder: Path, max_epochs: int, ckpt_path: Path | None = None) -> Fitted:
        checkpoint = ModelCheckpoint(
            folder / "ckpt", "{epoch}", save_top_k=-1, enable_version_counter=False, auto_insert_metric_name=False
        )
        logger = CSVLogger(folder, version=f"{max_epochs}-{ckpt_path and ckpt_path.stem}")
        options: dict[str, Any] = {"logger": logger, "enable_checkpointing": True}
        rounds: dict[str, Any] = {"max_epochs": max_epochs, "ckpt_path": ckpt_path}
        return fit(seeded(lit_mlp), data, callbacks=[checkpoint], trainer=options, **rounds)

    return fit_and_save


@pytest.mark.sampled(1)
@pytest.mark.filterwarnings("ignore:.*exists and is not empty")
@pytest.mark.parametrize("stop_after", [1, 3, 4])
def test_resumed_run_equals_the_uninterrupted_one(stop_after: int, fit_and_save: FitAndSave, tmp_path: Path) -> None:
    whole = fit_and_save(tmp_path / "whole", 5)
    fit_and_save(tmp_path / "parts", stop_after)
    resumed = fit_and_save(tmp_path / "parts", 5, tmp_path / "parts" / "ckpt" / f"{stop_after - 1}.ckpt")
    assert same_state(whole.state, resumed.state)
    assert whole.ledger.rows == resumed.ledger.rows
    assert resumed.trainer.global_step == 5
    assert whole.rows == resumed.rows


@pytest.mark.sampled(1)
@pytest.mark.parametrize("precision", ["64-true", "bf16-true"])
@pytest.mark.parametrize(
    "algorithm", [ls.FedAvg(), ls.SpectralSharding(), ls.Zampling(degree=2)], ids=["dense", "sharded", "bits"]
)
@pytest.mark.filterwarnings(HARDLY_MOVED)
def test_restored_weights_keep_every_bit(
    algorithm: Any, precision: Any, lit_mlp: Any, data: Any, fit: Fit, tmp_path: Path
) -> None:
    """Nor is what an optimizer or the algorithm remembers."""
    optimizer = None if isinstance(algorithm, ls.Zampling) else ls.FedAdam(lr=0.01)
    options: dict[str, Any] = {"trainer": {"precision": precision}, "server_optimizer": optimizer}
    check_resumes(fit, lit_mlp, data, tmp_path, algorithm=algorithm, **options)


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`, callbacks")
@pytest.mark.parametrize("precision", ["64-true", "bf16-true"])
def test_weights_to_evaluate_are_not_rounded(precision: Any, lit_mlp: Any, data: Any, fit: Fit, tmp_path: Path) -> None:
    fitted = fit(seeded(lit_mlp), data, trainer={"precision": precision})
    fitted.trainer.save_checkpoint(tmp_path / "1.ckpt")
    model = federate(lit_mlp())
    pl.Trainer(accelerator="cpu", logger=False, precision=precision, enable_progress_bar=False).validate(
        model, data, ckpt_path=str(tmp_path / "1.ckpt"), verbose=False
    )
    assert same_state(model.module.state_dict(), fitted.state)


def test_a_run_stopped_within_a_round_begins_that_round_again(lit_mlp: Any, data: Any, fit: Fit, tmp_path: Any) -> None:
    class StopWithin(ls.RoundCallback):
        def on_client_end(self, trainer: pl.Trainer, pl_module: Any, turn: Any) -> None:
            if turn.round_idx == 1:
                trainer.save_checkpoint(tmp_path / "within.ckpt")

    whole = fit(seeded(lit_mlp), data, max_epochs=3, callbacks=[StopWithin()])
    resumed = fit(seeded(lit_mlp), data, max_epochs=3, ckpt_path=tmp_path / "within.ckpt")
    assert resumed.trainer.global_step == 3
    assert same_state(whole.state, resumed.state)


@pytest.mark.slow
@pytest.mark.filterwarnings(
    "ignore:Be aware that when using `ckpt_path`, callbacks",
)
def test_a_checkpoint_at_the_end_of_the_last_batch_resumes_with_the_next_round(
    lit_mlp: Any, data: Any, fit: Fit, fit_and_save: FitAndSave, tmp_path: Path
) -> None:
    whole = fit_and_save(tmp_path / "whole", 4)
    every_step = ModelCheckpoint(tmp_path / "steps", "{step}", every_n_train_steps=1, save_top_k=-1)
    saving: dict[str, Any] = {"callbacks": [every_step], "trainer": {"enable_checkpointing": True}}
    fit(seeded(lit_mlp), data, max_epochs=2, **saving)
    assert sorted(path.name for path in (tmp_path / "steps").iterdir()) == ["step=1.ckpt", "step=2.ckpt"]
    for step in (1, 2):
        resumed = fit_and_save(tmp_path / f"resumed{step}", 4, tmp_path / "steps" / f"step={step}.ckpt")
        assert resumed.trainer.global_step == resumed.trainer.current_epoch == 4
        assert same_state(whole.state, resumed.state)


@pytest.mark.slow
def test_a_request_to_stop_takes_effect_at_the_end_of_the_round(lit: Any, data: Any, fit: Fit, tmp_path: Path) -> None:
    class StopEarly(ls.RoundCallback):
        def on_client_end(self, trainer: pl.Trainer, pl_module: Any, turn: Any) -> None:
            trainer.should_stop |= turn.round_idx == 1

    whole = fit(seeded(type(lit)), data, max_epochs=4)
    stopped = fit(lit, data, max_epochs=4, callbacks=[StopEarly()])
    assert stopped.trainer.global_step == 2
    stopped.trainer.save_checkpoint(tmp_path / "stopped.ckpt")
    resumed = fit(seeded(type(lit)), data, max_epochs=4, ckpt_path=tmp_path / "stopped.ckpt")
    assert resumed.trainer.global_step == 4
    assert same_state(whole.state, resumed.state)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"seed": 1}, "seed: 0 in the checkpoint, 1 now"),
        ({"local_epochs": 3}, "local_epochs: 1 in the checkpoint, 3 now"),
        ({"algorithm": ls.FedAvg()}, "algorithm: .SpectralSharding"),
        ({"algorithm": replace(MIXED, spectral_start=None)}, r"spectral_start=SpectralStart\(tail=0.1, .*None.* now"),
        ({"algorithm": replace(MIXED, spectral_start=SpectralStart(trained=True))}, "trained=True.* now"),
        ({"clients_per_round": 2}, "participation: .*clients_per_round=4"),
    ],
)
def test_checkpoint_of_another_configuration_is_refused(change: dict[str, Any], named: str, lit: Any) -> None:
    saved = {"federation": federate(lit).configuration()}
    with pytest.raises(ValueError, match=f"(?s)another configuration.*{named}"):
        check_checkpoint(saved, federate(lit, **change).configuration())


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("saved", "now", "named"),
    [
        ({}, {"limit_train_batches": 2}, "limit_train_batches: '1.0' in the checkpoint, '2' now"),
        ({"limit_train_batches": 1}, {}, "limit_train_batches: '1' in the checkpoint, '1.0' now"),
        ({}, {"overfit_batches": 0.5}, "overfit_batches: '0.0' in the checkpoint, '0.5' now"),
        ({"precision": "bf16-mixed"}, {}, "precision: 'bf16-mixed' in the checkpoint, '32-true' now"),
    ],
)
def test_checkpoint_of_another_trainer(
    saved: Any, now: Any, named: str, lit: Any, data: Any, fit: Fit, tmp_path: Path
) -> None:
    data.val = None
    fit(lit, data, trainer=saved).trainer.save_checkpoint(tmp_path / "1.ckpt")
    with pytest.raises(ValueError, match=f"(?s)another configuration.*{named}"):
        fit(lit, data, max_epochs=2, trainer=now, ckpt_path=tmp_path / "1.ckpt")
    assert fit(lit, data, max_epochs=2, trainer=saved, ckpt_path=tmp_path / "1.ckpt").trainer.global_step == 2


def test_checkpoint_without_settings_of_the_trainer_is_resumed(lit: Any, data: Any, fit: Fit, tmp_path: Path) -> None:
    fit(lit, data).trainer.save_checkpoint(tmp_path / "1.ckpt")
    older = torch.load(tmp_path / "1.ckpt", weights_only=True)
    for name in TRAINER_SETTINGS:
        del older["federation"][name]
    torch.save(older, tmp_path / "older.ckpt")
    resumed = fit(lit, data, max_epochs=2, trainer={"limit_train_batches": 2}, ckpt_path=tmp_path / "older.ckpt")
    assert resumed.trainer.global_step == 2


def test_checkpoint_of_another_split_is_refused(lit: Any, toy: Any, data: Any, fit: Fit, tmp_path: Path) -> None:
    fit(lit, data).trainer.save_checkpoint(tmp_path / "1.ckpt")
    other = ls.FederatedDataModule(toy, ls.IIDPartitioner(12), val=toy, batch_size=4, seed=1)
    with pytest.raises(ValueError, match="partition: "):
        fit(lit, other, max_epochs=2, ckpt_path=tmp_path / "1.ckpt")


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`, callbacks")
def test_checkpoint_evaluates_in_any_configuration(
    lit: Any, lit_mlp: Any, data: Any, quiet: Any, fit: Fit, tmp_path: Path
) -> None:
    fitted = fit(lit, data)
    fitted.trainer.save_checkpoint(tmp_path / "1.ckpt")
    model = federate(lit_mlp(), seed=9)
    (scores,) = pl.Trainer(**quiet).validate(model, data, ckpt_path=str(tmp_path / "1.ckpt"), verbose=False)
    assert scores["val_acc"] == pytest.approx(fitted.rows[0]["val_acc"])
