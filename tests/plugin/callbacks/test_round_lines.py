"""Lines about a run without a bar: what they say, how often, and when there are none."""

import logging
import math
import re
from collections.abc import Iterator
from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest
from federation import Fit
from lightning.pytorch.callbacks import TQDMProgressBar
from torch.utils.data import TensorDataset

import lightning_spectral as ls
from lightning_spectral.plugin.callbacks import RoundLines

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


@pytest.fixture
def fit(fit: Fit) -> Fit:
    return partial(fit, max_epochs=3)


def every_round() -> RoundLines:
    return RoundLines(every_n_seconds=0)


class Clock:
    """A clock that advances by four seconds at the end of each round."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr("lightning_spectral.plugin.callbacks.progress.time.perf_counter", lambda: self.now)


class Ticks(ls.RoundCallback):
    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def on_round_end(self, *args: Any) -> None:
        self.clock.now += 4


def test_a_line_has_loss_metrics_bytes_and_time(lit: Any, data: Any, fit: Fit, lines: list[str]) -> None:
    rows = fit(lit, data, callbacks=[every_round()]).rows
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


def test_metrics_of_an_older_validation_are_not_repeated(lit: Any, data: Any, fit: Fit, lines: list[str]) -> None:
    fit(lit, data, callbacks=[every_round()], trainer={"check_val_every_n_epoch": 2})
    assert ["val_acc" in line for line in lines] == [False, True, False]


def test_several_models_share_a_line(lit_mlp: Any, data: Any, quiet: Any, lines: list[str]) -> None:
    models = {name: ls.FederatedModule(lit_mlp()) for name in ("words", "images")}
    model = ls.MultiModelModule(models, participation=ls.Uniform(active=12))
    datas = {name: ls.FederatedDataModule(data.train, ls.IIDPartitioner(12), batch_size=4) for name in models}
    pl.Trainer(max_epochs=1, callbacks=[every_round()], **quiet).fit(model, ls.MultiModelDataModule(datas))
    (line,) = lines
    assert re.match(r"Round 1/1: words loss [\d.]+, images loss [\d.]+, [\d.]+ MB so far", line)


def test_a_resumed_run_goes_on_counting_bytes(lit: Any, data: Any, fit: Fit, lines: list[str], tmp_path: Any) -> None:
    fit(lit, data, max_epochs=2, callbacks=[every_round()]).trainer.save_checkpoint(tmp_path / "two.ckpt")
    fit(lit, data, max_epochs=3, callbacks=[every_round()], ckpt_path=tmp_path / "two.ckpt")
    *_, two, three = (float(match["bytes"]) for line in lines if (match := LINE.fullmatch(line)))
    assert three == pytest.approx(1.5 * two, rel=0.01)


def test_without_a_limit_no_time_is_left_to_tell(lit: Any, toy: TensorDataset, fit: Fit, lines: list[str]) -> None:
    class Stop(pl.Callback):
        def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
            trainer.should_stop = True

    data = ls.FederatedDataModule(toy, ls.IIDPartitioner(12), batch_size=4)
    fit(lit, data, max_epochs=-1, callbacks=[every_round(), Stop()])
    (line,) = lines
    assert line.startswith("Round 1: loss ")
    assert line.endswith(" s a round")


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
    options = {"enable_progress_bar": True}
    fit(lit, data, max_epochs=2, callbacks=[*callbacks, every_round()], trainer=options)
    assert len(lines) == expected


def test_lines_can_be_switched_off(lit: Any, data: Any, fit: Fit, lines: list[str], monkeypatch: Any) -> None:
    clock = Clock(monkeypatch)
    fit(lit, data, callbacks=[Ticks(clock), RoundLines(math.inf)])
    logging.getLogger("lightning.pytorch.rounds").setLevel(logging.WARNING)
    try:
        fit(lit, data, callbacks=[Ticks(clock), every_round()])
    finally:
        logging.getLogger("lightning.pytorch.rounds").setLevel(logging.NOTSET)
    assert lines == []


def test_other_processes_are_silent(lit: Any, data: Any, fit: Fit, lines: list[str], monkeypatch: Any) -> None:
    monkeypatch.setattr("lightning.pytorch.utilities.rank_zero.rank_zero_only.rank", 1)
    fit(lit, data, callbacks=[every_round()])
    assert lines == []
