"""Turns of a number of steps: which batches they have, against turns of whole passes, and what counts them."""

from __future__ import annotations

from itertools import chain, islice
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_line import remote, toy_line
from federation import Fit, check_resumes, same_state, seeded
from torch import Tensor
from toy_models import LitMLP

import lightning_spectral as ls
from lightning_spectral.functional.privacy import epsilon
from lightning_spectral.participation.cohorts import ClientDirectory
from lightning_spectral.protocol.per_client import assign
from lightning_spectral.protocol.records import Download, WorkUnit

STEPS = [1, 2, 3, 4, 5, 7] * 2  # of twelve clients with ten examples each, in batches of 4, 4 and 2
PROFILE = ls.simulation.DeviceProfile(float("inf"), float("inf"), 1.0)
SYSTEMS = {
    "FedAvg": {},
    "Ditto": {"algorithm": ls.Ditto()},
    "sharding": {"algorithm": ls.SpectralSharding(keep_ratio=0.5)},
    "personal": {"filters": [ls.Personal(["net.5.*"], epochs=1)]},
}


class LitSeeing(LitMLP):
    """Remembers its batches, and what it was told of its place, which a client's turn would put back."""

    SEEN: list[tuple[Tensor, int, int]] = []  # noqa: RUF012

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.SEEN.append((batch[0].clone(), batch_idx, self.trainer.global_step))
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("name", SYSTEMS)
def test_steps_of_whole_passes_are_these_passes_bit_for_bit(name: str, fit: Fit, data: Any) -> None:
    options: dict[str, Any] = {"max_epochs": 2, **SYSTEMS[name]}
    by_steps = fit(seeded(LitMLP), data, local_steps=6, **options)
    by_epochs = fit(seeded(LitMLP), data, local_epochs=2, **options)
    assert same_state(by_steps.tensors, by_epochs.tensors)
    assert by_steps.ledger.rows == by_epochs.ledger.rows


def test_a_client_takes_the_first_batches_of_its_passes(fit: Fit, data: Any) -> None:
    LitSeeing.SEEN.clear()
    fitted = fit(seeded(LitSeeing, dropout=0.0), data, clients_per_round=12, max_epochs=2, local_steps=STEPS)
    seen = iter(LitSeeing.SEEN)
    for row in fitted.ledger.rows:
        number = STEPS[row.client_id]
        batches = data.client_data(Download(WorkUnit(row.client_id), 1.0, {}, row.round_idx))
        expected = islice(chain.from_iterable(map(batches.epoch, range(3))), number)
        for step, ((batch, _), (own, batch_idx, global_step)) in enumerate(zip(expected, seen, strict=False)):
            assert torch.equal(own, batch[0])
            assert (batch_idx, global_step) == (step % 3, row.round_idx * number + step)
    assert next(seen, None) is None


@pytest.mark.parametrize("steps", [5, STEPS, {2: 0.5, 5: 0.5}], ids=str)
def test_runs_resume(steps: Any, fit: Fit, data: Any, tmp_path: Path) -> None:
    check_resumes(fit, LitMLP, data, tmp_path, local_steps=steps)
    with pytest.raises(ValueError, match=r"local_steps: .* in the checkpoint, None now"):
        fit(seeded(LitMLP), data, max_epochs=4, ckpt_path=tmp_path / "2.ckpt")


def test_clients_elsewhere_take_the_same_steps(fit: Fit, data: Any) -> None:
    options: dict[str, Any] = {"max_epochs": 2, "clients_per_round": 12, "local_steps": STEPS}
    elsewhere = fit(seeded(LitMLP), remote(toy_line(LitMLP)), **options)
    assert same_state(elsewhere.tensors, fit(seeded(LitMLP), data, **options).tensors)


def test_a_directory_counts_passes_in_part() -> None:
    sizes = torch.tensor([10, 3, 0])
    clients = ClientDirectory(sizes, assign(1.0, 3, 0, ""), batch_sizes=assign(4, 3, 0, ""))
    assert [clients.passes_of(0, 1, steps) for steps in (1, 2, 3, 5)] == [0.4, 0.8, 1.0, 1.8]
    assert [clients.passes_of(1, 1, 5), clients.passes_of(0, 3)] == [5.0, 3]
    assert ClientDirectory(sizes, clients.capacities).passes_of(0, 1, 7) == 1  # elsewhere


@pytest.mark.parametrize(("name", "passes"), [("FedAvg", 1.8), ("Ditto", 3.6), ("personal", 2.8)])
def test_the_clock_counts_them(name: str, passes: float, fit: Fit, data: Any) -> None:
    clock = ls.VirtualClock(PROFILE, macs=lambda keep_ratio: 1.0)
    fitted = fit(seeded(LitMLP), data, local_steps=5, clock=clock, **SYSTEMS[name])
    assert fitted.history.rows[0]["fl/virtual_seconds"] == pytest.approx(3 * 10 * passes)


def test_privacy_of_examples_counts_them(fit: Fit, data: Any) -> None:
    private = ls.ExamplePrivacy(clip=0.5, noise_multiplier=2.0, delta=1e-3, noise_seed=1)
    fitted = fit(seeded(LitMLP, dropout=0.0), data, clients_per_round=12, local_steps=5, filters=[private])
    assert fitted.rows[0]["fl/example_epsilon"] == pytest.approx(epsilon(0.4, 2.0, 5, 1e-3))
    with pytest.raises(ls.ClientError, match="does not go with training in phases"):
        fit(seeded(LitMLP, dropout=0.0), data, local_steps=5, algorithm=ls.Ditto(), filters=[private])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"local_epochs": 2, "local_steps": 5}, "`local_epochs=2` and `local_steps=5` both say how long clients train"),
        ({"local_steps": 0}, r"`local_steps` must be at least 1, got 0; local_epochs=0 trains nothing"),
        ({"local_steps": {5: 0.3}}, "Shares of `local_steps` must sum to 1"),
        ({"local_steps": [5, 6]}, "`local_steps` lists 2 values for 12 clients"),
    ],
)
def test_what_says_no_length_is_refused(options: Any, message: str, fit: Fit, data: Any) -> None:
    with pytest.raises(ValueError, match=message):
        fit(seeded(LitMLP), data, **options)
