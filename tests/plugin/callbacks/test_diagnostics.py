from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from federation import Fit, same_state, seeded
from torch import nn

import lightning_spectral as ls
from lightning_spectral.functional import collective_multipliers, group_discrepancy
from lightning_spectral.plugin.callbacks.diagnostics import spectral_figures
from lightning_spectral.protocol.cohort import Cohort
from lightning_spectral.protocol.work_unit import WorkUnit


class Logged(pl.Callback):
    """All that the Trainer has logged by the end of each round, other callbacks' figures too."""

    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self.rows.append({name: float(value) for name, value in trainer.callback_metrics.items()})


@pytest.fixture
def fit(fit: Fit) -> Fit:
    """Fits of three rounds."""
    return partial(fit, max_epochs=3)


def test_figures_are_the_pure_functions_of_a_round() -> None:
    torch.manual_seed(0)
    server = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 6), nn.Linear(6, 2))
    algorithm = ls.SpectralSharding(ls.Collective(), keep_ratio=0.5)
    opened = algorithm.open(server, None, Cohort(0, 0, {0.5: tuple(map(WorkUnit, range(3)))}))
    figures = spectral_figures(opened)
    layer = opened.layers["1"]
    pi, s = layer.groups[0.5].inclusion_probs, layer.singular_values
    expected = group_discrepancy(s, pi, collective_multipliers(pi, 3), 3) / (s**2).sum()
    assert figures["fl/discrepancy"] == pytest.approx(float(expected))
    assert figures["fl/expected_coverage"] == pytest.approx(float((1 - (1 - pi) ** 3).mean()))
    assert 1 / 6 < figures["fl/stable_rank"] <= figures["fl/participation_rank"] <= figures["fl/entropy_rank"] <= 1


def test_coordination_lowers_the_discrepancy_and_raises_the_coverage() -> None:
    torch.manual_seed(0)
    server = nn.Sequential(nn.Linear(4, 30), nn.Linear(30, 20), nn.Linear(20, 2))
    cohort = Cohort(0, 0, {0.2: tuple(WorkUnit(c, coefficient=10) for c in range(6))})
    apart, together = (
        spectral_figures(ls.SpectralSharding(ls.Unbiased(), 0.2, design=design).open(server, None, cohort))
        for design in (None, ls.Coordinated())
    )
    assert together["fl/discrepancy"] < apart["fl/discrepancy"]
    assert together["fl/expected_coverage"] > apart["fl/expected_coverage"]


def test_diagnostics_are_logged_every_n_rounds_and_only_for_sharding(lit: Any, data: Any, fit: Fit) -> None:
    sharded, dense = Logged(), Logged()
    fit(lit, data, callbacks=[sharded, ls.SpectralDiagnostics()], algorithm=ls.SpectralSharding(keep_ratio=0.5))
    assert all(0 < row["fl/discrepancy"] < 1 for row in sharded.rows)
    fit(lit, data, callbacks=[dense, ls.SpectralDiagnostics()], algorithm=ls.FedAvg())
    assert "fl/discrepancy" not in dense.rows[-1]
    with pytest.raises(ValueError, match="`every_n_rounds` must be at least 1, got 0"):
        ls.SpectralDiagnostics(every_n_rounds=0)


def test_fedavg_is_aligned_with_itself_and_the_run_is_not_changed(lit_mlp: Any, data: Any, fit: Fit) -> None:
    logged = Logged()
    fit(seeded(lit_mlp), data, callbacks=[logged, ls.UpdateAlignment(every_n_rounds=1)], algorithm=ls.FedAvg())
    assert [row["fl/fedavg_alignment"] for row in logged.rows] == pytest.approx([1.0] * 3, abs=1e-5)
    sharding, logged = ls.SpectralSharding(keep_ratio=0.5), Logged()
    plain = fit(seeded(lit_mlp), data, algorithm=sharding)
    watched = fit(seeded(lit_mlp), data, callbacks=[logged, ls.UpdateAlignment(every_n_rounds=1)], algorithm=sharding)
    assert same_state(plain.state, watched.state)
    assert all(0 < row["fl/fedavg_alignment"] < 0.9999 for row in logged.rows)


@pytest.mark.parametrize(
    "algorithm",
    [
        ls.SpectralSharding(ls.Schatten(), 0.5),
        ls.SpectralSharding(ls.Scaled(ls.TopN()), 0.5),
        ls.SpectralSharding(ls.Scaled(ls.PriSM()), 0.5),
        ls.SpectralSharding(ls.PriSM(compensation="wallenius"), {0.3: 0.5, 0.6: 0.5}),
        ls.SpectralSharding(ls.Collective(cohort="joint"), {0.3: 0.5, 0.6: 0.5}),
        ls.SpectralSharding(ls.Collective(cohort="best"), {0.3: 0.5, 0.6: 0.5}, weigh_clients=True),
        ls.SpectralSharding(ls.Unbiased(), {0.3: 0.5, 0.6: 0.5}, design=ls.Coordinated()),
    ],
    ids=repr,
)
def test_strategies_and_designs_beyond_the_four_train(algorithm: Any, lit: Any, data: Any, fit: Fit) -> None:
    before = lit.net[2].weight.detach().clone()
    rows = fit(lit, data, callbacks=[ls.SpectralDiagnostics()], algorithm=algorithm).rows
    assert not torch.equal(before, lit.net[2].weight)
    assert bool(torch.isfinite(lit.net[2].weight).all())
    assert rows[-1]["fl/loss"] > 0
