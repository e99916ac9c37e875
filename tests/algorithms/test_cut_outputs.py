"""Sub-models whose outputs are cut, against whole ones with zeros, and against the formula of the paper."""

import copy
from typing import Any

import pytest
import torch
from federation import Fit, same_state, seeded
from one_client import client_of
from spectral_rounds import cohort, net, run_round, unit
from torch import Tensor, nn
from toy_models import LitMLP, plain_sgd, variant

import lightning_spectral as ls
from lightning_spectral.functional.spectra import absorb, factorize
from lightning_spectral.nn.layers.leading_channels import LeadingChannels
from lightning_spectral.nn.optimizer_hooks import TermRates

HALF = ls.SpectralSharding(ls.Unbiased(), keep_ratio={0.3: 0.5, 0.6: 0.5}, output_ratio=0.5)


class Masked(nn.Module):
    """A convolution, a normalisation and a second convolution, all of them whole, with some channels set to zero.

    Whole groups are normalised as groups, and so is the part that is held of the next one.
    """

    def __init__(self, first: nn.Module, norm: nn.Module, second: nn.Module, held: int) -> None:
        super().__init__()
        self.first, self.norm, self.second, self.held = first, norm, second, held

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.conv2d(x, self.first.weight, self.bias(), padding=1)
        x = self.normalise(x) * (torch.arange(x.shape[1]) < self.held)[:, None, None]
        return nn.functional.conv2d(x.relu(), self.second.weight, self.second.bias)

    def bias(self) -> Tensor:
        return nn.functional.pad(self.first.bias, (0, self.first.out_channels - self.held))

    def normalise(self, x: Tensor) -> Tensor:
        if isinstance(self.norm, nn.BatchNorm2d):
            return self.norm(x)
        size, parts = x.shape[1] // self.norm.num_groups, []
        for start in range(0, x.shape[1], size):
            group = x[:, start : min(start + size, max(self.held, start + 1))]
            normed = (group - group.mean((1, 2, 3), keepdim=True)) / (
                group.var((1, 2, 3), keepdim=True, unbiased=False) + self.norm.eps
            ).sqrt()
            parts.append(nn.functional.pad(normed, (0, 0, 0, 0, 0, size - group.shape[1])))
        return torch.cat(parts, 1) * self.norm.weight[:, None, None] + self.norm.bias[:, None, None]


@pytest.mark.parametrize("norm", [lambda: nn.BatchNorm2d(8), lambda: nn.GroupNorm(4, 8), lambda: nn.GroupNorm(2, 8)])
@pytest.mark.parametrize("size", [3, 9])  # few positions: two products; many: the rebuilt weight
def test_a_cut_sub_model_is_the_whole_one_with_zeros(norm: Any, size: int) -> None:
    def make() -> nn.Sequential:
        return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), norm(), nn.ReLU(), nn.Conv2d(8, 4, 3))

    choices = ls.LayerChoices(output_ratio=0.6, keep_first_and_last_dense=False, exclude=["3"])
    ours = ls.replace_layers(seeded(make), 0.9, layers=choices)
    with torch.no_grad():
        ours[0].bias.normal_()
        ours[1].bias.normal_()
    first, norm_layer, _, second = copy.deepcopy(ours)
    theirs = Masked(first, norm_layer, second, held=5)
    x = torch.randn(4, 3, size, size, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(ours(x), theirs(x))
    for model in (ours, theirs):
        model(x).square().sum().backward()
    own = dict(theirs.named_parameters())
    names = {"0": "first", "1": "norm", "3": "second"}
    for name, parameter in ours.named_parameters():
        expected = own[f"{names[name[0]]}{name[1:]}"].grad
        if name == "1.bias" or name == "1.weight":
            assert not parameter.grad[5:].any()
        torch.testing.assert_close(parameter.grad, expected, rtol=1e-4, atol=1e-4)


def test_all_outputs_are_the_algorithm_without_a_cut_bit_for_bit(fit: Fit, data: Any) -> None:
    plain, whole = (
        fit(seeded(LitMLP), data, algorithm=ls.SpectralSharding(keep_ratio=0.5, **options), max_epochs=2)
        for options in ({}, {"output_ratio": 1.0})
    )
    assert same_state(plain.tensors, whole.tensors)


def test_held_rows_are_averaged_over_those_who_held_the_term_and_the_others_stay() -> None:
    """Eq. (5) of the paper, term by term and row by row."""
    server = net()
    before = copy.deepcopy(server)
    seen = run_round(HALF, server, [0.3, 0.6, 0.3])
    for name, held in {"1": 4, "4": 5}.items():  # of the layers of `net`
        weight = before.get_submodule(name).weight
        u, v = (factor.double() for factor in absorb(factorize(weight), torch.float32))
        slow = torch.zeros_like(weight.flatten(1), dtype=torch.float64)
        for i in range(u.shape[1]):
            holders = [
                (c + 1, receipt.drawn[name].tolist().index(i), tensors)
                for c, (receipt, tensors) in enumerate(seen)
                if i in receipt.drawn[name]
            ]
            total, new_u, new_v = sum(weight for weight, *_ in holders), u[:, i].clone(), v[i].clone()
            if holders:
                new_v = sum(w * tensors[f"{name}.v"][at].double() for w, at, tensors in holders) / total
                for row in range(held):
                    new_u[row] = sum(w * tensors[f"{name}.u"][row, at].double() for w, at, tensors in holders) / total
            slow += torch.outer(new_u, new_v)
        actual = server.get_submodule(name).weight.detach().double().flatten(1)
        room = 2 * u.abs().double() @ v.abs().double() + (slow - weight.flatten(1)).abs() + slow.abs()
        assert ((actual - slow).abs() <= 2**-24 * room).all()
        bias, old = server.get_submodule(name).bias, before.get_submodule(name).bias
        assert torch.equal(bias[held:], old[held:])
        assert not torch.isclose(bias[:held], old[:held]).any()


def test_what_travels_is_cut() -> None:
    download, _ = HALF.bind(net()).open(cohort([0.3, 0.3])).send(unit(0))
    assert {name: tuple(tensor.shape) for name, tensor in download.tensors.items() if name[0] in "14"} == {
        **{"1.u": (4, 3), "1.v": (3, 54), "1.omega": (3,), "1.bias": (4,)},
        **{"4.u": (5, 3), "4.v": (3, 32), "4.omega": (3,), "4.bias": (5,)},
    }


Decays = variant(LitMLP, configure_optimizers=plain_sgd(weight_decay=0.1))


@pytest.mark.filterwarnings("ignore:weight_decay=0.1 of SGD does not act on the factors")
def test_weight_decay_does_not_reach_the_biases_of_absent_outputs(fit: Fit, data: Any) -> None:
    before = seeded(Decays).net[2].bias.detach().clone()
    after = fit(seeded(Decays), data, algorithm=HALF).module.net[2].bias.detach()
    assert torch.equal(before[6:], after[6:])
    assert not torch.isclose(before[:6], after[:6]).any()


def test_no_direction_of_the_weight_is_trained_faster_than_in_a_dense_layer() -> None:
    """The bound on the learning rate also holds for cut vectors, which are not orthogonal."""
    server = nn.Sequential(*(seeded(nn.Linear, 12, 12) for _ in range(3)))
    half = ls.SpectralSharding(ls.TopN(), keep_ratio=0.5, output_ratio=0.1, clip_weight_lr=0.5).bind(server)
    download, _ = half.open(cohort([0.5])).send(unit(0))
    side = half.client_side
    client = client_of(side, server, 0.5)
    side.load(client, download)
    layer = client[1]
    rates = TermRates([layer], 10.0, 0.5).factors(layer.omega)
    u, v = layer.u.detach(), layer.v.detach()
    assert torch.linalg.matrix_norm(u * rates @ u.T, 2) + torch.linalg.matrix_norm(v.T * rates @ v, 2) <= 0.5 + 1e-6


@pytest.mark.parametrize("write", [lambda x: x.clamp_(0), lambda x: x.__setitem__(0, 1.0)])
def test_a_write_that_would_be_lost_is_refused(write: Any) -> None:
    layer = ls.replace_layers(
        nn.Sequential(nn.Linear(4, 4)), 0.5, layers=ls.LayerChoices(output_ratio=0.5, keep_first_and_last_dense=False)
    )
    out = layer(torch.ones(2, 4))
    assert isinstance(out, LeadingChannels)
    with pytest.raises(RuntimeError, match="writes into the output of a layer that a client holds in part"):
        write(out)
