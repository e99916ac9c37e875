"""Batch sizes that differ between clients: which batches they have, and what counts them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from federation import Fit, check_resumes, same_state, seeded
from toy_models import LitMLP, toy_examples

import lightning_spectral as ls
from lightning_spectral.functional.privacy import epsilon
from lightning_spectral.protocol.records import Download, WorkUnit

SIZES = [1, 2, 3, 4, 5, 10] * 2  # of twelve clients with ten examples each


def dealt(batch_size: Any, **options: Any) -> ls.FederatedDataModule:
    toy = toy_examples()
    return ls.FederatedDataModule(toy, ls.IIDPartitioner(num_clients=12), val=toy, batch_size=batch_size, **options)


def test_each_client_steps_on_batches_of_its_size(fit: Fit) -> None:
    clients = dealt(SIZES, drop_last=True)
    for client, size in enumerate(SIZES):
        batches = clients.client_data(Download(WorkUnit(client), 1.0, {})).epoch(0)
        assert [number for _, number in batches] == [size] * (10 // size)
    known = clients.client_directory(ls.FedAvg().capacities.of_clients(12, 0))
    assert [known.epoch_of(client) for client in range(6)] == [10, 10, 9, 8, 10, 10]
    assert known.passes_of(3, 1, 3) == 1.5  # of two batches of four
    steps = {row.client_id: row.num_steps for row in _outcomes(fit, clients)}
    assert steps == {client: 10 // size for client, size in enumerate(SIZES)}
    assert (clients.eval_batch_size, clients.train_dataloader().batch_size) == (256, 10)


def _outcomes(fit: Fit, clients: Any) -> Any:
    seen: list[Any] = []

    class Watch(ls.RoundCallback):
        def on_round_end(self, trainer: Any, pl_module: Any, summary: Any) -> None:
            seen.extend(summary.clients)

    fit(seeded(LitMLP), clients, clients_per_round=12, callbacks=[Watch()])
    return seen


def test_one_size_for_all_is_the_same_in_any_form(fit: Fit) -> None:
    plain, listed, shared = (fit(seeded(LitMLP), dealt(size), max_epochs=2) for size in (4, [4] * 12, {4: 1.0}))
    assert same_state(plain.tensors, listed.tensors)
    assert same_state(plain.tensors, shared.tensors)


def test_shares_are_exact_and_drawn_from_the_seed_of_the_data() -> None:
    sizes = [[dealt({2: 0.25, 5: 0.75}, seed=seed).batch_sizes.of(i) for i in range(12)] for seed in (0, 0, 1)]
    assert sizes[0] == sizes[1] != sizes[2]
    assert [own.count(2) for own in sizes] == [3, 3, 3]


@pytest.mark.parametrize("sizes", [SIZES, {2: 0.5, 5: 0.5}], ids=str)
def test_runs_resume(sizes: Any, fit: Fit, tmp_path: Path) -> None:
    check_resumes(fit, LitMLP, dealt(sizes), tmp_path)
    with pytest.raises(ValueError, match=r"batch_size: .* in the checkpoint, 4 now"):
        fit(seeded(LitMLP), dealt(4), max_epochs=4, ckpt_path=tmp_path / "2.ckpt")


def test_privacy_of_examples_counts_the_draws_of_each(fit: Fit) -> None:
    private = ls.ExamplePrivacy(clip=0.5, noise_multiplier=2.0, delta=1e-3, noise_seed=1)
    fitted = fit(seeded(LitMLP, dropout=0.0), dealt([5] + [1] * 11), clients_per_round=12, filters=[private])
    largest = max(epsilon(0.5, 2.0, 2, 1e-3), epsilon(0.1, 2.0, 10, 1e-3))
    assert fitted.rows[0]["fl/example_epsilon"] == pytest.approx(largest)


@pytest.mark.parametrize(
    ("size", "message"),
    [
        ([4, 8], "`batch_size` lists 2 values for 12 clients"),
        ([0] * 12, r"`batch_size` must be at least 1, got 0"),
        ({4: 0.5, 8: 0.4}, "Shares of `batch_size` must sum to 1"),
        ([], "`batch_size` must be one value for all clients"),
    ],
)
def test_what_says_no_sizes_is_refused(size: Any, message: str, fit: Fit) -> None:
    with pytest.raises(ValueError, match=message):
        fit(seeded(LitMLP), dealt(size))


def test_held_out_examples_of_a_small_batch_are_evaluated_in_large_ones() -> None:
    assert dealt([300] + [4] * 11).eval_batch_size == 300
    assert torch.equal(dealt([4] * 12).partition.indices, dealt(4).partition.indices)
