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

    def __init__(self, hook: str = "", disturb: Callable[[], None] = fail) -> None:
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

    def run(make: type[LitMLP], *callbacks: pl.Callback, after_validation: bool = False, **more: Any) -> Fitted:
        own = EarlyStopping("val_loss", patience=99, check_on_train_epoch_end=not after_validation)
        saves = any(isinstance(one, ModelCheckpoint) for one in callbacks)
        more["trainer"] = {"enable_checkpointing": saves, **more.get("trainer", {})}
        stops = [own, EarlyStopping("fl/loss", patience=99)]
        return fit(seeded(make), data, callbacks=[*callbacks, *stops], **{"max_epochs": 4, **more})

    return run


@pytest.fixture
def interrupted(run: Any, tmp_path: Path) -> Callable[..., Path]:
    """What such a fit has saved when it ended with an error."""

    def interrupted(*args: Any, **options: Any) -> Any:
        saver = ModelCheckpoint(tmp_path, every_n_epochs=9, save_on_exception=True)
        with pytest.raises((RuntimeError, OSError, SystemExit)):
            run(*args, saver, **options)
        return ls.latest_checkpoint(tmp_path)

    return interrupted


def outcome(fitted: Fitted) -> list[Any]:
    """Everything that a resumed run shares with the uninterrupted one, except weights."""
    callbacks: Any = fitted.trainer.callbacks
    stops = [callback.state_dict() for callback in callbacks if isinstance(callback, EarlyStopping)]
    steps = fitted.trainer.global_step, fitted.trainer.current_epoch
    return [fitted.rows, fitted.ledger.rows, repr(stops), repr(fitted.module.plateau.state_dict()), steps]


def assert_same(resumed: Fitted, whole: Fitted) -> None:
    assert same_state(resumed.tensors, whole.tensors)
    assert outcome(resumed) == outcome(whole)


AFTER_THE_STEP = ["train_batch_end", "train_epoch_end"]
AFTER_THE_STEP += [f"validation_{when}" for when in ("start", "batch_end", "epoch_end", "end")]


@needs_2_5_3
@pytest.mark.parametrize("disturb", [fail, interrupt], ids=["an error", "Ctrl-C"])
@pytest.mark.parametrize("hook", AFTER_THE_STEP)
def test_a_round_interrupted_after_the_servers_step_is_validated_when_resumed(
    hook: str, disturb: Callable[[], None], run: Any, interrupted: Any
) -> None:
    """Also if early stopping has counted the round, but the schedule has not."""
    ckpt = interrupted(Falling, Disturbs(f"on_{hook}", disturb), after_validation=True)
    whole, resumed = (run(Falling, Disturbs(), after_validation=True, ckpt_path=path) for path in (None, ckpt))
    assert_same(resumed, whole)


@needs_2_5_3
@pytest.mark.parametrize("limits", [{"max_epochs": 2}, {"max_epochs": -1, "trainer": {"max_steps": 2}}])
def test_an_interrupted_last_round_is_validated_when_resumed(limits: Any, run: Any, interrupted: Any) -> None:
    ckpt = interrupted(Falling, Disturbs("on_validation_start"), **limits)
    assert_same(run(Falling, Disturbs(), ckpt_path=ckpt, **limits), run(Falling, Disturbs(), **limits))


@needs_2_5_3
def test_a_hook_of_the_users_that_fails_after_validation_costs_no_round(run: Any, interrupted: Any) -> None:
    ckpt = interrupted(FailsInHook, after_validation=True, max_epochs=3)
    assert_same(*(run(FailsInHook, after_validation=True, ckpt_path=path) for path in (ckpt, None)))


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
def test_a_logger_that_fails_costs_no_round(error: type[BaseException], run: Any, interrupted: Any) -> None:
    ckpt = interrupted(Falling, trainer={"logger": FailingLogger(error)})
    assert_same(run(Falling, ckpt_path=ckpt), run(Falling))


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
    """Some rounds are without clients: schedules and early stopping then use an earlier round's metrics, or wait."""
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
