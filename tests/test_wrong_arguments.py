"""Mistakes that a reader of the signature could make: each is refused in the constructor or call, by name."""

from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from federation import Fit
from torch import nn
from torch.utils.data import TensorDataset

import lightning_spectral as ls
from lightning_spectral import functional, testing

TOY, EXAMPLE = TensorDataset(torch.zeros(12, 3)), torch.zeros(2, 8)
DEVICE = ls.simulation.DeviceProfile(1.0, 1.0, 1.0)
PROBS = torch.tensor([0.7, 0.5, 0.25, 0.25])


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 2))


def conv(**options: Any) -> nn.Module:
    return ls.SpectralShardedConv2d(
        **{"in_channels": 4, "out_channels": 4, "kernel_size": (3, 3), **options}, num_terms=2
    )


def data(train: Any = TOY, **options: Any) -> ls.FederatedDataModule:
    return ls.FederatedDataModule(train, **{"partitioner": ls.IIDPartitioner(2), **options})


MISTAKES: list[tuple[Any, dict[str, Any], str]] = [
    (data, {"train": None}, r"`train` must be a map-style data set, .*, got None; pass the data set"),
    (data, {"train": "data/train"}, r"`train` must be a map-style data set, .*, got 'data/train'"),
    (data, {"train": TensorDataset}, r"`train` must be a map-style data set, .*TensorDataset"),
    (data, {"val": "data/val"}, r"`val` must be a data set, a dataloader or a list of them, got 'data/val'"),
    (data, {"test": TensorDataset}, r"`test` must be a data set"),
    (data, {"collate_fn": "pad"}, r"`collate_fn` must be a function .*, got 'pad'"),
    (data, {"labels": "label"}, r"`labels` must list one entry .*if it is a column, write labels=table\['label'\]"),
    (data, {"labels": dict.fromkeys(range(12), 1)}, r"`labels` must list one entry per example, .*, got a dict"),
    (data, {"labels": 2}, r"`labels` must list one entry per example, .*, got 2\."),
    (ls.NaturalPartitioner, {"keys": "user"}, r"`keys` must list one entry .* write keys=table\['user'\]"),
    (ls.NaturalPartitioner, {"keys": {0: "romeo", 1: "juliet"}}, r"`keys` must list one entry .*, got a dict"),
    (ls.NaturalPartitioner, {"keys": {"romeo", "juliet"}}, r"`keys` must list one entry .*, got a set"),
    (ls.NaturalPartitioner, {"keys": None}, r"`keys` must list one entry .*, got None"),
    (ls.NaturalPartitioner, {"keys": [0, 1], "names": 2}, r"`names` must list the keys of all clients, got 2"),
    (ls.VirtualClock, {"profiles": DEVICE, "macs": 1e6}, r"`macs` must be a function .*, got 1000000\.0"),
    (ls.VirtualClock, {"profiles": DEVICE, "macs": {}}, r"`macs` must be a function"),
    (ls.VirtualClock, {"profiles": DEVICE, "macs": {"0.5": 1e6}}, r"`macs` must be a number, got '0.5'; write 0.5"),
    (ls.VirtualClock, {"profiles": DEVICE, "macs": {0.5: -1}}, r"`macs\[0.5\]` must be at least 0"),
    (ls.WidthSharding, {"plan": 0.5}, r"`plan` must be an instance of WidthPlan, got 0.5"),
    (ls.WidthSharding, {"plan": ls.LayerChoices()}, r"`plan` must be an instance of WidthPlan"),
    (ls.SpectralSharding, {"exclude": {}}, r"`exclude` must be a sequence of patterns, got {}"),
    (ls.SuccessiveSampling, {"log_sizes": [0.5, 0.1]}, r"`log_sizes` must be an instance of Tensor"),
    (ls.nn.FrobeniusDecay, {"coefficients": 1e-4}, r"`coefficients` must be an instance of Mapping, got 0.0001"),
    (
        ls.nn.FrobeniusDecay,
        {"coefficients": {0: 1e-4}},
        r"`coefficients` maps names of layers to numbers, got the key 0",
    ),
    (ls.ClientEvaluation, {"clients": np.array([1, 2])}, r"`clients` must be a whole number"),
    (ls.LossVarianceReduced, {"active": 2, "measure": np.array([1, 2])}, r"`measure` must be a whole number"),
    (conv, {"kernel_size": 3}, r"`kernel_size` must be 2 numbers, one for each dimension, got 3; write \(3, 3\)"),
    (conv, {"stride": 2}, r"`stride` must be 2 numbers, .*; write \(2, 2\)"),
    (conv, {"stride": (0, 1)}, r"`stride` must be at least 1, got 0"),
    (conv, {"dilation": (1,)}, r"`dilation` must be 2 numbers"),
    (conv, {"padding": 1}, r"`padding` must be 2 numbers, .*; write \(1, 1\)"),
    (conv, {"padding": "SAME"}, r"`padding` must be 'valid' or 'same', got 'SAME'"),
    (conv, {"padding_mode": "zero"}, r"`padding_mode` must be 'zeros', .*, got 'zero'"),
    (
        ls.cost_table,
        {"module": net(), "algorithm": ls.FIARSE(), "capacities": 0.5},
        r"`capacities` must be a .*; write capacities=\[0\.5\]",
    ),
    (
        ls.cost_table,
        {"module": net(), "algorithm": ls.FIARSE(), "capacities": []},
        r"`capacities` must name at least one number",
    ),
    (
        ls.cost_table,
        {"module": net(), "algorithm": ls.FIARSE, "capacities": [0.5]},
        r"`algorithm` must be .* got the class FIARSE; write",
    ),
    (
        ls.largest_that_fits,
        {"module": net(), "algorithm": 0.5, "budget_bytes": 1e6},
        r"`algorithm` must be an instance of Algorithm",
    ),
    (
        ls.largest_that_fits,
        {"module": nn.Linear, "algorithm": ls.LoRA(), "budget_bytes": 1e6},
        r"`module` must be .* got the class Linear; write",
    ),
    (ls.nn.width_plan, {"module": net(), "example_input": EXAMPLE, "exclude": "2"}, r"write exclude=\('2',\)"),
    (ls.nn.width_plan, {"module": nn.Linear, "example_input": EXAMPLE}, r"`module` must be .* got the class Linear"),
    (ls.nn.zample, {"module": net(), "link": ""}, r"`link` must be an instance of Link"),
    (
        ls.nn.zample,
        {"module": net(), "link": ls.functional.zampling.Sigmoid},
        r"`link` must be .* got the class Sigmoid; write Sigmoid",
    ),
    (ls.nn.zample, {"module": nn.Linear}, r"`module` must be .* got the class Linear"),
    (
        testing.check_algorithm,
        {"algorithm": ls.FedAvg, "module": net(), "batch": EXAMPLE},
        r"`algorithm` must be .* got the class FedAvg; write FedAvg",
    ),
    (testing.check_design, {"design": ls.Systematic}, r"`design` must be .* got the class Systematic; write"),
    (testing.check_strategy, {"strategy": ls.Systematic()}, r"`strategy` must be an instance of ShardingStrategy"),
    (testing.check_sampler, {"sampler": ls.Uniform}, r"`sampler` must be .* got the class Uniform"),
    (testing.check_channel_choice, {"channels": 3}, r"`channels` must be an instance of ChannelChoice, got 3"),
    (
        testing.check_partitioner,
        {"partitioner": ls.IIDPartitioner, "num_examples": 9},
        r"`partitioner` must be .* got the class IIDPartitioner",
    ),
    # it waited for a draw of this size for ever
    (
        functional.draw_conditional_poisson,
        {"working_probs": PROBS, "num_terms": 2.5, "num_samples": 5, "generator": torch.Generator()},
        r"`num_terms` must be a whole number, got 2\.5",
    ),
    (
        functional.draw_brewer,
        {"inclusion_probs": torch.tensor([0.5, 0.5]), "num_samples": 2.5, "generator": torch.Generator()},
        r"`num_samples` must be a whole number, got 2\.5",
    ),
]


@pytest.mark.parametrize(
    ("made", "given", "message"), MISTAKES, ids=[f"{made.__name__}-{list(given)[-1]}" for made, given, _ in MISTAKES]
)
def test_a_mistake_is_refused_with_its_remedy(made: Any, given: dict[str, Any], message: str) -> None:
    example = {"example_input": EXAMPLE} if made.__name__.endswith("cost_table") else {}
    with pytest.raises((TypeError, ValueError), match=message):
        made(**example, **given)


def test_unavailable_models_are_lists_of_names(lit: pl.LightningModule) -> None:
    with pytest.raises(TypeError, match=r"`unavailable` lists models of a client, got 1\."):
        ls.MultiModelModule({"words": ls.FederatedModule(lit)}, participation=ls.Uniform(2), unavailable={0: 1})


@pytest.mark.parametrize("wrong", [lambda parameters: None, nn.Identity()], ids=["nothing", "module"])
def test_a_server_optimizer_that_is_none_is_refused_before_training(wrong: Any, lit: Any, data: Any, fit: Fit) -> None:
    with pytest.raises(TypeError, match=r"`server_optimizer` must return a torch optimizer, got "):
        fit(lit, data, server_optimizer=wrong)


def test_harmless_forms_are_accepted() -> None:
    assert conv(kernel_size=[3, 3], padding="same", stride=(1, 1), padding_mode="reflect").kernel_size == (3, 3)
    assert list(ls.cost_table(net(), ls.SpectralSharding(), torch.linspace(0.5, 1, 2).tolist(), EXAMPLE).at) == [
        0.5,
        1.0,
    ]
    assert ls.VirtualClock(DEVICE, macs={0.5: 1e6}).macs == {0.5: 1e6}
    table, of_shares = (ls.cost_table(net(), ls.FIARSE(), ratios, EXAMPLE) for ratios in ([0.5], {0.5: 1.0}))
    assert str(table) == str(of_shares)
    assert ls.VirtualClock(DEVICE, macs=lambda keep_ratio: 1e6 * keep_ratio).macs is not None
    assert ls.NaturalPartitioner(range(3), names={0: 5, 1: 5, 2: 5}.keys()).num_clients == 3
    assert ls.NaturalPartitioner(torch.arange(3), names=torch.arange(4).numpy()).num_clients == 4
    assert data([(torch.zeros(3), 0)] * 2, collate_fn=list, labels=(0, 1)).labels.tolist() == [0, 1]
