"""How long clients train, and on batches of which sizes: the batches themselves, and what counts them."""

from itertools import chain, islice
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_line import remote, toy_line
from federation import Fit, check_resumes, same_state, seeded
from torch import Tensor
from toy_models import LitMLP, toy_examples

import lightning_spectral as ls
from lightning_spectral.functional.privacy import epsilon
from lightning_spectral.protocol.records import Download, WorkUnit

STEPS, SIZES = [1, 2, 3, 4, 5, 7] * 2, [1, 2, 3, 4, 5, 10] * 2  # of twelve clients with ten examples each
PRIVATE = ls.ExamplePrivacy(clip=0.5, noise_multiplier=2.0, delta=1e-3, noise_seed=1)
SYSTEMS: dict[str, Any] = {
    "FedAvg": {},
    "Ditto": {"algorithm": ls.Ditto()},
    "sharding": {"algorithm": ls.SpectralSharding(keep_ratio=0.5)},
    "personal": {"filters": [ls.Personal(["net.5.*"], epochs=1)]},
}


class LitSeeing(LitMLP):
    SEEN: list[tuple[Tensor, int, int]] = []  # noqa: RUF012

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.SEEN.append((batch[0].clone(), batch_idx, self.trainer.global_step))
        return super().training_step(batch, batch_idx)


def dealt(batch_size: Any = 4, **options: Any) -> ls.FederatedDataModule:
    toy = toy_examples()
    return ls.FederatedDataModule(toy, ls.IIDPartitioner(num_clients=12), val=toy, batch_size=batch_size, **options)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", SYSTEMS)
def test_steps_of_whole_passes_are_these_passes_bit_for_bit(name: str, fit: Fit) -> None:
    by_steps, by_epochs = (
        fit(seeded(LitMLP), dealt(size), max_epochs=2, **SYSTEMS[name], **length)
        for size, length in (([4] * 12, {"local_steps": 6}), (4, {"local_epochs": 2}))
    )
    assert same_state(by_steps.tensors, by_epochs.tensors)
    assert by_steps.ledger.rows == by_epochs.ledger.rows


def test_a_client_takes_the_first_batches_of_its_passes_in_its_size(fit: Fit) -> None:
    LitSeeing.SEEN.clear()
    data, seen = dealt(SIZES, drop_last=True), iter(LitSeeing.SEEN)
    fitted = fit(seeded(LitSeeing, dropout=0.0), data, clients_per_round=12, max_epochs=2, local_steps=STEPS[::-1])
    for row in fitted.ledger.rows:
        number, size = STEPS[11 - row.client_id], SIZES[row.client_id]
        batches = data.client_data(Download(WorkUnit(row.client_id), 1.0, {}, row.round_idx))
        for step, (batch, length) in enumerate(islice(chain.from_iterable(map(batches.epoch, range(9))), number)):
            own = next(seen)
            assert torch.equal(own[0], batch[0])
            assert length == size
            assert own[1:] == (step % (10 // size), row.round_idx * number + step)
    assert next(seen, None) is None


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("steps", "sizes"), [(STEPS, {2: 0.5, 5: 0.5}), ({2: 0.5, 5: 0.5}, SIZES)], ids=str)
def test_runs_resume(steps: Any, sizes: Any, fit: Fit, tmp_path: Path) -> None:
    check_resumes(fit, LitMLP, dealt(sizes), tmp_path, local_steps=steps)
    with pytest.raises(ValueError, match=r"(?s)batch_size: .* in the checkpoint, 4 now.*local_steps: .* None now"):
        fit(seeded(LitMLP), dealt(), max_epochs=4, ckpt_path=tmp_path / "2.ckpt")


def test_clients_elsewhere_take_the_same_steps(fit: Fit) -> None:
    options: dict[str, Any] = {"max_epochs": 2, "clients_per_round": 12, "local_steps": STEPS}
    elsewhere = fit(seeded(LitMLP), remote(toy_line(LitMLP)), **options)
    assert same_state(elsewhere.tensors, fit(seeded(LitMLP), dealt(), **options).tensors)


@pytest.mark.parametrize(("name", "passes"), [("FedAvg", 1.8), ("Ditto", 3.6), ("personal", 2.8)])
def test_the_clock_counts_passes_in_part(name: str, passes: float, fit: Fit) -> None:
    clock = ls.VirtualClock(ls.simulation.DeviceProfile(float("inf"), float("inf"), 1.0), macs=lambda keep_ratio: 1.0)
    fitted = fit(seeded(LitMLP), dealt(), local_steps=5, clock=clock, **SYSTEMS[name])
    assert fitted.history.rows[0]["fl/virtual_seconds"] == pytest.approx(3 * 10 * passes)


@pytest.mark.parametrize(("size", "length"), [([5] + [1] * 11, {}), (4, {"local_steps": 5})])
def test_privacy_of_examples_counts_the_draws_of_each(size: Any, length: Any, fit: Fit) -> None:
    fitted = fit(seeded(LitMLP, dropout=0.0), dealt(size), clients_per_round=12, filters=[PRIVATE], **length)
    draws = [(0.4, 5)] if length else [(0.5, 2), (0.1, 10)]
    largest = max(epsilon(rate, 2.0, number, 1e-3) for rate, number in draws)
    assert fitted.rows[0]["fl/example_epsilon"] == pytest.approx(largest)


@pytest.mark.parametrize(
    ("options", "size", "message"),
    [
        ({"local_epochs": 2, "local_steps": 5}, 4, "`local_epochs=2` and `local_steps=5` both say how long clients"),
        ({"local_steps": 0}, 4, r"`local_steps` must be at least 1, got 0; to train nothing, write local_epochs=0"),
        ({"local_steps": [5, 6]}, 4, "`local_steps` lists 2 values for 12 clients"),
        ({}, [4, 8], "`batch_size` lists 2 values for 12 clients"),
        ({}, [0] * 12, "`batch_size` must be at least 1, got 0"),
        ({"algorithm": ls.Ditto(), "filters": [PRIVATE], "local_steps": 5}, 4, "not go with Ditto, which trains"),
    ],
)
def test_what_cannot_be_is_refused(options: Any, size: Any, message: str, fit: Fit) -> None:
    with pytest.raises((ValueError, ls.ClientError), match=message):
        fit(seeded(LitMLP, dropout=0.0), dealt(size), **options)
