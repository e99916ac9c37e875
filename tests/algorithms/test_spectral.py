"""Spectral sharding in rounds and runs: shards average to the weight, terms over their holders; and schedules."""

import copy
import dataclasses
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from federation import Fit, Fitted, said_during, same_state, seeded
from one_client import Turns, client_of
from spectral_rounds import cohort, draw, net, run_round, unit
from torch import Tensor

import lightning_spectral as ls
from lightning_spectral.algorithms.base import Setting
from lightning_spectral.algorithms.spectral.algorithm import SpectralRound
from lightning_spectral.algorithms.term_draws import first_terms, plan_draws
from lightning_spectral.client.forms import Forms
from lightning_spectral.functional.spectra import absorb, factorize, num_terms_for
from lightning_spectral.nn import sharded_layers
from lightning_spectral.protocol.cohort import Cohort
from lightning_spectral.protocol.records import WorkUnit

STRATEGIES = [ls.TopN(), ls.PriSM(), ls.Unbiased(), ls.Collective()]


@pytest.mark.parametrize("strategy", STRATEGIES, ids=repr)
def test_without_training_the_weights_do_not_change_by_one_bit(strategy: ls.sharding.ShardingStrategy) -> None:
    server = net()
    before = copy.deepcopy(server.state_dict())
    run_round(ls.SpectralSharding(strategy, {0.3: 0.5, 0.6: 0.5}), server, [0.3, 0.6, 0.3], trained=False)
    assert all(torch.equal(before[name], value) for name, value in server.state_dict().items())


def test_aggregated_weight_is_the_slow_sum_over_terms_and_clients() -> None:
    server = net()
    before = copy.deepcopy(server)
    seen = run_round(ls.SpectralSharding(ls.Unbiased()), server, [0.3, 0.6, 0.3, 0.3])
    for name in ("1", "4"):
        weight = before.get_submodule(name).weight
        u, v = absorb(factorize(weight), torch.float32)
        slow = torch.zeros(weight.flatten(1).shape).double()
        for i in range(u.shape[1]):
            total, new_u, new_v = 0, torch.zeros(len(u)).double(), torch.zeros(v.shape[1]).double()
            for c, (receipt, tensors) in enumerate(seen):
                terms = receipt.drawn[name].tolist()
                if i in terms:
                    total += c + 1
                    new_u += (c + 1) * tensors[f"{name}.u"][:, terms.index(i)].double()
                    new_v += (c + 1) * tensors[f"{name}.v"][terms.index(i)].double()
            slow += torch.outer(new_u / total, new_v / total) if total else torch.outer(u[:, i], v[i]).double()
        actual = server.get_submodule(name).weight.detach().double().flatten(1)
        # float32: both factors of each term are rounded, and the change, and the new weight
        room = 2 * u.abs().double() @ v.abs().double() + (slow - weight.flatten(1)).abs() + slow.abs()
        assert ((actual - slow).abs() <= 2**-24 * room).all()
    dense = sum((c + 1) * tensors["0.weight"].double() for c, (_, tensors) in enumerate(seen)) / 10
    torch.testing.assert_close(server[0].weight.double(), dense, rtol=1e-6, atol=1e-7)
    variance = sum((c + 1) * tensors["2.running_var"].double() for c, (_, tensors) in enumerate(seen)) / 10
    torch.testing.assert_close(server[2].running_var.double(), variance, rtol=1e-6, atol=1e-7)


def test_shards_of_all_terms_sum_to_the_weight() -> None:
    server = net()
    _, ((download, _),) = draw(ls.SpectralSharding(ls.Collective()), server, [1.0])
    side = ls.SpectralSharding().bind(server).client_side
    client = client_of(side, server, 1.0)
    side.load(client, download)
    for name, layer in sharded_layers(client).items():
        torch.testing.assert_close(layer.weight, server.get_submodule(name).weight.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_unbiased_shard_averages_to_the_weight() -> None:
    algorithm, server = ls.SpectralSharding(ls.Unbiased()), net()
    count = 1000
    # planned for ten clients, drawn for many
    opened = algorithm.bind(server).open(cohort([0.3] * 10))
    opened.cohort = cohort([0.3] * count)
    total = torch.zeros(8, 54).double()
    for c in range(count):
        download, _ = opened.send(unit(c))
        total += ((download.tensors["1.u"] * download.tensors["1.omega"]) @ download.tensors["1.v"]).double()
    U, s, Vh = factorize(server[1].weight)
    pi = opened.term_draws["1"].groups[0.3].inclusion_probs
    # coefficient of term i is s_i z_i / pi_i: mean s_i, variance s_i^2 (1 / pi_i - 1)
    coefficients = torch.diagonal(U.T @ (total / count) @ Vh.T)
    sigma = s * (1 / pi - 1).clamp(min=0).sqrt()
    assert torch.all((coefficients - s).abs() <= 5 * sigma / math.sqrt(count) + 1e-6 * s)
    without_multipliers = s * pi  # negative control: what would come out if omega were forgotten
    assert not torch.all((without_multipliers - s).abs() <= 5 * sigma / math.sqrt(count) + 1e-6 * s)


def test_each_group_is_planned_for_its_own_size() -> None:
    server = net()
    opened, _ = draw(ls.SpectralSharding(ls.Collective()), server, [0.3, 0.3, 0.3, 0.6])
    s = factorize(server[4].weight).s
    for ratio, size in {0.3: 3, 0.6: 1}.items():
        plan = opened.term_draws["4"].groups[ratio]
        pi, omega = ls.Collective()(s, num_terms_for(10, ratio), size)
        assert torch.equal(plan.inclusion_probs, pi)
        assert torch.equal(plan.multipliers, omega)


def test_terms_that_are_certain_are_those_of_a_draw() -> None:
    opened, ((_, receipt), *_) = draw(ls.SpectralSharding(ls.TopN()), net(), [0.3] * 3)
    for name, of_matrix in opened.term_draws.items():
        assert torch.equal(receipt.drawn[name], of_matrix.groups[0.3].design.draw(1, torch.Generator())[0])


def test_the_designs_of_all_matrices_are_fitted_in_one_call_as_each_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    fit_all = ls.designs.ConditionalPoisson.fit_all

    def counted(self: Any, probs: Any) -> Any:
        sizes.append(len(probs))
        return fit_all(self, probs)

    monkeypatch.setattr(ls.designs.ConditionalPoisson, "fit_all", counted)
    algorithm, clients = ls.SpectralSharding(ls.Unbiased(), {0.3: 0.5, 0.6: 0.5}), cohort([0.3, 0.6, 0.3])
    draws = algorithm.bind(net()).open(clients).term_draws
    assert sizes == [2 * len(draws)]  # matrices and keep ratios
    for name, of_matrix in draws.items():
        alone = plan_draws({name: of_matrix.singular_values}, ls.Unbiased(), None, clients)[name]
        for ratio, plan in alone.groups.items():
            together = of_matrix.groups[ratio].design.draw(50, torch.Generator().manual_seed(0))
            assert torch.equal(together, plan.design.draw(50, torch.Generator().manual_seed(0)))


def test_draws_depend_on_seed_round_client_and_layer_alone() -> None:
    algorithm, server = ls.SpectralSharding(ls.Unbiased(), keep_ratio=0.3), net()

    def terms(c: int, seed: int, round_idx: int) -> Any:
        opened.cohort = cohort([0.3] * 5, seed, round_idx)
        return opened.send(unit(c))[1].drawn

    opened = algorithm.bind(server).open(cohort([0.3] * 5))
    forward = [terms(c, 0, 1) for c in range(5)]
    for one, two in zip(forward, [terms(c, 0, 1) for c in reversed(range(5))][::-1], strict=True):
        assert all(torch.equal(one[name], two[name]) for name in one)
    assert len({tuple(terms(0, s, r)["4"].tolist()) for s in (0, 1) for r in range(8)}) > 3


def test_a_sub_model_shares_nothing_with_the_server() -> None:
    server = net()
    theirs = {tensor.data_ptr() for tensor in server.state_dict().values() if tensor.numel()}
    with Forms(server, ls.SpectralSharding().bind(server).client_side.take_form).client(0.3) as client:
        assert theirs.isdisjoint(tensor.data_ptr() for tensor in client.state_dict().values())
        assert sharded_layers(client)["4"].num_terms == 3
    assert theirs == {tensor.data_ptr() for tensor in server.state_dict().values() if tensor.numel()}


def test_weight_decay_moves_from_the_factors_to_frobenius_decay_and_is_said() -> None:
    algorithm = ls.SpectralSharding.published(keep_ratio=0.5, frobenius_decay=0.01, clip_tau=math.inf)
    server = net()
    template = torch.optim.SGD(server.parameters(), lr=1.0, weight_decay=0.05)
    with pytest.warns(ls.SpectralWarning, match=r"weight_decay=0.05 of SGD.*added to their Frobenius decay of 0.01"):
        algorithm.check(Setting(server, optimizers=[template]))
    _, ((download, _),) = draw(algorithm, server, [0.5])
    turns, first = Turns(algorithm.bind(server).client_side, server, template), server[0].weight.detach().clone()
    with turns.client(0.5) as client:
        turns.side.load(client, download)
        weights = {name: layer.weight.detach().clone() for name, layer in sharded_layers(client).items()}
        oracle = copy.deepcopy(client)
        sum(0.03 * layer.weight.square().sum() for layer in sharded_layers(oracle).values()).backward()
        for parameter in client.parameters():
            parameter.grad = torch.zeros_like(parameter)
        turns.start(client)()
        for name, layer in sharded_layers(client).items():
            expected = sharded_layers(oracle)[name]
            torch.testing.assert_close(layer.u, expected.u - expected.u.grad)
            torch.testing.assert_close(layer.v, expected.v - expected.v.grad)
            assert layer.weight.detach().norm() < weights[name].norm()
        torch.testing.assert_close(client[0].weight.detach(), 0.95 * first)


def test_clipping_acts_through_the_local_optimizer() -> None:
    algorithm = ls.SpectralSharding.published(keep_ratio=0.5, frobenius_decay=0.0, clip_tau=2.0)
    server = net()
    turns = Turns(algorithm.bind(server).client_side, server, torch.optim.SGD(server.parameters(), lr=1.0))
    with turns.client(0.5) as client:
        layer = sharded_layers(client)["4"]
        layer.load_terms(torch.zeros(10, 5), torch.zeros(5, 32), torch.tensor([1.0, 2.0, 4.0, 8.0, 16.0]))
        step = turns.start(client)
        layer.u.grad = torch.ones_like(layer.u)
        step()
        assert layer.u[0].tolist() == [-1.0, -1.0, -0.5, -0.25, -0.125]


def test_decay_of_adamw_is_decoupled_as_its_own_is() -> None:
    algorithm, server = ls.SpectralSharding(keep_ratio=1.0, frobenius_decay=0.0), net()
    template = torch.optim.AdamW(server.parameters(), lr=0.01, weight_decay=0.1)
    _, ((download, _),) = draw(algorithm, server, [1.0])
    turns = Turns(algorithm.bind(server).client_side, server, template)
    with turns.client(1.0) as client:
        turns.side.load(client, download)
        for parameter in client.parameters():
            parameter.grad = torch.zeros_like(parameter)
        turns.start(client)()
        for name, layer in sharded_layers(client).items():
            u, v = download.tensors[f"{name}.u"], download.tensors[f"{name}.v"]
            torch.testing.assert_close(layer.u.detach(), u - 0.01 * 0.1 * u @ v @ v.T, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("clip_weight_lr", [math.inf, 1.0])
def test_decay_is_added_before_clipping(clip_weight_lr: float) -> None:
    algorithm = ls.SpectralSharding(
        keep_ratio=0.5, frobenius_decay=0.1, clip_tau=2.0, clip_weight_lr=clip_weight_lr, spectral_start=None
    )
    server = net()
    template = torch.optim.SGD(server.parameters(), lr=1.0)
    turns, generator = Turns(algorithm.bind(server).client_side, server, template), torch.Generator().manual_seed(0)
    u, v = torch.randn(10, 5, generator=generator), torch.randn(5, 32, generator=generator)
    omega = torch.tensor([1.0, 2.0, 4.0, 8.0, 16.0])
    with turns.client(0.5) as client:
        layer = sharded_layers(client)["4"]
        layer.load_terms(u, v, omega)
        step = turns.start(client)
        layer.u.grad, layer.v.grad = torch.ones_like(u), torch.ones_like(v)
        step()
        stepped = layer.u.detach()
    speeds = omega.square() * (u.square().sum(0) + v.square().sum(1))
    factors = torch.minimum(torch.tensor([1.0, 1.0, 0.5, 0.25, 0.125]), clip_weight_lr / speeds)
    decay = 0.1 * (u * omega) @ (v @ v.T) * omega
    torch.testing.assert_close(stepped, u - factors * (1 + decay))


def test_weight_that_is_not_finite_is_refused_with_the_layers_name() -> None:
    server = net()
    with torch.no_grad():
        server[4].weight[0, 0] = math.nan
    with pytest.raises(ValueError, match=r"Layer '4' cannot be factorised.*must be finite"):
        ls.SpectralSharding().bind(server).open(cohort([0.2]))


def test_bytes_are_those_of_the_tensors_that_travel() -> None:
    algorithm, server = ls.SpectralSharding(keep_ratio=0.5), net()
    _, ((download, _),) = draw(algorithm, server, [0.5])
    side = algorithm.bind(server).client_side
    client = client_of(side, server, 0.5)
    dense = 6 * 2 * 9 + 6 + 8 + 4 * 8 + 10 + 3 * 10 + 3
    factors = 4 * (8 + 54) + 5 * (10 + 32)
    assert download.num_bytes == 4 * (dense + factors + 4 + 5) + 8  # omega; num_batches_tracked is int64
    assert side.collect(client, download).num_bytes == 4 * (dense + factors)


SLOPE = [torch.nn.Parameter(torch.ones(1))]


@pytest.mark.parametrize(
    ("optimizer", "clip_tau", "num_warnings"),
    [
        (torch.optim.SGD(SLOPE, lr=0.1), 10.0, 0),
        (torch.optim.SGD(SLOPE, lr=0.1, momentum=0.9, nesterov=True), 10.0, 0),
        (torch.optim.Adam(SLOPE), 10.0, 1),
        (torch.optim.AdamW(SLOPE, weight_decay=0.0), 10.0, 1),
        (torch.optim.Adagrad(SLOPE), 2.0, 1),
        (torch.optim.Adam(SLOPE), float("inf"), 0),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, torch.optim.Optimizer) else str(value),
)
def test_optimizers_that_undo_the_clip_are_reported_once(optimizer: Any, clip_tau: float, num_warnings: int) -> None:
    algorithm, setting = ls.SpectralSharding(clip_tau=clip_tau), Setting(net(), optimizers=[optimizer])
    said = said_during(lambda: algorithm.check(setting))
    assert len(said) == num_warnings
    assert all(f"{type(optimizer).__name__} rescales gradients by their own history" in text for text in said)


@pytest.mark.parametrize("trained", [True, False])
def test_a_pretrained_model_is_not_told_that_the_default_rate_is_too_small(trained: bool) -> None:
    server = torch.nn.Sequential(torch.nn.Linear(4, 64), torch.nn.Linear(64, 64), torch.nn.Linear(64, 4))
    with torch.no_grad():
        server[1].weight += trained * torch.ones(64, 64)  # one term far beyond those of random weights
    with pytest.warns(ls.SpectralWarning, match="tune its learning rate anew") as caught:
        ls.SpectralSharding().check(Setting(server, optimizers=[torch.optim.Adam(server.parameters())]))
    assert ("1e-3 is often ten times too small" in str(caught[0].message)) == (not trained)


def test_the_weight_decay_of_the_round_decays_the_factors() -> None:
    """A schedule may change it: the gradient that decay adds is proportional to the round's coefficient."""
    server = net()
    template = torch.optim.SGD(server.parameters(), lr=0.1, weight_decay=0.1)
    side = ls.SpectralSharding.published(frobenius_decay=0.0, clip_tau=math.inf).bind(server).client_side
    turns, added = Turns(side, server, template), []
    for decay in (0.1, 0.3, 0.0, 0.2):
        template.param_groups[0]["weight_decay"] = decay
        with turns.client(0.5) as client:
            layer = next(iter(sharded_layers(client).values()))
            with torch.no_grad():
                for factor in (layer.u, layer.v, layer.omega):
                    factor.fill_(1.0)
            for parameter in client.parameters():
                parameter.grad = torch.zeros_like(parameter)
            turns.start(client)()
            assert layer.u.grad is not None
            added.append(layer.u.grad.clone())
    assert added[0].abs().min() > 0
    torch.testing.assert_close(added[1], 3 * added[0], rtol=1e-6, atol=0.0)
    assert not added[2].any()
    torch.testing.assert_close(added[3], 2 * added[0], rtol=1e-6, atol=0.0)


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


@pytest.mark.sampled(1)
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
    return [terms.tolist() for unit in now.cohort.groups[0.4] for terms in now.send(unit)[1].drawn.values()]


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
    assert rounds(4, strategy=TOP_THEN_COLLECTIVE, design=designs).trainer.global_step == 4
    assert same_state(
        rounds(2, strategy=TOP_THEN_COLLECTIVE, design=designs).state, rounds(2, strategy=ls.TopN()).state
    )


@pytest.mark.sampled(1)
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


def test_what_is_excluded_can_be_read_and_changed_by_replacing() -> None:
    choice = ls.SpectralSharding(exclude=["head"])
    assert choice.exclude == choice.layers.exclude == ("head",)
    assert dataclasses.replace(choice, keep_ratio=0.3).exclude == ("head",)
    assert ls.SpectralSharding(layers=ls.LayerChoices(exclude=["tail"])).exclude == ("tail",)
    with pytest.raises(ValueError, match="is short for `layers=LayerChoices"):
        dataclasses.replace(choice, exclude=["other"])


class HoldsSome:
    """A strategy that gives others than the first terms a chance if their size is in a range."""

    def __init__(self, low: float, high: float) -> None:
        self.low, self.high = low, high

    def for_groups(self, spectrum: Any, num_terms: Any, coefficients: Any) -> Any:
        (n,) = num_terms
        probs = torch.ones(len(spectrum), dtype=torch.float64)
        probs[n:] = float(self.low < float(spectrum[-1]) < self.high)
        return [(probs, torch.ones_like(probs))]


def test_the_first_terms_alone_are_enough_only_if_no_client_could_hold_others_of_any_likely_size() -> None:
    """Thirty-six others of 0.02 each have the norm 0.12: a strategy is asked for both."""
    values = torch.tensor([4.0, 3.0, 2.0, 1.0, *[0.02] * 36])
    vectors = torch.linalg.qr(torch.randn(40, 40, generator=torch.Generator().manual_seed(0)))[0]
    weight = vectors * values @ vectors.T
    alone = Cohort(0, 0, {0.1: (WorkUnit(0, coefficient=1.0),)})
    answers = {
        bounds: first_terms(weight, [4], HoldsSome(*bounds), alone)  # type: ignore[arg-type]
        for bounds in ((9.0, 10.0), (0.1, 0.15), (0.01, 0.05))
    }
    assert [found is None for found in answers.values()] == [False, True, True]
