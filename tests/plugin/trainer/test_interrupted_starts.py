"""A resumed run that fails before it trains saves what it has resumed from, so that a further run resumes that."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from federation import Fit, Fitted, same_state, seeded
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.plugins.io import TorchCheckpointIO
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch.optim.lr_scheduler import ReduceLROnPlateau
from toy_models import LitMLP

import lightning_spectral as ls

pytestmark = [
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty"),
    pytest.mark.filterwarnings("ignore:Using ModelCheckpoint with manual optimization"),
    pytest.mark.filterwarnings("ignore:.*fit.ckpt_path="),  # OnExceptionCheckpoint looks for a checkpoint to resume
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`, callbacks"),
]


class Falling(LitMLP):
    """Its learning rate falls in most rounds: a schedule that is restored wrongly shows."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        schedule = ReduceLROnPlateau(optimizer, factor=0.7, patience=0, threshold=0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "val_loss"}}


class FailsAt(ls.RoundCallback):
    """Fails in one hook, from a round on."""

    def __init__(self, hook: str = "", round_idx: int = 0) -> None:
        self.round_idx = round_idx
        if hook:
            setattr(self, hook, self._fail)

    def _fail(self, trainer: pl.Trainer, *args: Any, **options: Any) -> None:
        if trainer.current_epoch >= self.round_idx:
            raise RuntimeError("in user code")

    def state_dict(self) -> dict[str, Any]:
        return {"not": "empty"}  # Lightning calls `load_state_dict` and `on_load_checkpoint` of such callbacks alone


def fed_adam(parameters: Any) -> Any:
    return torch.optim.Adam(parameters, lr=0.05)


@pytest.fixture
def run(fit: Fit, data: Any) -> Callable[..., Fitted]:
    """A fit whose server, schedule and callbacks have a state."""

    def run(*callbacks: pl.Callback, plugins: Any = None, **more: Any) -> Fitted:
        saves = any(isinstance(one, OnExceptionCheckpoint | ModelCheckpoint) for one in callbacks)
        options: dict[str, Any] = {"max_epochs": 4, "server_optimizer": fed_adam, "callbacks": callbacks}
        trainer = {"enable_checkpointing": saves, "plugins": plugins}
        return fit(seeded(Falling), data, trainer=trainer, **options, **more)

    return run


@pytest.fixture
def interrupted(run: Any, tmp_path: Path) -> Callable[..., str | None]:
    """What such a fit has saved, under one name, when it ended with an error."""

    def interrupted(failing: pl.Callback, **options: Any) -> str | None:
        with pytest.raises(RuntimeError, match="in user code"):
            run(failing, OnExceptionCheckpoint(tmp_path), **options)
        return ls.latest_checkpoint(tmp_path)

    return interrupted


def assert_same(resumed: Fitted, whole: Fitted) -> None:
    assert same_state(resumed.tensors, whole.tensors)
    assert resumed.rows == whole.rows
    assert resumed.ledger.rows == whole.ledger.rows


BEFORE_TRAINING = ["setup", "on_load_checkpoint", "load_state_dict", "on_fit_start", "on_train_start"]


@pytest.mark.parametrize("first", ["on_client_end", "on_validation_batch_end"])
@pytest.mark.parametrize("hook", BEFORE_TRAINING)
def test_a_resumed_run_that_fails_before_training_loses_nothing(
    hook: str, first: str, run: Any, interrupted: Any
) -> None:
    """Neither if a round was yet to be validated, although the one file that there is would be overwritten."""
    ckpt = interrupted(FailsAt(first, round_idx=2))
    again = interrupted(_failing(hook), ckpt_path=ckpt)
    assert_same(run(ckpt_path=again), run())


def _failing(hook: str) -> pl.Callback:
    callback = FailsAt(hook if hook != "load_state_dict" else "")
    if hook == "load_state_dict":

        def fail(state: Any) -> None:
            raise RuntimeError("in user code")

        callback.load_state_dict = fail  # type: ignore[method-assign]
    return callback


def test_a_run_that_fails_while_optimizers_are_restored_loses_nothing(
    run: Any, interrupted: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ckpt = interrupted(FailsAt("on_client_end", round_idx=2))

    def fails(*args: Any) -> None:
        raise RuntimeError("in user code")

    with monkeypatch.context() as patch:
        patch.setattr(SingleDeviceStrategy, "load_optimizer_state_dict", fails)
        again = interrupted(FailsAt(), ckpt_path=ckpt)
    assert_same(run(ckpt_path=again), run())


def test_weights_alone_are_those_that_it_has_resumed_from(run: Any, interrupted: Any, tmp_path: Path) -> None:
    ckpt = interrupted(FailsAt("on_client_end", round_idx=2))
    weights = OnExceptionCheckpoint(tmp_path, "weights")
    weights.save_weights_only = True  # type: ignore[attr-defined]

    def save(trainer: pl.Trainer, *args: Any) -> None:
        trainer.save_checkpoint(tmp_path / "weights.ckpt", weights_only=True)

    weights.on_exception = save  # type: ignore[method-assign, assignment]
    with pytest.raises(RuntimeError, match="in user code"):
        run(FailsAt("on_train_start"), weights, ckpt_path=ckpt)
    saved, resumed = (torch.load(path, weights_only=True) for path in (tmp_path / "weights.ckpt", ckpt))
    assert same_state(saved["state_dict"], resumed["state_dict"])
    assert {"callbacks", "optimizer_states", "lr_schedulers"}.isdisjoint(saved)


@pytest.mark.parametrize("hook", ["setup", "on_fit_start", "on_train_start"])
def test_a_new_run_that_fails_before_training_saves_nothing(hook: str, interrupted: Any) -> None:
    """Its weights may not have been prepared for the first round, which a resumed run does not do."""
    assert interrupted(FailsAt(hook)) is None


class WritesAll(TorchCheckpointIO):
    """A user's plugin, which does not know that there is nothing to write."""


def test_what_another_plugin_writes_of_a_new_run_that_failed_before_training_is_the_start(
    run: Any, tmp_path: Path
) -> None:
    with pytest.raises(RuntimeError, match="in user code"):
        run(FailsAt("on_fit_start"), OnExceptionCheckpoint(tmp_path), plugins=WritesAll())
    assert_same(run(ckpt_path=ls.latest_checkpoint(tmp_path), plugins=WritesAll()), run())


def test_a_resumed_run_with_nothing_left_to_train_shows_what_was_logged_last(run: Any, tmp_path: Path) -> None:
    whole = run(ModelCheckpoint(tmp_path))
    resumed = run(ckpt_path=ls.latest_checkpoint(tmp_path))
    assert resumed.logged == whole.logged
    assert_same(resumed, whole)
