import copy
import math
import warnings
from typing import Any

import pytest
import torch
from one_client import Turns, client_of
from spectral_rounds import cohort, draw, net, run_round, unit

import lightning_spectral as ls
from lightning_spectral.client.forms import Forms
from lightning_spectral.functional.spectra import absorb, factorize, num_terms_for
from lightning_spectral.nn import sharded_layers

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
        # float32 weights: rounding of W = U V^T itself, a few ulp of the largest singular value
        torch.testing.assert_close(actual, slow, rtol=0, atol=8 * 2**-24 * float(u.norm() * v.norm()))
    dense = sum((c + 1) * tensors["0.weight"].double() for c, (_, tensors) in enumerate(seen)) / 10
    torch.testing.assert_close(server[0].weight.double(), dense, rtol=1e-6, atol=1e-7)
    variance = sum((c + 1) * tensors["2.running_var"].double() for c, (_, tensors) in enumerate(seen)) / 10
    torch.testing.assert_close(server[2].running_var.double(), variance, rtol=1e-6, atol=1e-7)


def test_shards_of_all_terms_sum_to_the_weight() -> None:
    server = net()
    _, ((download, _),) = draw(ls.SpectralSharding(ls.Collective()), server, [1.0])
    side = ls.SpectralSharding().bind(server).device_half
    client = client_of(side, server, 1.0)
    side.load(client, download)
    for name, layer in sharded_layers(client).items():
        torch.testing.assert_close(layer.weight, server.get_submodule(name).weight.detach(), rtol=1e-5, atol=1e-6)


def test_unbiased_shard_averages_to_the_weight() -> None:
    torch.manual_seed(0)
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


def test_draws_depend_on_seed_round_client_and_layer_alone() -> None:
    algorithm, server = ls.SpectralSharding(ls.Unbiased(), keep_ratio=0.3), net()

    def terms(c: int, seed: int, round_idx: int) -> Any:
        opened.cohort = cohort([0.3] * 5, seed, round_idx)
        return opened.send(unit(c))[1].drawn

    opened = algorithm.bind(server).open(cohort([0.3] * 5))
    forward = [terms(c, 0, 1) for c in range(5)]
    backward = [terms(c, 0, 1) for c in reversed(range(5))][::-1]
    for one, two in zip(forward, backward, strict=True):
        assert all(torch.equal(one[name], two[name]) for name in one)
    distinct = {tuple(terms(0, s, r)["4"].tolist()) for s in (0, 1) for r in range(8)}
    assert len(distinct) > 3


def test_a_sub_model_shares_nothing_with_the_server() -> None:
    server = net()
    theirs = {tensor.data_ptr() for tensor in server.state_dict().values() if tensor.numel()}
    with Forms(server, ls.SpectralSharding().bind(server).device_half.take_form).client(0.3) as client:
        assert theirs.isdisjoint(tensor.data_ptr() for tensor in client.state_dict().values())
        assert sharded_layers(client)["4"].num_terms == 3
    assert theirs == {tensor.data_ptr() for tensor in server.state_dict().values() if tensor.numel()}


def test_weight_decay_moves_from_the_factors_to_frobenius_decay_and_is_said() -> None:
    algorithm = ls.SpectralSharding.published(keep_ratio=0.5, frobenius_decay=0.01, clip_tau=math.inf)
    server = net()
    template = torch.optim.SGD(server.parameters(), lr=1.0, weight_decay=0.05)
    with pytest.warns(ls.SpectralWarning, match=r"weight_decay=0.05 of SGD.*added to their Frobenius decay of 0.01"):
        algorithm.check_optimizer(template, server)
    _, ((download, _),) = draw(algorithm, server, [0.5])
    turns, first = Turns(algorithm.bind(server).device_half, server, template), server[0].weight.detach().clone()
    with turns.client(0.5) as client:
        turns.side.load(client, download)
        weights = {name: layer.weight.detach().clone() for name, layer in sharded_layers(client).items()}
        oracle = copy.deepcopy(client)
        penalty = sum(0.03 * layer.weight.square().sum() for layer in sharded_layers(oracle).values())
        penalty.backward()
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
    template = torch.optim.SGD(server.parameters(), lr=1.0)
    turns = Turns(algorithm.bind(server).device_half, server, template)
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
    turns = Turns(algorithm.bind(server).device_half, server, template)
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
    turns, generator = Turns(algorithm.bind(server).device_half, server, template), torch.Generator().manual_seed(0)
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
    side = algorithm.bind(server).device_half
    client = client_of(side, server, 0.5)
    dense = 6 * 2 * 9 + 6 + 8 + 4 * 8 + 10 + 3 * 10 + 3
    factors = 4 * (8 + 54) + 5 * (10 + 32)
    assert download.num_bytes == 4 * (dense + factors + 4 + 5) + 8  # omega; num_batches_tracked is int64
    upload = side.collect(client, download)
    assert upload.num_bytes == 4 * (dense + factors)


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
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ls.SpectralSharding(clip_tau=clip_tau).check_optimizer(optimizer, net())
    said = [str(warning.message) for warning in caught if warning.category is ls.SpectralWarning]
    assert len(said) == num_warnings
    assert all(f"{type(optimizer).__name__} rescales gradients by their own history" in text for text in said)


def test_the_weight_decay_of_the_round_decays_the_factors() -> None:
    """A schedule may change it: the gradient that decay adds is proportional to the round's coefficient."""
    server = net()
    template = torch.optim.SGD(server.parameters(), lr=0.1, weight_decay=0.1)
    side = ls.SpectralSharding.published(frobenius_decay=0.0, clip_tau=math.inf).bind(server).device_half
    turns, added = Turns(side, server, template), []
    for decay in (0.1, 0.3, 0.0):
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
