"""Initial weights of sharded layers: the spectral start in a fit, and layers whose weights lack rank."""

import copy
import logging
import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from federation import Fit, Fitted, same_state, seeded
from observed_runs import acting
from torch import Tensor, nn
from toy_models import LitMLP

import lightning_spectral as ls
from lightning_spectral.algorithms import SpectralStart
from lightning_spectral.algorithms.fed_avg import FedAvgHalf


def started(module: nn.Module, keep_ratio: float, **options: Any) -> dict[str, Tensor]:
    """A copy of the weights after `spectral_start`."""
    own = copy.deepcopy(module)
    ls.algorithms.spectral_start(own, keep_ratio, **options)
    return own.state_dict()


def sentences(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "Spectral start" in record.getMessage()]


BY_TERMS = {"aggregation": ls.algorithms.TermMeans()}  # keeps what the start has left: the default drops it in a round


class TestInAFit:
    # for clients smaller than those the start is meant for, half of the energy lies too far down the spectrum
    @pytest.mark.filterwarnings("ignore:Round 0. sub-models of keep ratio 0.2:lightning_spectral.SpectralWarning")
    @pytest.mark.parametrize(
        ("keep_ratio", "start", "share"),
        [
            (0.3, SpectralStart(), 0.3),
            ({0.6: 0.5, 0.2: 0.5}, SpectralStart(), 0.2),
            ([0.9] * 6 + [0.4] * 6, SpectralStart(), 0.4),
            ({0.6: 0.5, 0.2: 0.5}, SpectralStart(tail=0.0, keep_ratio=0.5), 0.5),
        ],
    )
    def test_weights_begin_as_the_function_leaves_them_for_the_smallest_clients(
        self, keep_ratio: Any, start: SpectralStart, share: float, lit: Any, data: Any, fit: Fit
    ) -> None:
        expected = started(lit, share, tail=start.tail)
        others = [started(lit, other, tail=start.tail) for other in (0.2, 0.3, 0.4, 0.5, 0.6, 0.9) if other != share]
        algorithm = ls.SpectralSharding(keep_ratio=keep_ratio, spectral_start=start, **BY_TERMS)
        state = fit(lit, data, algorithm=algorithm, local_epochs=0).state
        assert same_state(state, expected)
        assert not any(same_state(state, other) for other in others)  # negative control

    @pytest.mark.parametrize("algorithm", [ls.SpectralSharding(keep_ratio=0.3, spectral_start=None), ls.FedAvg()])
    def test_without_a_start_no_bit_changes(self, algorithm: Any, lit: Any, data: Any, fit: Fit) -> None:
        before = copy.deepcopy(lit.state_dict())
        assert same_state(fit(lit, data, algorithm=algorithm, local_epochs=0).state, before)

    @pytest.mark.parametrize("keep_ratio", [0.1, 0.3, 0.6])
    def test_fitting_again_does_not_repeat_it(self, keep_ratio: float, lit: Any, data: Any, fit: Fit) -> None:
        algorithm = ls.SpectralSharding(keep_ratio=keep_ratio, **BY_TERMS)
        expected = started(lit, keep_ratio)
        for _ in range(3):
            assert same_state(fit(lit, data, algorithm=algorithm, local_epochs=0).state, expected)

    def test_weights_that_look_trained_are_changed_on_request(self, lit: Any, data: Any, fit: Fit) -> None:
        with torch.no_grad():
            lit.net[2].weight += 1.0
        before = copy.deepcopy(lit.state_dict())
        expected = started(lit, 0.3, trained=True)
        left = fit(copy.deepcopy(lit), data, algorithm=ls.SpectralSharding(keep_ratio=0.3), local_epochs=0)
        assert same_state(left.state, before)
        request = ls.SpectralSharding(keep_ratio=0.3, spectral_start=SpectralStart(trained=True), **BY_TERMS)
        assert same_state(fit(lit, data, algorithm=request, local_epochs=0).state, expected)
        assert not same_state(before, expected)

    def test_a_weight_that_is_not_finite_ends_the_fit_with_the_layers_name(self, lit: Any, data: Any, fit: Fit) -> None:
        with torch.no_grad():
            lit.net[2].weight[0, 0] = math.nan
        with pytest.raises(
            ls.errors.RoundError, match=r"^Round 0: .*weights were not finite .*: 'net.2.weight' had"
        ) as raised:
            fit(lit, data, algorithm=ls.SpectralSharding(keep_ratio=0.3))
        assert "Layer 'net.2' cannot be factorised" in str(raised.value.__cause__)


class Doubles(ls.FedAvg):
    """Dense, with initial weights of its own."""

    class half(FedAvgHalf):
        def initialize(self, workers: Any) -> str:
            with torch.no_grad():
                for parameter in self.server.parameters():
                    parameter *= 2
            return "doubled all parameters"


class TestResume:
    def test_an_algorithm_sets_weights_once(
        self, fit: Fit, lit_mlp: Any, data: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        """A repetition would show in every weight."""
        caplog.set_level(logging.INFO)
        rounds = partial(fit, data=data, algorithm=Doubles(), local_epochs=0)
        doubled = {name: 2 * value for name, value in seeded(lit_mlp).state_dict().items()}
        begun = rounds(seeded(lit_mlp))
        assert same_state(begun.state, doubled)
        begun.trainer.save_checkpoint(tmp_path / "1.ckpt")
        assert same_state(rounds(seeded(lit_mlp), max_epochs=2, ckpt_path=tmp_path / "1.ckpt").state, doubled)
        assert [record.getMessage() for record in caplog.records].count("doubled all parameters") == 1

    def test_it_is_said_once(self, fit: Fit, lit_mlp: Any, data: Any, tmp_path: Path, caplog: Any) -> None:
        caplog.set_level(logging.INFO)
        sharding = ls.SpectralSharding(keep_ratio={0.3: 0.5, 0.6: 0.5})
        fit(seeded(lit_mlp), data, algorithm=sharding).trainer.save_checkpoint(tmp_path / "1.ckpt")
        said = sentences(caplog)
        assert [line.split(",")[0] for line in said] == [
            "Spectral start: the energy of 1 of 1 sharded matrices is now in 30% of the terms"
        ]
        fit(seeded(lit_mlp), data, algorithm=sharding, max_epochs=2, ckpt_path=tmp_path / "1.ckpt")
        fit(seeded(lit_mlp), data, algorithm=replace(sharding, spectral_start=None))
        assert sentences(caplog) == said


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("sharding", "times"),
    [
        (ls.SpectralSharding(ls.EffectiveCohort(), keep_ratio=0.3), 1),
        (ls.SpectralSharding(ls.Collective(), keep_ratio=0.3), 1),
        (ls.SpectralSharding(ls.TopN(), keep_ratio=0.3), 0),  # asked for
        (ls.SpectralSharding(ls.Unbiased(), keep_ratio=0.3), 0),  # draws, even across the gap
        (ls.SpectralSharding.published(keep_ratio=0.3), 0),
        (ls.SpectralSharding(ls.Collective(), keep_ratio=1.0), 0),  # nothing to choose
    ],
    ids=["slack", "default", "top", "unbiased", "published", "whole"],
)
@pytest.mark.filterwarnings("ignore::lightning_spectral.SpectralWarning")
def test_a_run_in_which_strategies_do_not_differ_says_so_once(
    fit: Fit, lit_mlp: Any, data: Any, caplog: pytest.LogCaptureFixture, sharding: ls.SpectralSharding, times: int
) -> None:
    caplog.set_level(logging.INFO)
    run = fit(seeded(lit_mlp), data, algorithm=sharding, max_epochs=2)
    said = [record.getMessage() for record in caplog.records]
    assert sum(message.startswith("All clients of a keep ratio hold the same terms") for message in said) == times
    if times:  # and it is true
        alone = fit(seeded(lit_mlp), data, algorithm=replace(sharding, strategy=ls.TopN()), max_epochs=2)
        assert same_state(run.state, alone.state)


def test_callbacks_see_the_started_weights_from_the_first_round_on(lit: Any, data: Any, fit: Fit) -> None:
    expected, seen = started(lit, 0.3), []
    watch = acting(on_train_epoch_start=lambda trainer, model: seen.append(copy.deepcopy(model.module.state_dict())))
    fit(lit, data, algorithm=ls.SpectralSharding(keep_ratio=0.3), callbacks=[watch], max_epochs=2)
    assert same_state(seen[0], expected)
    assert not same_state(seen[1], expected)


class LitDeep(LitMLP):
    """Two layers between the first and the last, of which one starts with a constant weight."""

    def __init__(self, value: float | None = None) -> None:
        super().__init__()
        self.net.insert(2, nn.Linear(12, 12))
        if value is not None:
            nn.init.constant_(self.net[2].weight, value)


SHARDING = ls.SpectralSharding(keep_ratio=0.5)


@pytest.mark.parametrize("value", [0.0, 0.05])
def test_they_are_trained_whole_and_gain_rank(value: float, data: Any, fit: Fit) -> None:
    fitted = fit(seeded(LitDeep, value), data, algorithm=SHARDING, max_epochs=2)
    assert torch.linalg.matrix_rank(fitted.module.net[2].weight.detach().double(), rtol=1e-5) > 2
    plan = SHARDING.plan(seeded(LitDeep, value))
    assert list(plan.missing_rank) == ["net.2"]
    assert list(plan.sharded) == ["net.3"]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("value", [0.0, 0.05, None])
def test_a_resumed_run_keeps_the_same_layers_whole(value: float | None, data: Any, fit: Fit, tmp_path: Path) -> None:
    """By then they have rank."""

    def rounds(max_epochs: int, ckpt_path: Path | None = None) -> Fitted:
        return fit(seeded(LitDeep, value), data, algorithm=SHARDING, max_epochs=max_epochs, ckpt_path=ckpt_path)

    whole = rounds(3)
    for stop_after, path in enumerate([tmp_path / "1.ckpt", tmp_path / "2.ckpt"], start=1):
        before = tmp_path / f"{stop_after - 1}.ckpt" if stop_after > 1 else None
        rounds(stop_after, before).trainer.save_checkpoint(path)
        decisions = torch.load(path, weights_only=True)["federation_lasting"]["models"][""].get("decisions", {})
        assert ("missing_rank" in decisions) == (value is not None)
    resumed = rounds(3, tmp_path / "2.ckpt")
    assert same_state(resumed.state, whole.state)
    assert [row.uplink_bytes for row in resumed.ledger.rows] == [row.uplink_bytes for row in whole.ledger.rows]


def test_clients_that_would_hold_empty_terms_are_warned_of_by_name(data: Any, fit: Fit) -> None:
    def of_rank(rows: int) -> LitDeep:
        lit = seeded(LitDeep)
        with torch.no_grad():
            lit.net[2].weight[rows:] = 0.0
        return lit

    message = r"net\.2 \(rank 3 of 12; clients hold at least 6 terms\)\. Their rank never grows"
    with pytest.warns(ls.SpectralWarning, match=message):
        fit(of_rank(3), data, algorithm=SHARDING)
    fit(of_rank(6), data, algorithm=SHARDING)
    fit(seeded(LitDeep), data, algorithm=ls.SpectralSharding(spectral_start=ls.SpectralStart(tail=0.0)))
