"""A checkpoint written after the server's step but before the end of the epoch: resuming validates the round."""

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from federation import Fit, Fitted, same_state, seeded
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers.logger import DummyLogger
from lightning_versions import needs_2_5_3
from torch.optim.lr_scheduler import ReduceLROnPlateau
from toy_models import LitMLP

import lightning_spectral as ls

pytestmark = pytest.mark.filterwarnings(
    "ignore:Be aware that when using `ckpt_path`, callbacks",  # only the first part of a run saves
    "ignore:Using ModelCheckpoint with manual optimization",  # the state after the server's step is what we want
    "ignore:.*no client is left to average",
)


class Falling(LitMLP):
    """Its learning rate falls in most rounds: a plateau schedule that misses one shows."""

    monitor = "val_loss"

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        self.plateau = ReduceLROnPlateau(optimizer, factor=0.7, patience=0, threshold=0.9)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": self.plateau, "monitor": self.monitor, "strict": False},
        }


class WaitsForTraining(Falling):
    monitor = "train_loss"


@pytest.fixture(autouse=True)
def _as_in_a_terminal() -> Iterator[None]:
    """A shell starts background jobs with Ctrl-C ignored."""
    own = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, own)


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def fail() -> None:
    raise RuntimeError("in user code")


class Disturbs(ls.RoundCallback):
    """Does something once, in one hook of round 2; a value that it logs belongs to every round."""

    def __init__(self, hook: str, disturb: Callable[[], None]) -> None:
        self.disturb = disturb
        if hook:
            setattr(self, hook, self._act)

    def on_round_end(self, trainer: pl.Trainer, pl_module: Any, summary: Any) -> None:
        pl_module.log("round squared", float(summary.round_idx**2), on_step=False, on_epoch=True, batch_size=1)

    def _act(self, trainer: pl.Trainer, pl_module: Any, *args: Any) -> None:
        if trainer.current_epoch == 1 and trainer.is_last_batch and trainer.global_step == 2:
            self.disturb()


class FailsInHook(Falling):
    """Fails in one of its own hooks, which Lightning calls after all callbacks."""

    def on_validation_end(self) -> None:
        if self.trainer.current_epoch == 1 and self.trainer.max_epochs == 3:
            fail()


@pytest.fixture
def run(fit: Fit, data: Any) -> Callable[..., Fitted]:
    """A fit with two early stoppings that never stop; their state is part of the outcome."""

    def run(
        make: type[LitMLP] = Falling,
        *callbacks: pl.Callback,
        max_epochs: int = 4,
        after_validation: bool = False,
        **more: Any,
    ) -> Fitted:
        stops = [
            EarlyStopping("val_loss", patience=99, check_on_train_epoch_end=not after_validation),
            EarlyStopping("fl/loss", patience=99),
        ]
        more["trainer"] = {"enable_checkpointing": True, **more.get("trainer", {})}
        if not any(isinstance(one, ModelCheckpoint) for one in callbacks):
            more["trainer"]["enable_checkpointing"] = False
        return fit(seeded(make), data, max_epochs=max_epochs, callbacks=[*callbacks, *stops], **more)

    return run


def outcome(fitted: Fitted) -> list[Any]:
    """Everything that a resumed run shares with the uninterrupted one, except weights."""
    callbacks: Any = fitted.trainer.callbacks
    stops = [callback.state_dict() for callback in callbacks if isinstance(callback, EarlyStopping)]
    steps = fitted.trainer.global_step, fitted.trainer.current_epoch
    return [fitted.rows, fitted.ledger.rows, repr(stops), repr(fitted.module.plateau.state_dict()), steps]


def assert_same(resumed: Fitted, whole: Fitted) -> None:
    assert same_state(resumed.model.state_dict(), whole.model.state_dict())
    assert outcome(resumed) == outcome(whole)


HOOKS = [
    "on_train_batch_end",
    "on_validation_start",
    "on_validation_batch_end",
    "on_validation_epoch_end",
    "on_validation_end",
    "on_train_epoch_end",
]


@needs_2_5_3
@pytest.mark.parametrize("disturb", [fail, interrupt], ids=["an error", "Ctrl-C"])
@pytest.mark.parametrize("hook", HOOKS)
def test_a_round_that_was_interrupted_after_the_servers_step_is_validated_when_resumed(
    hook: str, disturb: Callable[[], None], run: Any, tmp_path: Path
) -> None:
    """Also if early stopping has counted the round, but the schedule has not."""
    whole = run(Falling, Disturbs("", fail), after_validation=True)
    saver = ModelCheckpoint(tmp_path, every_n_epochs=9, save_on_exception=True)
    with pytest.raises((RuntimeError, SystemExit)):
        run(Falling, Disturbs(hook, disturb), saver, after_validation=True)
    ckpt = ls.latest_checkpoint(tmp_path)
    assert_same(run(Falling, Disturbs("", fail), after_validation=True, ckpt_path=ckpt), whole)


@needs_2_5_3
@pytest.mark.parametrize("limits", [{"max_epochs": 2}, {"max_epochs": -1, "trainer": {"max_steps": 2}}])
def test_a_last_round_that_was_interrupted_is_validated_when_resumed(limits: Any, run: Any, tmp_path: Path) -> None:
    saver = ModelCheckpoint(tmp_path, every_n_epochs=9, save_on_exception=True)
    with pytest.raises(RuntimeError, match="in user code"):
        run(Falling, Disturbs("on_validation_start", fail), saver, **limits)
    resumed = run(Falling, Disturbs("", fail), ckpt_path=ls.latest_checkpoint(tmp_path), **limits)
    assert_same(resumed, run(Falling, Disturbs("", fail), **limits))


@needs_2_5_3
def test_a_hook_of_the_users_module_that_fails_after_validation_costs_no_round(run: Any, tmp_path: Path) -> None:
    whole = run(FailsInHook, after_validation=True)
    saver = ModelCheckpoint(tmp_path, every_n_epochs=9, save_on_exception=True)
    with pytest.raises(RuntimeError, match="in user code"):
        run(FailsInHook, saver, after_validation=True, max_epochs=3)
    assert_same(run(FailsInHook, after_validation=True, ckpt_path=ls.latest_checkpoint(tmp_path)), whole)


class FailingLogger(DummyLogger):
    """Fails in round 1, before any callback has heard of the round."""

    def __init__(self, error: type[BaseException]) -> None:
        super().__init__()
        self.error = error

    def log_metrics(self, metrics: Any, step: Any = None) -> None:
        if metrics.get("fl/round") == 1:
            raise self.error("the disk is full")


@needs_2_5_3
@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_a_logger_that_fails_keeps_a_round_from_no_callback(
    error: type[BaseException], run: Any, tmp_path: Path
) -> None:
    saver = ModelCheckpoint(tmp_path, every_n_epochs=9, save_on_exception=True)
    with pytest.raises((OSError, SystemExit)):
        run(Falling, saver, trainer={"logger": FailingLogger(error)})
    assert_same(run(Falling, ckpt_path=ls.latest_checkpoint(tmp_path)), run(Falling))


@pytest.mark.parametrize(
    "when",
    [{}, {"every_n_train_steps": 1}, {"save_on_train_epoch_end": False}],
    ids=["after epochs", "after steps", "after validation"],
)
@pytest.mark.parametrize(
    ("make", "settings"),
    [(Falling, {}), (Falling, {"check_val_every_n_epoch": 2}), (WaitsForTraining, {})],
    ids=["every round", "every other round", "on training"],
)
def test_a_plateau_schedule_misses_nothing(
    make: type[LitMLP], settings: Any, when: Any, run: Any, tmp_path: Path
) -> None:
    """Some rounds are without clients: schedules and early stopping then go by an earlier round's metrics, or wait."""
    more: dict[str, Any] = {"dropout": ls.ClientDropout(0.6), "clients_per_round": 2, "max_epochs": 6}
    more |= {"trainer": settings, "after_validation": bool(settings)}
    whole = run(make, ModelCheckpoint(tmp_path, "{step}", save_top_k=-1, **when), **more)
    assert not all("fl/loss" in row for row in whole.rows)
    assert len({row["fl/lr"] for row in whole.rows}) > 2
    for ckpt in sorted(tmp_path.iterdir()):
        assert_same(run(make, ckpt_path=ckpt, **more), whole)


def test_max_steps_counts_rounds_of_a_resumed_run_too(run: Any, tmp_path: Path) -> None:
    limits: dict[str, Any] = {"max_epochs": 3, "trainer": {"max_steps": 9}}
    whole = run(Falling, ModelCheckpoint(tmp_path, "{step}", save_top_k=-1), **limits)
    for ckpt in sorted(tmp_path.iterdir()):
        assert_same(run(Falling, ckpt_path=ckpt, **limits), whole)
