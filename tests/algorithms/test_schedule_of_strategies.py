"""Strategies and designs that change from round to round: each round is the one that its own setting makes."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from federation import Fit, Fitted, same_state, seeded
from torch import Tensor

import lightning_spectral as ls
from lightning_spectral.algorithms.spectral.algorithm import SpectralRound
from lightning_spectral.protocol.cohort import Cohort
from lightning_spectral.protocol.records import WorkUnit

KEEP = {0.3: 0.5, 0.6: 0.5}
TOP_THEN_COLLECTIVE = ls.Schedule({0: ls.TopN(), 2: ls.Collective()})
Rounds = Callable[..., Fitted]


@pytest.fixture
def rounds(fit: Fit, lit_mlp: Any, data: Any) -> Rounds:
    def rounds(max_epochs: int, ckpt_path: Path | None = None, **options: Any) -> Fitted:
        algorithm = ls.SpectralSharding(keep_ratio=KEEP, spectral_start=None, **options)
        return fit(seeded(lit_mlp), data, algorithm=algorithm, max_epochs=max_epochs, ckpt_path=ckpt_path)

    return rounds


class Switched(ls.sharding.ShardingStrategy):
    """The slow way: another strategy whenever the switch is turned."""

    def __init__(self, now: ls.sharding.ShardingStrategy) -> None:
        self.now = now

    def __call__(self, singular_values: Tensor, num_terms: int, cohort_size: float) -> tuple[Tensor, Tensor]:
        return self.now(singular_values, num_terms, cohort_size)

    def own_design(self, singular_values: Tensor, num_terms: int) -> ls.designs.Design:
        return self.now.own_design(singular_values, num_terms)


class TurnsTheSwitch(ls.RoundCallback):
    """Turns the switch before the server prepares the round."""

    def __init__(self, switch: Switched, values: list[ls.sharding.ShardingStrategy]) -> None:
        self.switch, self.values = switch, values

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self.switch.now = self.values[trainer.current_epoch]


@pytest.fixture
def switched(fit: Fit, lit_mlp: Any, data: Any) -> Callable[[list[ls.sharding.ShardingStrategy]], Fitted]:
    """A run with one strategy for each round."""

    def switched(values: list[ls.sharding.ShardingStrategy]) -> Fitted:
        switch = Switched(values[0])
        options: dict[str, Any] = {"callbacks": [TurnsTheSwitch(switch, values)], "max_epochs": len(values)}
        return fit(seeded(lit_mlp), data, algorithm=ls.SpectralSharding(switch, KEEP, spectral_start=None), **options)

    return switched


@pytest.mark.parametrize("num_rounds", [1, 2, 3, 4])
def test_every_round_is_that_of_its_own_strategy(num_rounds: int, rounds: Rounds, switched: Any) -> None:
    each = [ls.TopN(), ls.TopN(), ls.Collective(), ls.Collective()][:num_rounds]
    ours, slow = rounds(num_rounds, strategy=TOP_THEN_COLLECTIVE), switched(each)
    assert same_state(ours.state, slow.state)
    assert ours.rows == slow.rows
    alone = [rounds(num_rounds, strategy=strategy).state for strategy in (ls.TopN(), ls.Collective())]
    assert same_state(ours.state, alone[0]) == (num_rounds <= 2)
    assert not same_state(ours.state, alone[1])


def test_a_schedule_of_one_strategy_is_that_strategy(rounds: Rounds) -> None:
    one, two = rounds(2, strategy=ls.Schedule({0: ls.PriSM()})), rounds(2, strategy=ls.PriSM())
    assert same_state(one.state, two.state)


def test_a_strategys_own_design_comes_with_it(rounds: Rounds, switched: Any) -> None:
    """PriSM draws successively, unless a design is given."""
    ours = rounds(2, strategy=ls.Schedule({0: ls.Collective(), 1: ls.PriSM()}))
    assert same_state(ours.state, switched([ls.Collective(), ls.PriSM()]).state)
    given = rounds(2, strategy=ls.Schedule({0: ls.Collective(), 1: ls.PriSM()}), design=ls.Systematic())
    assert not same_state(ours.state, given.state)


def opened(algorithm: ls.SpectralSharding, server: torch.nn.Module, round_idx: int) -> SpectralRound:
    units = tuple(WorkUnit(client_id, coefficient=1.0) for client_id in range(5))
    return algorithm.bind(server).open(Cohort(seed=0, round_idx=round_idx, groups={0.4: units}))


def drawn(algorithm: ls.SpectralSharding, server: torch.nn.Module, round_idx: int) -> list[list[int]]:
    """The terms of each client."""
    now = opened(algorithm, server, round_idx)
    units = now.cohort.groups[0.4]
    return [terms.tolist() for unit in units for terms in now.send(unit)[1].drawn.values()]


DESIGNS = [None, None, ls.Systematic(), ls.designs.Coordinated(), ls.designs.Coordinated(), None]


@pytest.mark.parametrize("round_idx", range(6))
def test_every_round_draws_with_its_own_design(round_idx: int, lit: Any) -> None:
    schedule = ls.Schedule({0: None, 2: ls.Systematic(), 3: ls.designs.Coordinated(), 5: None})
    make = partial(ls.SpectralSharding, ls.Unbiased(), 0.4)
    found = drawn(make(design=schedule), lit, round_idx)
    assert found == drawn(make(design=DESIGNS[round_idx]), lit, round_idx)
    others = [design for design in (None, ls.Systematic(), ls.designs.Coordinated()) if design != DESIGNS[round_idx]]
    assert all(found != drawn(make(design=other), lit, round_idx) for other in others)  # negative control


def test_both_may_have_a_schedule(rounds: Rounds) -> None:
    designs = ls.Schedule({0: ls.Systematic(), 1: None, 3: ls.designs.Coordinated()})
    run = rounds(4, strategy=TOP_THEN_COLLECTIVE, design=designs)
    assert run.trainer.global_step == 4
    assert same_state(
        rounds(2, strategy=TOP_THEN_COLLECTIVE, design=designs).state, rounds(2, strategy=ls.TopN()).state
    )


@pytest.mark.parametrize("stop_after", [1, 2, 3])
def test_a_run_resumed_inside_a_schedule_equals_the_uninterrupted_one(
    stop_after: int, rounds: Rounds, tmp_path: Path
) -> None:
    options = {"strategy": TOP_THEN_COLLECTIVE, "design": ls.Schedule({0: None, 3: ls.Systematic()})}
    whole = rounds(4, **options)
    rounds(stop_after, **options).trainer.save_checkpoint(tmp_path / "part.ckpt")
    resumed = rounds(4, tmp_path / "part.ckpt", **options)
    assert resumed.trainer.global_step == 4
    assert same_state(resumed.state, whole.state)


@pytest.mark.parametrize(
    "other", [ls.TopN(), ls.Schedule({0: ls.TopN(), 3: ls.Collective()}), ls.Schedule({0: ls.TopN(), 2: ls.Unbiased()})]
)
def test_a_checkpoint_of_another_schedule_is_refused(other: Any, rounds: Rounds, tmp_path: Path) -> None:
    rounds(1, strategy=TOP_THEN_COLLECTIVE).trainer.save_checkpoint(tmp_path / "1.ckpt")
    with pytest.raises(
        ValueError, match=r"(?s)another configuration.*strategy=Schedule\(\{0: TopN\(\), 2: Collective\("
    ):
        rounds(2, tmp_path / "1.ckpt", strategy=other)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"strategy": ls.Schedule({0: ls.TopN(), 2: "collective"})}, "`strategy` .*ShardingStrategy.*'collective'"),
        ({"strategy": ls.Schedule({0: None})}, "`strategy` .*ShardingStrategy.*None"),
        ({"strategy": ls.Schedule({0: ls.Schedule({0: ls.TopN()})})}, "`strategy` .*ShardingStrategy.*Schedule"),
        ({"strategy": {0: ls.TopN()}}, r"`strategy` by round must be a Schedule.*write Schedule\(\{0: TopN\(\)\}\)"),
        ({"design": ls.Schedule({0: None, 1: ls.TopN()})}, r"`design` .*Design.*TopN\(\)"),
        ({"design": {0: ls.Systematic()}}, "`design` by round must be a Schedule"),
        ({"spectral_start": ls.Schedule({0: None})}, "`spectral_start` .*SpectralStart"),
    ],
)
def test_a_wrong_type_in_a_schedule_is_refused_at_once(options: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        ls.SpectralSharding(**options)


def test_keep_ratios_have_no_schedule() -> None:
    with pytest.raises((TypeError, ValueError), match="keep_ratio"):
        ls.SpectralSharding(keep_ratio=ls.Schedule({0: 0.2}))  # type: ignore[arg-type]
