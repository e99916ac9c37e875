"""Tensors with a type of their own keep it and lose no digits, and BatchNorm works without running statistics."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

import lightning_spectral as ls
from lightning_spectral.algorithms.memory.kept import ClientSum
from lightning_spectral.algorithms.zampling import ZamplingState
from lightning_spectral.functional.zampling import InfluenceMatrix
from lightning_spectral.nn import use_batch_statistics
from lightning_spectral.nn.zampling import local_weights

MOVES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "half": nn.Module.half,
    "bfloat16": nn.Module.bfloat16,
    "double": nn.Module.double,
    "to": lambda module: module.to(dtype=torch.float16),
    "cpu": nn.Module.cpu,
}
TYPES = {"half": torch.float16, "to": torch.float16, "bfloat16": torch.bfloat16, "double": torch.float64}
NO_MATRIX = InfluenceMatrix((), num_columns=5, degree=1)
THIRD = 1 / 3  # has no short form in any type


@pytest.mark.parametrize("name", MOVES)
def test_states_of_algorithms_keep_their_types(name: str) -> None:
    bits, total = ZamplingState(torch.full((5,), THIRD), [], NO_MATRIX), ClientSum({"weight": (2, 2)})
    bits.probs.grad = torch.full((5,), THIRD)
    total.values.fill_(THIRD)
    probs, before = bits.probs, bits.probs.detach().clone()
    MOVES[name](nn.ModuleList([bits, total]))
    assert bits.probs is probs  # optimizers hold it
    assert bits.probs.dtype == bits.probs.grad.dtype == torch.float32
    assert torch.equal(bits.probs, before)
    assert total.values.tolist() == [THIRD] * 4


@pytest.mark.parametrize("name", MOVES)
def test_scores_keep_at_least_single_precision(name: str) -> None:
    net = ls.nn.zample(nn.Linear(30, 10), compression=4)
    scores = local_weights(net).scores
    net(torch.ones(1, 30))  # weights of this type, which do not last
    before = scores.detach().clone()
    MOVES[name](net)
    assert local_weights(net).scores is scores
    assert scores.dtype == (torch.float64 if name == "double" else torch.float32)
    assert torch.equal(scores.float(), before)
    x = torch.ones(1, 30, dtype=TYPES.get(name, torch.float32))
    assert net(x).dtype == x.dtype


def test_moving_to_the_meta_device_moves_everything() -> None:
    bits, total = ZamplingState(torch.zeros(5), [], NO_MATRIX), ClientSum({"weight": (2, 2)})
    nn.ModuleList([bits, total]).to("meta")
    assert (bits.probs.device.type, total.values.device.type) == ("meta", "meta")


def test_evaluation_uses_the_batchs_statistics_and_the_original_keeps_its_own() -> None:
    module = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    copied = use_batch_statistics(module).eval()
    assert not list(copied.buffers())
    assert len(list(module.buffers())) == 3
    x = torch.randn(16, 4, generator=torch.Generator().manual_seed(0))
    hidden = module[0](x)
    expected = (hidden - hidden.mean(0)) / (hidden.var(0, unbiased=False) + module[1].eps).sqrt()
    torch.testing.assert_close(copied(x), expected)
    assert copied(x).mean(0).abs().max() < 1e-5
