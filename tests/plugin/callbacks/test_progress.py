import io
import re
from contextlib import redirect_stdout
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest

import lightning_spectral as ls


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    monkeypatch.setenv("COLUMNS", "300")
    return Terminal()


def fit(
    lit: Any,
    data: Any,
    quiet: dict[str, Any],
    stdout: io.StringIO,
    *,
    rounds: int = 3,
    ckpt_path: Any = None,
    callbacks: Any = (),
    **options: Any,
) -> Any:
    settings = {**quiet, "enable_progress_bar": True, "max_epochs": rounds, "num_sanity_val_steps": 0, **options}
    bar, history = ls.RoundProgressBar(), ls.RoundHistory()
    with redirect_stdout(stdout):
        trainer = pl.Trainer(callbacks=[bar, history, *callbacks], **settings)
        trainer.fit(ls.FederatedModule(lit, clients_per_round=4), data, ckpt_path=ckpt_path, weights_only=False)
    return trainer, history


def states(shown: str) -> list[str]:
    return [state for state in shown.split("\r") if state.strip()]


def test_one_bar_counts_rounds_and_clients(lit: Any, data: Any, quiet: Any, terminal: Terminal) -> None:
    fit(lit, data, quiet, terminal)
    shown = terminal.getvalue()
    assert shown.count("\n") == 1  # one line, rewritten
    starts = [re.match(r"(Rounds|Round [123]/3(, validating)?): +\d+%", state) for state in states(shown)]
    assert all(starts), [state for state, start in zip(states(shown), starts, strict=True) if not start]
    percents = [int(re.search(r"(\d+)%", state)[1]) for state in states(shown)]  # type: ignore[index]
    assert percents == sorted(percents)
    assert percents[-1] == 100
    # four clients in each of three rounds
    assert {round(100 * clients / 12) for clients in range(1, 13)} <= set(percents)


def test_loss_accuracy_bytes_and_seconds_stand_beside_it(lit: Any, data: Any, quiet: Any, terminal: Terminal) -> None:
    _, history = fit(lit, data, quiet, terminal)
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
def test_what_is_counted_goes_on_and_stands_first(num_processes: int, name: str, terminal: Terminal) -> None:
    class Bar(ls.RoundProgressBar):
        is_enabled = True

        def get_metrics(self, *args: Any) -> Any:
            return dict(self._progress)

    bar: Any = Bar()
    shown: list[dict[str, Any]] = []
    bar._progress = {"loss": 0.5}
    bar.train_progress_bar = SimpleNamespace(set_postfix=shown.append)
    trainer = SimpleNamespace(world_size=num_processes, num_training_batches=3, current_epoch=0)
    for batch_idx in range(3):
        bar.on_train_batch_end(trainer, pl.LightningModule(), None, None, batch_idx)
    assert [list(one.items()) for one in shown] == [[(name, f"{done}/3"), ("loss", 0.5)] for done in (1, 2, 3)]


def test_a_resumed_run_goes_on_where_it_was(lit: Any, data: Any, quiet: Any, terminal: Terminal, tmp_path: Any) -> None:
    trainer, _ = fit(lit, data, quiet, terminal, rounds=2)
    trainer.save_checkpoint(tmp_path / "two.ckpt")
    fit(lit, data, quiet, later := Terminal(), rounds=4, ckpt_path=str(tmp_path / "two.ckpt"))
    assert states(later.getvalue())[0].startswith("Rounds:  50%")


def test_a_run_without_an_end_has_a_bar_without_a_total(lit: Any, data: Any, quiet: Any, terminal: Terminal) -> None:
    class Stop(pl.Callback):
        def on_validation_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
            trainer.should_stop = trainer.current_epoch == 1

    fit(lit, data, quiet, terminal, rounds=-1, max_steps=2)
    assert "Round 2/2: 100%" in terminal.getvalue()
    endless = Terminal()
    fit(lit, data, quiet, endless, rounds=-1, callbacks=[Stop()])
    assert "Round 2: " in endless.getvalue()
    assert "%" not in endless.getvalue()


def test_validation_alone_has_lightnings_bar(lit: Any, data: Any, quiet: Any, terminal: Terminal) -> None:
    with redirect_stdout(terminal):
        trainer = pl.Trainer(callbacks=[ls.RoundProgressBar()], **{**quiet, "enable_progress_bar": True})
        trainer.validate(ls.FederatedModule(lit, clients_per_round=4), data, verbose=False)
    assert "Validation DataLoader 0: 100%" in terminal.getvalue()


def test_nothing_is_drawn_where_nobody_looks(lit: Any, data: Any, quiet: Any) -> None:
    log_file = io.StringIO()
    fit(lit, data, quiet, log_file)
    assert log_file.getvalue() == ""
