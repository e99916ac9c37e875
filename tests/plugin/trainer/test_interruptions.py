"""A run that ends before training, within a round or after the server's step, and is resumed, loses nothing."""

import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from federation import Fit, Fitted, same_state, seeded
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.plugins.io import TorchCheckpointIO
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning_versions import HAS_2_5_3, needs_2_5_3
from mixed_federation import MIXED
from torch.optim.lr_scheduler import ReduceLROnPlateau
from toy_models import LitMLP, LitSmall, variant

import lightning_spectral as ls

pytestmark = [
    pytest.mark.usefixtures("interruptible"),
    pytest.mark.filterwarnings(
        "ignore:Be aware that when using `ckpt_path`, callbacks",  # only the first part of a run saves
        "ignore:Checkpoint directory .* exists and is not empty",
        "ignore:.*fit.ckpt_path=",  # OnExceptionCheckpoint looks for a checkpoint
        "ignore:.*no client is left to average",
    ),
]


class Falling(LitMLP):
    """Its learning rate falls in most rounds: a plateau schedule that misses one, or is restored wrongly, shows."""

    monitor, strict = "val_loss", False

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        self.plateau = ReduceLROnPlateau(optimizer, factor=0.7, patience=0, threshold=0.9)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": self.plateau, "monitor": self.monitor, "strict": self.strict},
        }


class FailsInHook(Falling):
    """Fails in one of its own hooks, which Lightning calls after all callbacks."""

    def on_validation_end(self) -> None:
        if self.trainer.current_epoch == 1 and self.trainer.max_epochs == 4:
            fail()


def press() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def fail(*args: Any) -> None:
    raise RuntimeError("in user code")


class Acts(ls.RoundCallback):
    """Does something in one hook: once, after the step of round 2, or from a round on."""

    def __init__(self, hook: str, act: Callable[[], None] = fail, round_idx: int | None = None) -> None:
        self.act, self.round_idx = act, round_idx
        setattr(self, hook, self._act)

    def _act(self, trainer: Any, *args: Any, **options: Any) -> None:
        is_after_step = trainer.current_epoch == 1 and trainer.is_last_batch and trainer.global_step == 2
        if is_after_step if self.round_idx is None else trainer.current_epoch >= self.round_idx:
            self.act()

    def state_dict(self) -> dict[str, Any]:
        return {"not": "empty"}  # Lightning calls `load_state_dict` and `on_load_checkpoint` of such callbacks alone


class Logs(ls.RoundCallback):
    """Logs a value that belongs to every round."""

    def on_round_end(self, trainer: pl.Trainer, pl_module: Any, summary: Any) -> None:
        pl_module.log("round squared", float(summary.round_idx**2), on_step=False, on_epoch=True, batch_size=1)


Run = Callable[..., Fitted]


@pytest.fixture
def run(fit: Fit, data: Any) -> Run:
    """A fit whose server, schedule and callbacks have a state, with two early stoppings that never stop."""

    def run(make: type[LitMLP], *callbacks: pl.Callback, after_validation: bool = False, **more: Any) -> Fitted:
        own = EarlyStopping("val_loss", patience=99, check_on_train_epoch_end=not after_validation)
        stops = [own, EarlyStopping("fl/loss", patience=99)]
        saves = any(isinstance(one, OnExceptionCheckpoint | ModelCheckpoint) for one in callbacks)
        more["trainer"] = {"enable_checkpointing": saves, **more.get("trainer", {})}
        options = {"max_epochs": 3, "server_optimizer": partial(torch.optim.Adam, lr=0.05), **more}
        return fit(seeded(make), data, callbacks=[*callbacks, Logs(), *stops], **options)

    return run


WHOLE: dict[str, Fitted] = {}


@pytest.fixture
def resumes(run: Run) -> Callable[..., None]:
    """Checks that a resumed run ends as the uninterrupted one, which is run once for all tests of this file."""

    def resumes(ckpt: Any, make: type[LitMLP] = Falling, **options: Any) -> None:
        assert ckpt is not None, "nothing was written"
        if (key := f"{make} {options}") not in WHOLE:
            WHOLE[key] = run(make, **options)
        whole = WHOLE[key]
        resumed = run(make, ckpt_path=ckpt, **options)
        assert same_state(resumed.tensors, whole.tensors)
        assert outcome(resumed) == outcome(whole)

    return resumes


@pytest.fixture
def interrupted(run: Run, tmp_path: Path) -> Callable[..., str | None]:
    """What such a fit has saved, under one name, when it ended with an error."""

    def interrupted(*args: Any, make: type[LitMLP] = Falling, **options: Any) -> str | None:
        saver: Callback = OnExceptionCheckpoint(tmp_path)
        if HAS_2_5_3:
            saver = ModelCheckpoint(tmp_path, every_n_epochs=9, save_on_exception=True)
        with pytest.raises((RuntimeError, OSError, SystemExit)):
            run(make, *args, saver, **options)
        return ls.latest_checkpoint(tmp_path)

    return interrupted


def outcome(fitted: Fitted) -> list[Any]:
    """Everything that a resumed run shares with the uninterrupted one, except weights."""
    callbacks: Any = fitted.trainer.callbacks
    stops = [callback.state_dict() for callback in callbacks if isinstance(callback, EarlyStopping)]
    steps = fitted.trainer.global_step, fitted.trainer.current_epoch
    return [fitted.rows, fitted.ledger.rows, repr(stops), repr(fitted.module.plateau.state_dict()), steps]


# Before training

BEFORE_TRAINING = ["setup", "on_load_checkpoint", "load_state_dict", "on_fit_start", "on_train_start"]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("hook", "first"),
    [*((hook, "on_validation_batch_end") for hook in BEFORE_TRAINING), ("on_train_start", "on_client_end")],
)
def test_a_resumed_run_that_fails_before_training_loses_nothing(
    hook: str, first: str, interrupted: Any, resumes: Any
) -> None:
    """Neither if a round was yet to be validated, although the one file that there is would be overwritten."""
    ckpt = interrupted(Acts(first, round_idx=2))
    callback = Acts(hook, round_idx=0)
    if hook == "load_state_dict":
        callback.load_state_dict = fail  # type: ignore[method-assign]
    resumes(interrupted(callback, ckpt_path=ckpt))


def test_a_run_that_fails_while_optimizers_are_restored_loses_nothing(
    interrupted: Any, resumes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ckpt = interrupted(Acts("on_client_end", round_idx=2))
    with monkeypatch.context() as patch:
        patch.setattr(SingleDeviceStrategy, "load_optimizer_state_dict", fail)
        again = interrupted(ckpt_path=ckpt)
    resumes(again)


def test_weights_alone_are_those_that_it_has_resumed_from(run: Run, interrupted: Any, tmp_path: Path) -> None:
    ckpt = interrupted(Acts("on_client_end", round_idx=2))
    weights: Any = OnExceptionCheckpoint(tmp_path, "weights")
    weights.save_weights_only = True
    path = tmp_path / "weights.ckpt"
    weights.on_exception = lambda trainer, *args: trainer.save_checkpoint(path, weights_only=True)
    with pytest.raises(RuntimeError, match="in user code"):
        run(Falling, Acts("on_train_start", round_idx=0), weights, ckpt_path=ckpt)
    saved, resumed = (torch.load(each, weights_only=True) for each in (path, ckpt))
    assert same_state(saved["state_dict"], resumed["state_dict"])
    assert {"callbacks", "optimizer_states", "lr_schedulers"}.isdisjoint(saved)


@pytest.mark.parametrize("hook", ["setup", "on_fit_start", "on_train_start"])
def test_a_new_run_that_fails_before_training_saves_nothing(hook: str, interrupted: Any) -> None:
    """Its weights may not have been prepared for the first round, which a resumed run does not do."""
    assert interrupted(Acts(hook, round_idx=0)) is None


def test_what_another_plugin_writes_of_a_new_run_that_failed_before_training_is_the_start(
    run: Run, tmp_path: Path, resumes: Any
) -> None:
    plugin = type("WritesAll", (TorchCheckpointIO,), {})()  # which does not know that there is nothing to write
    saver = OnExceptionCheckpoint(tmp_path)  # `ModelCheckpoint` writes nothing before the first step
    with pytest.raises(RuntimeError):
        run(Falling, Acts("on_fit_start", round_idx=0), saver, trainer={"plugins": plugin})
    resumes(ls.latest_checkpoint(tmp_path))


def test_a_resumed_run_with_nothing_left_to_train_shows_what_was_logged_last(run: Run, tmp_path: Path) -> None:
    whole = run(Falling, ModelCheckpoint(tmp_path))
    resumed = run(Falling, ckpt_path=ls.latest_checkpoint(tmp_path))
    assert resumed.logged == whole.logged
    assert same_state(resumed.tensors, whole.tensors)
    assert outcome(resumed) == outcome(whole)


# Within a round


def press_again_and_again() -> None:
    """Every few milliseconds, until Lightning, which is shutting down, ignores it."""

    def pressing() -> None:
        end = time.monotonic() + 5.0
        while signal.getsignal(signal.SIGINT) is not signal.SIG_IGN and time.monotonic() < end:
            press()
            time.sleep(0.002)

    threading.Thread(target=pressing, name="pressing", daemon=True).start()


class Pressed(LitSmall):
    """Has its training interrupted at one step, whose number is not the server's to know."""

    interrupt: Callable[[], None] | None = None
    steps = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        type(self).steps += 1
        loss = super().training_step(batch, batch_idx)
        if type(self).steps >= 40 and self.interrupt is not None:
            type(self).interrupt, act = None, type(self).interrupt
            act()  # type: ignore[misc]
        return loss


def forms(module: torch.nn.Module) -> list[Any]:
    parts = [(name, type(part)) for name, part in module.named_modules()]
    return [*parts, *((name, tensor.shape, tensor.requires_grad) for name, tensor in module.named_parameters())]


@pytest.mark.sampled(1)
@pytest.mark.filterwarnings("ignore::lightning_spectral.SpectralWarning")  # nothing need be learned
@pytest.mark.parametrize("interrupt", [press, press_again_and_again])
@pytest.mark.parametrize(
    "algorithm",
    [ls.FedAvg(), MIXED, ls.Zampling(4, degree=3), ls.LoRA({1: 0.5, 3: 0.5})],
    ids=["FedAvg", "spectral", "Zampling", "LoRA"],
)
def test_ctrl_c_in_a_client_leaves_the_server_and_saves_the_last_whole_round(
    algorithm: Any, interrupt: Callable[[], None], data: Any, fit: Fit, tmp_path: Path
) -> None:
    Pressed.interrupt, Pressed.steps = staticmethod(interrupt), 0  # type: ignore[assignment]
    module = seeded(Pressed)
    before = forms(module)
    options = {"algorithm": algorithm, "max_epochs": 4}
    saving: dict[str, Any] = {"callbacks": [OnExceptionCheckpoint(tmp_path)], "trainer": {"enable_checkpointing": True}}
    ended = ExitStack()
    ended.callback(signal.signal, signal.SIGINT, signal.SIG_IGN)  # it may still be pressed, if nothing was shut down
    with pytest.raises((SystemExit, KeyboardInterrupt)), ended:
        fit(module, data, **saving, **options)
    for thread in threading.enumerate():
        if thread.name == "pressing":  # it must not outlive what ignores it
            thread.join()
    assert forms(module) == before
    path = ls.latest_checkpoint(tmp_path)
    if path is None and interrupt is press_again_and_again:
        return  # it was pressed before Lightning could begin to shut down
    saved = torch.load(path, weights_only=True)
    rounds = saved["global_step"]
    assert 1 <= rounds <= 3
    assert same_state(saved["state_dict"], fit(seeded(Pressed), data, **{**options, "max_epochs": rounds}).state)
    resumed, whole = (fit(seeded(Pressed), data, ckpt_path=ckpt, **options) for ckpt in (path, None))
    assert same_state(resumed.tensors, whole.tensors)


class Pressing(torch.optim.SGD):
    """Is interrupted in its second step, before it has changed any weight."""

    calls = 0

    def step(self, closure: Any = None) -> Any:
        self.calls += 1
        if self.calls == 2:
            press()
        return super().step(closure)


def test_ctrl_c_in_the_servers_step_takes_effect_after_it(data: Any, fit: Fit, tmp_path: Path) -> None:
    saving: dict[str, Any] = {"callbacks": [OnExceptionCheckpoint(tmp_path)], "trainer": {"enable_checkpointing": True}}
    with pytest.raises((SystemExit, KeyboardInterrupt)):
        fit(seeded(LitMLP), data, max_epochs=4, server_optimizer=partial(Pressing, lr=1.0), **saving)
    saved = torch.load(ls.latest_checkpoint(tmp_path), weights_only=True)
    assert saved["global_step"] == 2
    assert same_state(saved["state_dict"], fit(seeded(LitMLP), data, max_epochs=2).state)


# After the server's step, but before the end of the epoch: resuming validates the round

AFTER_THE_STEP = ["train_batch_end", "train_epoch_end"]
AFTER_THE_STEP += [f"validation_{when}" for when in ("start", "batch_end", "epoch_end", "end")]


@pytest.mark.sampled(1)
@needs_2_5_3
@pytest.mark.parametrize("hook", AFTER_THE_STEP)
def test_a_round_interrupted_after_the_servers_step_is_validated_when_resumed(
    hook: str, interrupted: Any, resumes: Any
) -> None:
    """Also if early stopping has counted the round, but the schedule has not; of errors, see `test_round_as_saved`."""
    resumes(interrupted(Acts(f"on_{hook}", press), after_validation=True), after_validation=True)


@pytest.mark.sampled(1)
@needs_2_5_3
@pytest.mark.parametrize("limits", [{"max_epochs": 2}, {"max_epochs": -1, "trainer": {"max_steps": 2}}])
def test_an_interrupted_last_round_is_validated_when_resumed(limits: Any, interrupted: Any, resumes: Any) -> None:
    resumes(interrupted(Acts("on_validation_start"), **limits), **limits)


@needs_2_5_3
def test_a_hook_of_the_users_that_fails_after_validation_costs_no_round(interrupted: Any, resumes: Any) -> None:
    resumes(interrupted(make=FailsInHook, after_validation=True, max_epochs=4), FailsInHook, after_validation=True)


class FailingLogger(DummyLogger):
    """Fails in round 1, before any callback has heard of the round."""

    def __init__(self, error: type[BaseException]) -> None:
        super().__init__()
        self.error = error

    def log_metrics(self, metrics: Any, step: Any = None) -> None:
        if metrics.get("fl/round") == 1:
            raise self.error("the disk is full")


@pytest.mark.sampled(1)
@needs_2_5_3
@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_a_logger_that_fails_costs_no_round(error: type[BaseException], interrupted: Any, resumes: Any) -> None:
    resumes(interrupted(trainer={"logger": FailingLogger(error)}))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "settings", "when"),
    [
        (Falling, {}, {}),
        (Falling, {"check_val_every_n_epoch": 2}, {}),
        (Falling, {"check_val_every_n_epoch": 2}, {"every_n_train_steps": 1}),
        (Falling, {"check_val_every_n_epoch": 2}, {"save_on_train_epoch_end": False}),
        (variant(Falling, monitor="train_loss", strict=True), {}, {"every_n_train_steps": 1}),
    ],
    ids=["every round", "after epochs", "after steps", "after validation", "on training"],
)
def test_a_plateau_schedule_misses_nothing(
    make: type[LitMLP], settings: Any, when: Any, run: Run, resumes: Any, tmp_path: Path
) -> None:
    """Some rounds are without clients: schedules and early stopping then use an earlier round's metrics, or wait."""
    more: dict[str, Any] = {"dropout": ls.ClientDropout(0.6), "clients_per_round": 2, "max_epochs": 6}
    more |= {"trainer": settings, "after_validation": bool(settings)}
    whole = run(make, ModelCheckpoint(tmp_path, "{step}", save_top_k=-1, **when), **more)
    assert not all("fl/loss" in row for row in whole.rows)
    assert len({row["fl/lr"] for row in whole.rows}) > 2
    for ckpt in sorted(tmp_path.iterdir()):
        resumes(ckpt, make, **more)


@pytest.mark.slow
def test_max_steps_counts_rounds_of_a_resumed_run_too(run: Run, resumes: Any, tmp_path: Path) -> None:
    limits: dict[str, Any] = {"max_epochs": 3, "trainer": {"max_steps": 9}}
    run(Falling, ModelCheckpoint(tmp_path, "{step}", save_top_k=-1), **limits)
    for ckpt in sorted(tmp_path.iterdir()):
        resumes(ckpt, **limits)
