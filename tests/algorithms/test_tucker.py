"""Convolutions as Tucker factors: as FedAvg on the factorised network, by entries if clients differ, and in runs."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fake_line import line_of
from federation import Fit, check_resumes, same_state, seeded
from small_convs import LitConvs, LitOnlyConvs, images_of
from torch import nn
from torch.utils.data import TensorDataset

import lightning_spectral as ls
from lightning_spectral.network.device import ClientData
from lightning_spectral.network.remote_clients import RemoteClients
from lightning_spectral.nn.layers.tucker import PARTS, compose, tucker_factors
from lightning_spectral.protocol.cohort import Cohort
from lightning_spectral.protocol.records import Upload, WorkUnit
from lightning_spectral.testing import check_algorithm

CHOICES = ls.LayerChoices(convolutions="tucker")
MIXED = {0.2: 0.5, 0.7: 0.5}
sharded = partial(ls.SpectralSharding, layers=CHOICES)


@pytest.fixture
def images() -> ls.FederatedDataModule:
    return images_of()


@pytest.fixture
def fit(fit: Fit) -> Fit:
    return partial(fit, clients_per_round=3, max_epochs=3)


def test_equal_clients_are_fed_avg_on_the_factorised_network(images: Any, fit: Fit) -> None:
    """Bit for bit; the server's module has the weights that the factors make up."""
    ours = fit(seeded(LitOnlyConvs), images, algorithm=sharded(keep_ratio=0.3))
    theirs = fit(ls.nn.replace_layers(seeded(LitOnlyConvs), 0.3, layers=CHOICES), images, algorithm=ls.FedAvg())
    factors = {f"net.2.{part}": ours.model.state.get_parameter(f"net.2.{part}") for part in PARTS}
    for name, tensor in theirs.state.items():
        assert torch.equal(factors[name] if name in factors else ours.state[name], tensor), name
    expected = compose(*(factor.detach().double() for factor in factors.values())).float()
    assert torch.equal(ours.state["net.2.weight"], expected)
    assert [row["fl/loss"] for row in ours.rows] == [row["fl/loss"] for row in theirs.rows]
    before = seeded(LitOnlyConvs).state_dict()["net.2.weight"]
    assert (expected - compose(*tucker_factors(before, *factors["net.2.core"].shape[1::-1]))).abs().max() > 1e-3


def test_each_entry_is_averaged_over_the_clients_that_hold_it() -> None:
    lit, algorithm = seeded(LitOnlyConvs), sharded(keep_ratio=MIXED, spectral_start=None)
    state: Any = algorithm.new_state(lit, 0)
    half = algorithm.bind(lit, state)
    half.settle()
    units = tuple(WorkUnit(client, coefficient=1 + client) for client in range(3))
    opened = half.open(Cohort(0, 0, {0.2: units[:2], 0.7: units[2:]}))
    total = {n: np.zeros(p.shape) for n, p in state.named_parameters()}
    weight = {n: np.zeros(p.shape) for n, p in state.named_parameters()}
    for unit in units:
        download, receipt = opened.send(unit)
        own = {n: t + 0.1 * (1 + unit.client_id) * torch.randn(t.shape) for n, t in download.tensors.items()}
        opened.add(receipt, Upload(unit, own, num_steps=1))
        for name in total:
            part = tuple(slice(size) for size in own[name].shape)
            total[name][part] += (1 + unit.client_id) * (own[name] - download.tensors[name]).double().numpy()
            weight[name][part] += 1 + unit.client_id
            whole = state.get_parameter(name).detach()
            assert torch.equal(download.tensors[name], whole[part])
            if name in (places := opened.positions(receipt)):
                assert torch.equal(whole.flatten()[places[name]], whole[part])
    opened.close()
    for name, parameter in state.named_parameters():
        expected = np.divide(total[name], weight[name], out=np.zeros_like(total[name]), where=weight[name] > 0)
        np.testing.assert_allclose(-parameter.grad.numpy(), expected, rtol=1e-5, atol=1e-7)
        assert weight[name].min() > 0  # the largest clients hold all
    sizes = [half.open(Cohort(0, 0, {r: units})).send(units[0])[0].tensors["net.2.core"].shape for r in MIXED]
    assert sizes[0][0] < sizes[1][0]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:SpectralSharding shards no layer")  # where all parameters are frozen
@pytest.mark.parametrize("keep_ratio", [0.3, MIXED], ids=["equal", "mixed"])
def test_it_keeps_the_contract_of_algorithms(keep_ratio: Any) -> None:
    batch = torch.randn(4, 2, 6, 6), torch.tensor([0, 1, 2, 0])
    check_algorithm(sharded(keep_ratio=keep_ratio, spectral_start=None), seeded(LitConvs), batch)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("keep_ratio", [0.3, MIXED], ids=["equal", "mixed"])
def test_a_resumed_run_has_the_same_factors(keep_ratio: Any, images: Any, fit: Fit, tmp_path: Path) -> None:
    check_resumes(fit, LitConvs, images, tmp_path, algorithm=sharded(keep_ratio=keep_ratio))


def test_weights_loaded_before_the_fit_are_factorised(images: Any, fit: Fit) -> None:
    """Not those that the module had when it was wrapped."""
    lit, other = seeded(LitOnlyConvs), seeded(LitOnlyConvs)
    model = ls.FederatedModule(lit, algorithm=sharded(keep_ratio=1.0), clients_per_round=3, local_epochs=0)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(0.1)
    lit.load_state_dict(other.state_dict())
    fit(model, images, max_epochs=1)
    # at a keep ratio of 1 the factors hold all of the weight, up to three roundings
    torch.testing.assert_close(dict(lit.state_dict()), dict(other.state_dict()), rtol=0.0, atol=1e-6)


def test_a_convolution_that_was_zero_when_it_was_wrapped_stays_dense() -> None:
    lit, algorithm = seeded(LitConvs), sharded(keep_ratio=0.3)
    own = lit.net[2].weight.detach().clone()
    nn.init.zeros_(lit.net[2].weight)
    state = algorithm.new_state(lit, 0)
    lit.net[2].weight.data.copy_(own)
    plan = algorithm.bind(lit, state).plan
    assert list(plan.tucker) == ["net.6"]
    assert "its weight was constant before" in str(plan)


def test_costs_are_those_of_the_factors() -> None:
    lit = LitOnlyConvs()
    costs = ls.cost_table(lit, sharded(keep_ratio=0.3), [0.2, 0.7])
    assert str(costs) == str(ls.cost_table(lit, sharded(keep_ratio=MIXED), [0.2, 0.7]))
    for ratio in (0.2, 0.7):
        small = ls.nn.replace_layers(lit, ratio, layers=CHOICES)
        assert costs.at[ratio].parameters == sum(p.numel() for p in small.parameters())


@pytest.mark.slow
def test_learning(images: Any, fit: Fit) -> None:
    """With mixed clients too, the loss falls well below that of the first round."""
    for keep_ratio in (0.3, MIXED):
        fitted = fit(seeded(LitConvs), images, algorithm=sharded(keep_ratio=keep_ratio), max_epochs=12)
        losses = [float(row["fl/loss"]) for row in fitted.rows]
        assert losses[-1] < 0.8 * losses[0]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("keep_ratio", [0.3, MIXED], ids=["equal", "mixed"])
def test_devices_train_as_the_simulation_does(keep_ratio: Any, images: Any, fit: Fit) -> None:
    whole = images.train.tensors
    own = [TensorDataset(*(tensor[part] for tensor in whole)) for part in images.partition]
    line = line_of([{"": LitConvs}] * 6, [{"": ClientData(examples, batch_size=6)} for examples in own])
    data = RemoteClients(line, val=images.val, wait_for=6, patience=0.2)
    options = {"algorithm": sharded(keep_ratio=keep_ratio), "clients_per_round": 6}
    ours, theirs = (fit(seeded(LitConvs), each, **options) for each in (data, images))
    assert same_state(ours.tensors, theirs.tensors)
    assert [row["fl/loss"] for row in ours.rows] == [row["fl/loss"] for row in theirs.rows]
