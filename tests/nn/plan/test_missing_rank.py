"""Constant weights stay whole in every plan: sharded, they would stay zero or of rank one for ever."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from federation import seeded
from torch import nn

import lightning_spectral as ls
from lightning_spectral.nn import plan_layers

ZERO, ONE = "zero: it has no singular terms", "constant: its rank of 1 would never grow"


def reason_of(layer: nn.Module, **choices: Any) -> str:
    """Why a layer between a first and a last one is held as it is."""
    module = nn.Sequential(nn.Linear(6, 6), layer, nn.Linear(6, 6))
    return {p.name: p.reason for p in plan_layers(module, choices=ls.LayerChoices(**choices)).layers}["1"]


def filled(make: Callable[[], nn.Module], value: float) -> nn.Module:
    layer = seeded(make)
    for parameter in layer.parameters():
        nn.init.constant_(parameter, value)
    return layer


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(15, 130),
    "conv": lambda: nn.Conv2d(3, 8, 3),
    "grouped": lambda: nn.Conv1d(6, 8, 3, groups=2),
    "attention": lambda: nn.MultiheadAttention(8, 2),
    "lstm": lambda: nn.LSTM(5, 4),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", LAYERS)
def test_a_constant_weight_is_whole_and_a_random_one_is_sharded(name: str, dtype: torch.dtype) -> None:
    make = LAYERS[name]
    whose = "its weight" if name in ("linear", "conv") else "a part of its weight"
    assert reason_of(filled(make, 0.0).to(dtype)) == f"{whose} is {ZERO}"
    assert reason_of(filled(make, 0.07).to(dtype)) == f"{whose} is {ONE}"
    assert reason_of(seeded(make).to(dtype)) == "affine"


def test_other_weights_of_low_rank_are_sharded() -> None:
    """A truncated weight, for instance, is of low rank on purpose."""
    layer = nn.Linear(6, 6)
    with torch.no_grad():
        layer.weight.copy_(torch.outer(torch.arange(6.0), torch.ones(6)))
    assert reason_of(layer) == "affine"
    ls.algorithms.spectral_start(
        module := seeded(lambda: nn.Sequential(*[nn.Linear(6, 6) for _ in range(3)])), 0.1, tail=0.0
    )
    assert int(torch.linalg.matrix_rank(module[1].weight)) == 1
    assert list(plan_layers(module).sharded) == ["1"]


def test_one_part_of_a_packed_weight_without_terms_keeps_the_layer_whole() -> None:
    attention, packed = nn.MultiheadAttention(8, 2), nn.Linear(6, 18)
    with torch.no_grad():
        attention.in_proj_weight[8:16] = 0.0
        packed.weight[:6] = 0.0
    assert reason_of(attention) == f"a part of its weight is {ZERO}"
    assert reason_of(packed, split={"1": 3}) == f"a part of its weight is {ZERO}"
    assert reason_of(packed) == "affine"  # whole, it has terms


def test_matrices_that_can_only_have_one_term_are_sharded_with_the_others() -> None:
    assert reason_of(seeded(lambda: nn.LSTM(1, 4))) == "affine"


def test_weights_that_are_not_finite_are_left_to_the_checks_of_broken_weights() -> None:
    for broken in (float("nan"), float("inf")):
        assert reason_of(filled(lambda: nn.Linear(6, 6), broken)) == "affine"


def test_validate_names_them_and_costs_count_them_whole(capsys: pytest.CaptureFixture[str]) -> None:
    module = seeded(lambda: nn.Sequential(*[nn.Linear(16, 16) for _ in range(4)]))
    sharded = ls.cost_table(module, ls.SpectralSharding(), [0.25], torch.zeros(1, 16)).at[0.25].parameters
    nn.init.zeros_(module[1].weight)
    plan = ls.validate(module)
    assert f"dense    its weight is {ZERO}" in capsys.readouterr().out
    assert plan.problems == ()
    whole = ls.cost_table(module, ls.SpectralSharding(), [0.25], torch.zeros(1, 16)).at[0.25].parameters
    assert whole - sharded == 16 * 16 - 4 * (16 + 16)
