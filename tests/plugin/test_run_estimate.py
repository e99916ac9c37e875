import copy
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

import lightning_spectral as ls


def federate(module: Any, **options: Any) -> ls.FederatedModule:
    return ls.FederatedModule(
        module, **{"algorithm": ls.SpectralSharding(keep_ratio=0.5), **options}, clients_per_round=4
    )


def test_the_run_is_the_rounds_and_their_validations() -> None:
    seconds = {"plan": 0.5, "refresh": 1.0, "train": 2.0, "other": 0.25, "validate": 8.0}
    estimate = ls.plugin.RunEstimate(seconds, num_rounds=10, num_validations=3)
    assert estimate.seconds_per_round == 0.5 + 1.0 + 2.0 + 0.25
    assert estimate.total_seconds == 10 * 3.75 + 3 * 8.0
    assert "1:02 for 10 rounds and 3 validations" in str(estimate).replace("0:01:02", "1:02")
    assert "validate       8.000 s  68.1%" in str(estimate)
    assert "memory" not in str(estimate)


def test_an_endless_run_takes_for_ever() -> None:
    estimate = ls.plugin.RunEstimate(
        {"train": 2.0}, num_rounds=None, num_validations=0, peak_memory_bytes=3_000_000_000
    )
    assert estimate.total_seconds == float("inf")
    assert str(estimate).splitlines()[1:] == ["2.0 s per round, without an end", "3.00 GB of memory at most"]


def test_seconds_are_those_of_the_stages(lit_mlp: Any, data: Any, quiet: Any) -> None:
    class Slow(lit_mlp):  # type: ignore[misc]
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            time.sleep(0.01)
            return super().training_step(batch, batch_idx)

        def on_validation_epoch_end(self) -> None:
            time.sleep(0.05)

    trainer = pl.Trainer(max_epochs=7, check_val_every_n_epoch=2, **quiet)
    start = time.perf_counter()
    estimate = ls.plugin.estimate(trainer, federate(Slow()), data)
    wall = time.perf_counter() - start
    assert estimate.seconds["train"] >= 4 * 3 * 0.01  # four clients of three batches
    assert estimate.seconds["validate"] >= 0.05
    assert all(seconds > 0 for seconds in estimate.seconds.values()), estimate.seconds
    assert sum(estimate.seconds.values()) < wall  # nothing is counted twice
    assert (estimate.num_rounds, estimate.num_validations) == (7, 3)
    assert estimate.peak_memory_bytes is not None
    assert estimate.peak_memory_bytes > 1e6


def test_an_estimate_leaves_no_trace(
    lit: Any,
    data: Any,
    quiet: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    twin = copy.deepcopy(lit)
    callback = ls.RoundHistory()
    trainer = pl.Trainer(max_epochs=2, callbacks=[callback], **quiet)
    model = federate(lit)
    capfd.readouterr()
    state = torch.get_rng_state()
    estimate = ls.plugin.estimate(trainer, model, data)
    said = capfd.readouterr()
    assert said.out == f"{estimate}\n"
    assert said.err == ""
    assert list(tmp_path.iterdir()) == []
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(a, b) for a, b in zip(lit.state_dict().values(), twin.state_dict().values(), strict=True))
    assert callback.rows == []
    assert model._trainer is None
    assert data.trainer is None
    trainer.fit(model, data)  # as if nothing had happened
    pl.Trainer(max_epochs=2, **quiet).fit(federate(twin), data)
    assert all(torch.equal(a, b) for a, b in zip(lit.parameters(), twin.parameters(), strict=True))
    ls.plugin.estimate(trainer, model, data)  # after a fit the model still has its Trainer
    assert model.trainer is trainer
    assert model.module.trainer is trainer


def test_without_validation_none_is_estimated(lit: Any, data: Any, quiet: Any) -> None:
    data.val = None
    estimate = ls.plugin.estimate(pl.Trainer(max_epochs=5, **quiet), federate(lit), data)
    assert estimate.num_validations == 0
    assert estimate.seconds["validate"] == 0.0
    assert estimate.total_seconds == 5 * estimate.seconds_per_round


def test_the_limits_of_the_trainer_hold(lit_mlp: Any, data: Any, quiet: Any) -> None:
    clients: list[int] = []

    class Lit(lit_mlp):  # type: ignore[misc]
        def on_train_epoch_end(self) -> None:
            clients.append(0)

    trainer = pl.Trainer(max_epochs=5, max_steps=3, limit_train_batches=2, **quiet)
    estimate = ls.plugin.estimate(trainer, federate(Lit()), data)
    assert len(clients) == 2
    assert estimate.num_rounds == 3


def test_what_cannot_be_estimated_is_refused(lit: Any, data: Any, quiet: Any) -> None:
    with pytest.raises(TypeError, match="`model` must be an instance of FederatedModule, got"):
        ls.plugin.estimate(pl.Trainer(**quiet), lit, data)
    several = pl.Trainer(strategy="ddp", devices=2, **quiet)
    with pytest.raises(ValueError, match="one process, got a Trainer of 2; give it one with devices=1"):
        ls.plugin.estimate(several, federate(lit), data)
