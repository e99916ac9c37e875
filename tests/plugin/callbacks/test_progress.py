import io
import re
from collections.abc import Callable
from contextlib import redirect_stdout
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
from federation import Fit, Fitted

import lightning_spectral as ls
from lightning_spectral.plugin.host import Share
from lightning_spectral.protocol.records import WorkUnit

FitOnto = Callable[..., Fitted]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    monkeypatch.setenv("COLUMNS", "300")
    return Terminal()


@pytest.fixture
def fit_onto(fit: Fit) -> FitOnto:
    """Fits of three rounds with a bar on the given screen."""

    def fit_onto(
        screen: io.StringIO, lit: Any, data: Any, callbacks: Any = (), max_steps: int = -1, **more: Any
    ) -> Any:
        shown = {"enable_progress_bar": True, "max_steps": max_steps}
        with redirect_stdout(screen):
            settings = {"max_epochs": 3, **more}
            return fit(lit, data, callbacks=[ls.RoundProgressBar(), *callbacks], trainer=shown, **settings)

    return fit_onto


def states(shown: str) -> list[str]:
    return [state for state in shown.split("\r") if state.strip()]


def test_one_bar_counts_rounds_and_clients(lit: Any, data: Any, fit_onto: FitOnto, terminal: Terminal) -> None:
    fit_onto(terminal, lit, data)
    shown = terminal.getvalue()
    assert shown.count("\n") == 1  # one line, rewritten
    starts = [re.match(r"(Rounds|Round [123]/3(, validating)?): +\d+%", state) for state in states(shown)]
    assert all(starts), [state for state, start in zip(states(shown), starts, strict=True) if not start]
    percents = [int(re.search(r"(\d+)%", state)[1]) for state in states(shown)]  # type: ignore[index]
    assert percents == sorted(percents)
    assert percents[-1] == 100
    # four clients in each of three rounds
    assert {round(100 * clients / 12) for clients in range(1, 13)} <= set(percents)


def test_the_bar_shows_loss_metrics_bytes_and_seconds(
    lit: Any, data: Any, fit_onto: FitOnto, terminal: Terminal
) -> None:
    history = fit_onto(terminal, lit, data).history
    last = states(terminal.getvalue())[-1]
    shown = dict(pair.split("=") for pair in re.search(r"<00:00, (.*)\]", last)[1].split(", "))  # type: ignore[index]
    row = history.rows[-1]
    assert shown["clients"] == "4/4"
    assert float(shown["loss"]) == pytest.approx(row["fl/loss"], rel=0.006)  # three digits
    assert float(shown["val_acc"]) == pytest.approx(row["val_acc"], rel=0.006)
    assert shown["down"] == f"{row['fl/bytes_down'] / 1e6:.3g} MB"
    assert shown["up"] == f"{row['fl/bytes_up'] / 1e6:.3g} MB"
    assert float(shown["s/round"]) > 0


@pytest.mark.parametrize(("num_processes", "name"), [(1, "clients"), (2, "turns")])
def test_the_count_keeps_going_and_comes_first(num_processes: int, name: str, terminal: Terminal) -> None:
    class Bar(ls.RoundProgressBar):
        is_enabled = True

        def get_metrics(self, *args: Any) -> Any:
            return dict(self._progress)

    bar: Any = Bar()
    shown: list[dict[str, Any]] = []
    bar._progress = {"loss": 0.5}
    bar.train_progress_bar = SimpleNamespace(set_postfix=shown.append)
    trainer: Any = SimpleNamespace(world_size=num_processes, current_epoch=0)
    skipped: Any = SimpleNamespace(upload=None)
    share = Share(0, [list(map(WorkUnit, range(3)))] * num_processes)
    bar.on_train_batch_start(trainer, pl.LightningModule(), share, 0)
    for _ in range(3):
        bar.on_client_end(trainer, pl.LightningModule(), skipped)
    bar.on_train_batch_end(trainer, pl.LightningModule(), None, share, 0)
    assert [list(one.items()) for one in shown] == [[(name, f"{done}/3"), ("loss", 0.5)] for done in (1, 2, 3)]


@pytest.mark.filterwarnings("ignore::lightning_spectral.SpectralWarning")
def test_a_round_without_survivors_shows_no_loss(lit: Any, data: Any, fit_onto: FitOnto, terminal: Terminal) -> None:
    lit.training_step = lambda batch, batch_idx: [][0]
    faults = ls.server.Faults(on_error=ls.server.LeaveOut(1.0))
    fit_onto(terminal, lit, data, faults=faults)
    assert "clients=4/4" in terminal.getvalue()
    assert "loss" not in terminal.getvalue()


def test_a_resumed_run_continues_where_it_stopped(
    lit: Any, data: Any, fit_onto: FitOnto, terminal: Terminal, tmp_path: Any
) -> None:
    fit_onto(terminal, lit, data, max_epochs=2).trainer.save_checkpoint(tmp_path / "two.ckpt")
    fit_onto(later := Terminal(), lit, data, max_epochs=4, ckpt_path=tmp_path / "two.ckpt")
    assert states(later.getvalue())[0].startswith("Rounds:  50%")


def test_an_endless_run_has_a_bar_without_a_total(lit: Any, data: Any, fit_onto: FitOnto, terminal: Terminal) -> None:
    class Stop(pl.Callback):
        def on_validation_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
            trainer.should_stop = trainer.current_epoch == 1

    fit_onto(terminal, lit, data, max_epochs=-1, max_steps=2)
    assert "Round 2/2: 100%" in terminal.getvalue()
    endless = Terminal()
    fit_onto(endless, lit, data, max_epochs=-1, callbacks=[Stop()])
    assert "Round 2: " in endless.getvalue()
    assert "%" not in endless.getvalue()


def test_validation_alone_has_lightnings_bar(lit: Any, data: Any, quiet: Any, terminal: Terminal) -> None:
    with redirect_stdout(terminal):
        trainer = pl.Trainer(callbacks=[ls.RoundProgressBar()], **{**quiet, "enable_progress_bar": True})
        trainer.validate(ls.FederatedModule(lit, clients_per_round=4), data, verbose=False)
    assert "Validation DataLoader 0: 100%" in terminal.getvalue()


def test_no_bar_is_drawn_into_a_file(lit: Any, data: Any, fit_onto: FitOnto) -> None:
    log_file = io.StringIO()
    fit_onto(log_file, lit, data)
    assert log_file.getvalue() == ""
