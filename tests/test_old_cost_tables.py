"""The cost tables of 0.1 say what they are called now, and give the same figures as the one that there is."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from federation import seeded
from toy_models import LitMLP

import lightning_spectral as ls

X = torch.zeros(5, 6)


def lit() -> LitMLP:
    return seeded(LitMLP)


PAIRS: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "cost_table": (
        lambda: ls.cost_table(lit(), [0.2, 0.5], X),
        lambda: ls.cost_table(lit(), ls.SpectralSharding(), [0.2, 0.5], X),
    ),
    "cost_table, by name": (
        lambda: ls.cost_table(lit(), keep_ratios=[0.5], example_input=X, layers=ls.LayerChoices(output_ratio=0.5)),
        lambda: ls.cost_table(lit(), ls.SpectralSharding(output_ratio=0.5), [0.5], X),
    ),
    "keep_ratio_for": (
        lambda: ls.keep_ratio_for(lit(), X, budget_params=300),
        lambda: ls.largest_that_fits(lit(), ls.SpectralSharding(), X, budget_params=300),
    ),
    "sub_model_cost_table": (
        lambda: ls.sub_model_cost_table(lit(), ls.FIARSE(), [0.5], X),
        lambda: ls.cost_table(lit(), ls.FIARSE(), [0.5], X),
    ),
    "sub_model_keep_ratio_for": (
        lambda: ls.sub_model_keep_ratio_for(lit(), ls.WidthSharding(), X, budget_bytes=800),
        lambda: ls.largest_that_fits(lit(), ls.WidthSharding(), X, budget_bytes=800),
    ),
    "lora_cost_table": (
        lambda: ls.lora_cost_table(lit(), [2, 3], X, aggregation=ls.FrozenA()),
        lambda: ls.cost_table(lit(), ls.LoRA(aggregation=ls.FrozenA()), [2, 3], X),
    ),
    "rank_for": (
        lambda: ls.rank_for(lit(), budget_bytes=1000, layers=["net.0"]),
        lambda: ls.largest_that_fits(lit(), ls.LoRA(layers=["net.0"]), budget_bytes=1000),
    ),
    "zampling_cost_table": (
        lambda: ls.zampling_cost_table(lit(), [4], X, degree=2, downlink_bits=5),
        lambda: ls.cost_table(lit(), ls.Zampling(degree=2, downlink_bits=5), [4], X),
    ),
    "compression_for": (
        lambda: ls.compression_for(lit(), budget_bytes=300, degree=2),
        lambda: ls.largest_that_fits(lit(), ls.Zampling(degree=2), budget_bytes=300),
    ),
}


@pytest.mark.parametrize("name", PAIRS)
def test_an_old_name_works_and_says_the_new_one(name: str) -> None:
    old, new = PAIRS[name]
    now = r"(cost_table|algorithms\.largest_that_fits)\(module"
    with pytest.warns(FutureWarning, match=rf"`{name.partition(',')[0]}\(module.*` is now `{now}.*until version 0\.2"):
        found = old()
    assert found == new()


@pytest.mark.parametrize("wrong", [0.5, "spectral", ls.LoRA], ids=repr)
def test_what_is_neither_an_algorithm_nor_keep_ratios_is_refused(wrong: Any) -> None:
    """Even before an example is asked for."""
    with pytest.raises(
        TypeError, match=r"`algorithm` must be an instance of Algorithm, got (0\.5|the string|the class)"
    ):
        ls.cost_table(lit(), wrong, [1.0])
