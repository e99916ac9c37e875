"""The progress of a run: a bar, and lines where no bar is drawn: what they say, how often, and when there are none."""

import io
import logging
import math
import re
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from functools import partial
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
from federation import Fit, Fitted
from lightning.pytorch.callbacks import ModelSummary, TQDMProgressBar
from observed_runs import acting
from torch.utils.data import TensorDataset

import lightning_spectral as ls
from lightning_spectral.plugin.callbacks import RoundLines
from lightning_spectral.plugin.user_hooks import Share
from lightning_spectral.protocol.records import WorkUnit

FitOnto = Callable[..., Fitted]


@pytest.fixture
def fit(fit: Fit) -> Fit:
    return partial(fit, max_epochs=3)


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
            return fit(lit, data, callbacks=[ls.RoundProgressBar(), *callbacks], trainer=shown, **more)

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


def test_the_bar_shows_loss_metrics_bytes_and_seconds(lit: Any, data: Any, fit_onto: Any, terminal: Terminal) -> None:
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
    fit_onto(terminal, lit, data, faults=ls.Faults(on_error=ls.LeaveOut(1.0)))
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


LINE = re.compile(
    r"Round (?P<round>\d+)(?P<total>/\d+)?: (?P<values>.*), (?P<bytes>[\d.]+) MB so far, [\d.e-]+ s a round"
    r"(, [\d.]+ s left)?"
)


@pytest.fixture
def lines() -> Iterator[list[str]]:
    """The messages logged about rounds, at Lightning's default level."""
    found: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("lightning.pytorch.rounds")
    logger.addHandler(handler)
    yield found
    logger.removeHandler(handler)


class Clock:
    """A clock that stands still."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr("lightning_spectral.plugin.callbacks.progress.time.perf_counter", lambda: self.now)


class Ticks(ls.RoundCallback):
    """Advances a clock at the end of each round."""

    def __init__(self, clock: Clock, seconds: float = 4.0) -> None:
        self.clock, self.seconds = clock, seconds

    def on_round_end(self, *args: Any) -> None:
        self.clock.now += self.seconds


def test_a_line_has_loss_metrics_bytes_and_time(lit: Any, data: Any, fit: Fit, lines: list[str]) -> None:
    rows = fit(lit, data, callbacks=[RoundLines(0)]).rows
    found = [LINE.fullmatch(line) for line in lines]
    assert all(found), lines
    assert [match["round"] + match["total"] for match in found if match] == ["1/3", "2/3", "3/3"]
    sent = 0.0
    for match, row in zip(found, rows, strict=True):
        assert match is not None
        assert match["values"] == ", ".join(
            f"{name} {value:.3g}"
            for name, value in (("loss", row["fl/loss"]), ("val_loss", row["val_loss"]), ("val_acc", row["val_acc"]))
        )
        sent += row["fl/bytes_down"] + row["fl/bytes_up"]
        assert match["bytes"] == f"{sent / 1e6:.3g}"
    assert lines[-1].endswith(", 0.0 s left")


def test_a_short_run_is_silent_and_a_longer_one_has_a_line_in_ten_seconds(
    lit: Any, data: Any, fit: Fit, lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fit(lit, data, max_epochs=2, callbacks=[Ticks(Clock(monkeypatch))])
    assert lines == []
    fit(lit, data, max_epochs=7, callbacks=[Ticks(Clock(monkeypatch))])
    assert [line.split(":")[0] for line in lines] == ["Round 3/7", "Round 6/7", "Round 7/7"]
    assert lines[0].endswith(" 4 s a round, 16.0 s left")
    lines.clear()
    fit(lit, data, callbacks=[Ticks(Clock(monkeypatch), 7205)])
    assert [line.split(", ")[-1] for line in lines] == ["4:00:10 left", "2:00:05 left", "0.0 s left"]


def test_metrics_of_an_older_validation_are_not_repeated(lit: Any, data: Any, fit: Fit, lines: list[str]) -> None:
    fit(lit, data, callbacks=[RoundLines(0)], trainer={"check_val_every_n_epoch": 2})
    assert ["val_acc" in line for line in lines] == [False, True, False]


def test_several_models_share_a_line(lit_mlp: Any, data: Any, quiet: Any, lines: list[str]) -> None:
    models = {name: ls.FederatedModule(lit_mlp()) for name in ("words", "images")}
    model = ls.MultiModelModule(models, participation=ls.Uniform(active=12))
    datas = {name: ls.FederatedDataModule(data.train, ls.IIDPartitioner(12), batch_size=4) for name in models}
    pl.Trainer(max_epochs=1, callbacks=[RoundLines(0)], **quiet).fit(model, ls.MultiModelDataModule(datas))
    (line,) = lines
    assert re.match(r"Round 1/1: words loss [\d.]+, images loss [\d.]+, [\d.]+ MB so far", line)


def test_a_resumed_run_goes_on_counting_bytes(lit: Any, data: Any, fit: Fit, lines: list[str], tmp_path: Any) -> None:
    fit(lit, data, max_epochs=2, callbacks=[RoundLines(0)]).trainer.save_checkpoint(tmp_path / "two.ckpt")
    fit(lit, data, max_epochs=3, callbacks=[RoundLines(0)], ckpt_path=tmp_path / "two.ckpt")
    *_, two, three = (float(match["bytes"]) for line in lines if (match := LINE.fullmatch(line)))
    assert three == pytest.approx(1.5 * two, rel=0.01)


def test_without_a_limit_no_time_is_left_to_tell(lit: Any, toy: TensorDataset, fit: Fit, lines: list[str]) -> None:
    stop = acting(on_train_epoch_end=lambda trainer, model: setattr(trainer, "should_stop", True))
    data = ls.FederatedDataModule(toy, ls.IIDPartitioner(12), batch_size=4)
    fit(lit, data, max_epochs=-1, callbacks=[RoundLines(0), stop])
    (line,) = lines
    assert line.startswith("Round 1: loss ")
    assert line.endswith(" s a round")


def test_the_summary_shows_the_layers_of_the_users_module(lit: Any, data: Any, fit: Fit, monkeypatch: Any) -> None:
    shown = []
    keep = staticmethod(lambda table, *_, total_flops: shown.append((table, total_flops)))
    monkeypatch.setattr(ModelSummary, "summarize", keep)
    lit.example_input_array = data.train[0][0][None]
    fit(lit, data, max_epochs=1, callbacks=[ModelSummary()])
    ((table, flops),) = shown
    assert dict(table)["Name"] == [name for name, _ in lit.named_children()]
    assert flops > 0


class Bar(TQDMProgressBar):
    """Drawn wherever the tests run."""

    is_enabled = True  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("callbacks", "expected"),
    [
        ([Bar()], 0),
        ([ls.RoundProgressBar()], 2),  # pytest's output is not a terminal
        ([TQDMProgressBar(refresh_rate=0)], 2),
    ],
    ids=["a bar", "a bar without a terminal", "a bar that is switched off"],
)
def test_lines_stand_in_for_a_bar_that_is_not_drawn(
    callbacks: list[pl.Callback], expected: int, lit: Any, data: Any, fit: Fit, lines: list[str]
) -> None:
    fit(lit, data, max_epochs=2, callbacks=[*callbacks, RoundLines(0)], trainer={"enable_progress_bar": True})
    assert len(lines) == expected


def test_lines_can_be_switched_off(lit: Any, data: Any, fit: Fit, lines: list[str], monkeypatch: Any) -> None:
    clock = Clock(monkeypatch)
    fit(lit, data, callbacks=[Ticks(clock), RoundLines(math.inf)])
    logging.getLogger("lightning.pytorch.rounds").setLevel(logging.WARNING)
    try:
        fit(lit, data, callbacks=[Ticks(clock), RoundLines(0)])
    finally:
        logging.getLogger("lightning.pytorch.rounds").setLevel(logging.NOTSET)
    assert lines == []


def test_other_processes_are_silent(lit: Any, data: Any, fit: Fit, lines: list[str], monkeypatch: Any) -> None:
    monkeypatch.setattr("lightning.pytorch.utilities.rank_zero.rank_zero_only.rank", 1)
    fit(lit, data, callbacks=[RoundLines(0)])
    assert lines == []
