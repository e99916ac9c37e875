from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from federation import Fit, same_state, seeded
from torch import nn

import lightning_spectral as ls
from lightning_spectral.functional.figures import group_discrepancy
from lightning_spectral.functional.sampling.cohorts import effective_cohort_size
from lightning_spectral.functional.sampling.inclusion import collective_multipliers
from lightning_spectral.plugin.callbacks import SpectralDiagnostics, UpdateAlignment
from lightning_spectral.plugin.callbacks.diagnostics import spectral_figures
from lightning_spectral.protocol.cohort import Cohort, Workers
from lightning_spectral.protocol.records import WorkUnit

EFFECTIVE = ls.EffectiveCohort(slack=0.5)


class Logged(pl.Callback):
    """Everything the Trainer has logged by the end of each round, including other callbacks' figures."""

    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self.rows.append({name: float(value) for name, value in trainer.callback_metrics.items()})


@pytest.fixture
def fit(fit: Fit) -> Fit:
    return partial(fit, max_epochs=3)


def test_figures_are_the_pure_functions_of_a_round() -> None:
    torch.manual_seed(0)
    server = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 6), nn.Linear(6, 2))
    algorithm = ls.SpectralSharding(ls.Collective(), keep_ratio=0.5)
    opened = algorithm.bind(server).open(Cohort(0, 0, {0.5: tuple(map(WorkUnit, range(3)))}))
    figures = spectral_figures(opened.term_draws)
    layer = opened.term_draws["1"]
    pi, s = layer.groups[0.5].inclusion_probs, layer.singular_values
    expected = group_discrepancy(s, pi, collective_multipliers(pi, 3), 3) / (s**2).sum()
    assert figures["fl/discrepancy"] == pytest.approx(float(expected))
    assert figures["fl/expected_coverage"] == pytest.approx(float((1 - (1 - pi) ** 3).mean()))
    assert 1 / 6 < figures["fl/stable_rank"] <= figures["fl/participation_rank"] <= figures["fl/entropy_rank"] <= 1


def test_the_clients_error_is_the_mean_over_clients_of_all_keep_ratios() -> None:
    torch.manual_seed(0)
    server = nn.Sequential(nn.Linear(4, 9), nn.Linear(9, 8), nn.Linear(8, 8), nn.Linear(8, 2))
    units = tuple(map(WorkUnit, range(5)))
    opened = ls.SpectralSharding(ls.Unbiased()).bind(server).open(Cohort(0, 0, {0.25: units[:4], 0.5: units[4:]}))
    by_hand = []
    for layer in opened.term_draws.values():
        s = layer.singular_values
        errors = [(s**2 * (1 / layer.groups[ratio].inclusion_probs - 1)).sum() / (s**2).sum() for ratio in (0.25, 0.5)]
        by_hand.append(float(4 * errors[0] + errors[1]) / 5)
    assert len(by_hand) == 2
    assert spectral_figures(opened.term_draws)["fl/client_error"] == pytest.approx(sum(by_hand) / 2)


@pytest.mark.parametrize("wrap", [lambda strategy: strategy, ls.sharding.Scaled], ids=["alone", "Scaled"])
def test_what_a_strategy_chose_is_logged_for_each_layer_and_on_average(wrap: Any) -> None:
    torch.manual_seed(0)
    server = nn.Sequential(nn.Linear(4, 9), nn.Linear(9, 8), nn.Linear(8, 8), nn.Linear(8, 2))
    units = tuple(WorkUnit(c, coefficient=1 + c) for c in range(6))
    cohort = Cohort(0, 0, {0.25: units[:4], 0.5: units[4:]})
    opened = ls.SpectralSharding(wrap(ls.EffectiveCohort(0.5))).bind(server).open(cohort)
    figures = spectral_figures(opened.term_draws)
    per_layer = []
    for name, layer in opened.term_draws.items():
        sizes = [effective_cohort_size(layer.singular_values, n, size, 0.5) for n, size in ((2, 4.0), (4, 2.0))]
        per_layer.append(sum(sizes) / 2)
        assert figures[f"fl/effective_cohort/{name}"] == pytest.approx(per_layer[-1])
    assert figures["fl/effective_cohort"] == pytest.approx(sum(per_layer) / 2)
    assert 1.0 < figures["fl/effective_cohort"] < 4.0
    plain = spectral_figures(ls.SpectralSharding(ls.Collective()).bind(server).open(cohort).term_draws)
    assert not [name for name in plain if "effective_cohort" in name]


@pytest.mark.parametrize(("cohort", "scale"), [("group", 1.0), ("joint", 1.0), ("joint", 0.01)])
def test_discrepancy_is_that_of_the_weighted_average(cohort: Any, scale: float) -> None:
    """Against draws of the design: the mean squared distance between the clients' weighted average and the weight."""
    torch.manual_seed(0)
    server = nn.Sequential(nn.Linear(4, 9), nn.Linear(9, 8), nn.Linear(8, 2))
    sizes = [2, 30, 4, 20, 12]
    units = tuple(WorkUnit(c, coefficient=scale * size) for c, size in enumerate(sizes))
    algorithm = ls.SpectralSharding(ls.Collective(cohort=cohort))
    opened = algorithm.bind(server).open(Cohort(0, 0, {0.25: units[:3], 0.5: units[3:]}, absolute=scale != 1.0))
    (layer,) = opened.term_draws.values()
    s, generator, num_draws = layer.singular_values, torch.Generator().manual_seed(0), 4000
    average = torch.zeros(num_draws, len(s), dtype=torch.float64)
    for plan, own in zip(layer.groups.values(), (sizes[:3], sizes[3:]), strict=True):
        for size in own:
            held = torch.zeros_like(average).scatter_(1, plan.design.draw(num_draws, generator), 1.0)
            average += size / sum(sizes) * held * plan.multipliers
    errors = ((1 - average) ** 2 @ s**2) / (s**2).sum()
    deviation = float(errors.std() / num_draws**0.5)
    assert spectral_figures(opened.term_draws)["fl/discrepancy"] == pytest.approx(
        float(errors.mean()), abs=5 * deviation
    )


def test_coordination_lowers_the_discrepancy_and_raises_the_coverage() -> None:
    torch.manual_seed(0)
    server = nn.Sequential(nn.Linear(4, 30), nn.Linear(30, 20), nn.Linear(20, 2))
    cohort = Cohort(0, 0, {0.2: tuple(WorkUnit(c, coefficient=10) for c in range(6))})
    apart, together = (
        spectral_figures(ls.SpectralSharding(ls.Unbiased(), 0.2, design=design).bind(server).open(cohort).term_draws)
        for design in (None, ls.designs.Coordinated())
    )
    assert together["fl/discrepancy"] < apart["fl/discrepancy"]
    assert together["fl/expected_coverage"] > apart["fl/expected_coverage"]


def test_diagnostics_are_logged_every_n_rounds_and_only_for_sharding(lit: Any, data: Any, fit: Fit) -> None:
    sharded, dense = Logged(), Logged()
    fit(lit, data, callbacks=[sharded, SpectralDiagnostics()], algorithm=ls.SpectralSharding(keep_ratio=0.5))
    assert all(0 < row["fl/discrepancy"] <= row["fl/client_error"] < 1 for row in sharded.rows)
    fit(lit, data, callbacks=[chosen := Logged(), SpectralDiagnostics()], algorithm=ls.SpectralSharding(EFFECTIVE))
    assert all(row["fl/effective_cohort"] == row["fl/effective_cohort/net.2"] >= 1 for row in chosen.rows)
    fit(lit, data, callbacks=[dense, SpectralDiagnostics()], algorithm=ls.FedAvg())
    assert "fl/discrepancy" not in dense.rows[-1]


def test_fedavg_is_aligned_with_itself_and_the_run_is_not_changed(lit_mlp: Any, data: Any, fit: Fit) -> None:
    logged = Logged()
    fit(seeded(lit_mlp), data, callbacks=[logged, UpdateAlignment(1)], algorithm=ls.FedAvg())
    assert [row["fl/fedavg_alignment"] for row in logged.rows] == pytest.approx([1.0] * 3, abs=1e-5)
    sharding, logged = ls.SpectralSharding(keep_ratio=0.5), Logged()
    plain = fit(seeded(lit_mlp), data, algorithm=sharding)
    watched = fit(seeded(lit_mlp), data, callbacks=[logged, UpdateAlignment(1)], algorithm=sharding)
    assert same_state(plain.state, watched.state)
    assert all(0 < row["fl/fedavg_alignment"] < 0.9999 for row in logged.rows)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "algorithm",
    [
        ls.SpectralSharding(ls.sharding.Schatten(), 0.5),
        ls.SpectralSharding(ls.sharding.Scaled(ls.TopN()), 0.5),
        ls.SpectralSharding(ls.sharding.Scaled(ls.PriSM()), 0.5),
        ls.SpectralSharding(ls.PriSM(compensation="wallenius"), {0.3: 0.5, 0.6: 0.5}),
        ls.SpectralSharding(ls.Collective(cohort="joint"), {0.3: 0.5, 0.6: 0.5}),
        ls.SpectralSharding(ls.Collective(cohort="best"), {0.3: 0.5, 0.6: 0.5}),
        ls.SpectralSharding(ls.Unbiased(), {0.3: 0.5, 0.6: 0.5}, design=ls.designs.Coordinated()),
    ],
    ids=repr,
)
def test_strategies_and_designs_beyond_the_four_train(algorithm: Any, lit: Any, data: Any, fit: Fit) -> None:
    algorithm.bind(lit).initialize(Workers())  # now, so that only training changes the weights
    before = lit.net[2].weight.detach().clone()
    rows = fit(lit, data, callbacks=[SpectralDiagnostics()], algorithm=algorithm).rows
    assert not torch.equal(before, lit.net[2].weight)
    assert bool(torch.isfinite(lit.net[2].weight).all())
    assert rows[-1]["fl/loss"] > 0
