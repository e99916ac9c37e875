"""Runs of users' modules: draws, averages, and every strategy with every design."""

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from federation import Fit, same_state, seeded
from torch import nn

import lightning_spectral as ls


def test_batch_norm_statistics_are_the_mean_of_clients_and_counters_the_servers(
    lit_mlp: Any, data: Any, fit: Fit
) -> None:
    class Lit(lit_mlp):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net.insert(1, nn.BatchNorm1d(12))

    module = Lit()
    means: list[torch.Tensor] = []

    class Keep(ls.RoundCallback):
        def on_client_end(self, trainer: pl.Trainer, pl_module: Any, turn: Any) -> None:
            means.append(turn.upload.tensors["net.1.running_mean"].clone())

    fit(module, data, max_epochs=1, callbacks=[Keep()])
    torch.testing.assert_close(module.net[1].running_mean, torch.stack(means).mean(0))
    assert module.net[1].num_batches_tracked == 0


def test_dropout_draws_do_not_touch_the_global_generators(lit: Any, data: Any, fit: Fit) -> None:
    state = torch.get_rng_state()
    data.val = None
    fit(lit, data)
    assert torch.equal(torch.get_rng_state(), state)


def test_runs_with_one_seed_agree_and_with_two_do_not(lit_mlp: Any, data: Any, fit: Fit) -> None:
    def weights(seed: int, noise: int) -> torch.Tensor:
        torch.manual_seed(0)
        module = lit_mlp(dropout=0.5)
        torch.manual_seed(noise)  # the global state outside must not matter
        return fit(module, data, seed=seed).weights

    assert torch.equal(weights(0, 1), weights(0, 2))
    assert not torch.equal(weights(0, 1), weights(1, 1))


def test_one_algorithm_object_serves_two_runs(lit_mlp: Any, data: Any, fit: Fit) -> None:
    used = ls.SpectralSharding(keep_ratio=0.5)
    fit(seeded(lit_mlp, width=12), data, algorithm=used)
    again, fresh, other = (
        fit(seeded(lit_mlp, width=20), data, algorithm=algorithm).state
        for algorithm in (used, ls.SpectralSharding(keep_ratio=0.5), ls.SpectralSharding(keep_ratio=0.3))
    )
    assert same_state(again, fresh)
    assert not same_state(again, other)


@pytest.mark.parametrize("design", [None, ls.ConditionalPoisson(), ls.SuccessiveSampling()], ids=repr)
@pytest.mark.parametrize("strategy", [ls.TopN(), ls.PriSM(), ls.Unbiased(), ls.Collective()], ids=repr)
def test_every_strategy_trains_with_every_design(strategy: Any, design: Any, lit: Any, data: Any, fit: Fit) -> None:
    ls.algorithms.spectral_start(lit, 0.3)  # now, so that only training changes the weights
    before = lit.net[2].weight.detach().clone()
    fitted = fit(lit, data, algorithm=ls.SpectralSharding(strategy, {0.3: 0.5, 0.6: 0.5}, design=design))
    assert len(fitted.rows) == 2
    assert not torch.equal(before, lit.net[2].weight)
    assert bool(torch.isfinite(lit.net[2].weight).all())


@pytest.mark.parametrize("algorithm", [ls.FedAvg(), ls.SpectralSharding(keep_ratio=0.5)])
def test_a_spectral_norm_has_unit_vectors_after_a_run(algorithm: Any, lit_mlp: Any, data: Any, fit: Fit) -> None:
    module = seeded(lit_mlp, lr=0.3, width=16)
    module.net[0] = seeded(lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(6, 16)))
    module.net.insert(1, seeded(nn.Linear, 16, 16))
    normed = fit(module, data, algorithm=algorithm, max_epochs=5).module.eval().net[0]
    for vector in normed.parametrizations.weight[0].buffers():
        assert float(vector.norm()) == pytest.approx(1.0, abs=1e-5)
