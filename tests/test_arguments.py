"""Every number and flag that a public class or function takes is checked, by its name; so are plausible mistakes.

The arguments are found by their type hints, so that a new public class is tested as soon as it has a name in `PUBLIC`.
"""

import dataclasses
import inspect
import math
import re
import types
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Union, get_args, get_origin

import lightning.pytorch as pl
import numpy as np
import pandas as pd
import pytest
import torch
from federation import Fit
from public_names import PUBLIC
from torch import nn
from torch.utils.data import TensorDataset
from toy_models import LitNet

import lightning_spectral as ls
from lightning_spectral import functional, testing
from lightning_spectral.functional.sampling.conditional_poisson import working_open_terms


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 2))


def by_width() -> ls.FederatedModule:
    lit = LitNet(nn.Linear(3, 1), example=torch.zeros(2, 3))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ls.SpectralWarning)  # it has no channel to cut
        return ls.FederatedModule(lit, algorithm=ls.WidthSharding(), clients_per_round=1)


EXAMPLE, TOY = torch.zeros(2, 8), TensorDataset(torch.zeros(12, 3))
DEVICE = ls.simulation.DeviceProfile(1.0, 1.0, 1.0)

# What must be given in addition to the argument that is wrong.
NEEDED: Mapping[str, Callable[[], dict[str, Any]]] = {
    "Attack": lambda: {"lie": "scale", "strength": 1.0, "clients": 0.5},
    "ClientDropout": lambda: {"probability": 0.5},
    "ClientPrivacy": lambda: {"clip": 1.0, "delta": 1e-5, "noise_multiplier": 1.0},
    "DeviceProfile": lambda: {"downlink": 1.0, "uplink": 1.0, "macs_per_second": 1.0},
    "DirichletPartitioner": lambda: {"num_clients": 3, "alpha": 1.0},
    "compare_clients": lambda: {"make": LitNet, "data": None, "folder": "there", "trainer": {}},
    "EffectiveLRClip": lambda: {"tau": 10.0},
    "ExamplePrivacy": lambda: {"clip": 1.0, "delta": 1e-5, "noise_multiplier": 1.0},
    "FedBuff": lambda: {"concurrency": 3},
    "FederatedDataModule": lambda: {"train": TOY, "partitioner": ls.IIDPartitioner(2)},
    "FederatedModule": lambda: {"module": LitNet(nn.Linear(3, 1))},
    **dict.fromkeys(("Krum", "MultiKrum"), lambda: {"num_liars": 1}),
    "FrobeniusDecay": lambda: {"coefficients": {}},
    "GradientClip": lambda: {"max_norm": 1.0},
    "IIDPartitioner": lambda: {"num_clients": 3},
    "LocalNoise": lambda: {"clip": 1.0, "noise_multiplier": 1.0},
    "LossVarianceReduced": lambda: {"active": 2},
    "MultiModelModule": lambda: {
        "models": {"words": ls.FederatedModule(LitNet(nn.Linear(3, 1)))},
        "participation": ls.LossVarianceReduced(active=2),
    },
    "LabelsPerClient": lambda: {"num_clients": 3},
    "PachinkoPartitioner": lambda: {"num_clients": 3, "superclasses": [0, 0, 1], "alpha": 1.0, "beta": 10.0},
    "Personal": lambda: {"patterns": ["head.*"]},
    "ProximalTerm": lambda: {"mu": 0.1},
    "RoundRobin": lambda: {"active": 2},
    "ShardPartitioner": lambda: {"num_clients": 3},
    "SizeLaw": lambda: {"law": "power", "spread": 1.0},
    "SpectralShardedConv1d": lambda: {"in_channels": 4, "out_channels": 4, "kernel_size": (3,), "num_terms": 2},
    "SpectralShardedConv2d": lambda: {"in_channels": 4, "out_channels": 4, "kernel_size": (3, 3), "num_terms": 2},
    "SpectralShardedConv3d": lambda: {"in_channels": 4, "out_channels": 4, "kernel_size": (3, 3, 3), "num_terms": 2},
    "SpectralShardedLinear": lambda: {"in_features": 4, "out_features": 4, "num_terms": 2},
    "StaleUpdateVarianceReduced": lambda: {"active": 2},
    "TopK": lambda: {"share": 0.1},
    "Uniform": lambda: {"active": 2},
    "UpdateVarianceReduced": lambda: {"active": 2},
    "VirtualClock": lambda: {"profiles": DEVICE},
    "cost_table": lambda: {
        "module": net(),
        "algorithm": ls.SpectralSharding(),
        "capacities": [0.5],
        "example_input": EXAMPLE,
    },
    "largest_that_fits": lambda: {"module": net(), "algorithm": ls.FIARSE(), "example_input": EXAMPLE},
    "narrow_model": lambda: {"model": by_width()},
    "replace_layers": lambda: {"module": net(), "keep_ratio": 0.5},
    "spectral_start": lambda: {"module": net(), "keep_ratio": 0.5},
    "standardize_images": lambda: {"images": torch.zeros(2, 3, 4, 4)},
    "zample": lambda: {"module": net()},
}
# Only the package creates the first ones; the last passes its arguments on to torch.
LEFT_OUT = {"ClientRow", "ClientTable", "CostTable", "load_user_module"}
MAY_BE_INFINITE = re.compile(
    r"budget|every_n_seconds|slack|clip_|deadline|downlink$|uplink$|macs_per|max_norm|EffectiveLRClip\.tau"
)


def arguments() -> Iterator[tuple[str, str, Any]]:
    """Public name, argument and type hint of everything that takes arguments of our own."""
    for name, made in PUBLIC.items():
        function = made.__init__ if isinstance(made, type) else made
        is_ours = getattr(function, "__module__", "").startswith("lightning_spectral") or dataclasses.is_dataclass(made)
        if is_ours and not inspect.isabstract(made) and name not in LEFT_OUT:
            for parameter in inspect.signature(function, eval_str=True).parameters.values():
                yield name, parameter.name, parameter.annotation


def wrong_values(name: str, argument: str, hint: Any) -> Iterator[Any]:
    found = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    if bool in found:
        yield from ("no", 1)
    if int in found or float in found:
        yield from ("8", "a word", True, math.nan, [[2]], object())
        yield from () if argument in {"absent", "seed", "strength"} else (-1,)
        yield from () if type(None) in found else (None,)
        yield from () if MAY_BE_INFINITE.search(f"{name}.{argument}") else (math.inf,)
    if int in found and float not in found:
        yield from (2.5, np.float64(2.0))
    for kind in found:
        if get_origin(kind) in (Sequence, tuple) and float in get_args(kind):
            yield from (["8", "8"], [True, True], [math.nan] * 2, [-1.0, -1.0])
        if get_origin(kind) is Mapping and get_args(kind) in ((str, float), (str, int)):
            yield from ({"*": "8"}, {"*": True}, {"*": math.nan}, {"*": -1})


CHECKED = [found for found in arguments() if next(wrong_values(*found), None) is not None]


@pytest.mark.parametrize(("name", "argument", "hint"), CHECKED, ids=[f"{name}.{of}" for name, of, _ in CHECKED])
def test_a_wrong_number_or_flag_is_refused_by_name(name: str, argument: str, hint: Any) -> None:
    given = NEEDED.get(name, dict)()
    if argument.startswith("budget"):
        given.pop("budget_bytes", None)  # exactly one may be given
    for value in wrong_values(name, argument, hint):
        with pytest.raises((TypeError, ValueError), match=rf"`{argument}[`\[]"):
            PUBLIC[name](**{**given, argument: value})


def test_the_walk_finds_arguments_of_each_kind() -> None:
    found = {f"{name}.{argument}" for name, argument, _ in CHECKED}
    assert found >= {"FederatedModule.seed", "FedAdam.betas", "SpectralSharding.keep_ratio", "LayerChoices.split"}
    assert found >= {"Clip.absorbing", "LossVarianceReduced.measure", "largest_that_fits.budget_macs"}


NUMPY: list[Any] = [
    (ls.FedAvgM, {"lr": np.float32(0.5), "momentum": np.float64(0.5)}, {"lr": 0.5, "momentum": 0.5}),
    (ls.FedAdam, {"betas": [np.float64(0.5), 0]}, {"betas": (0.5, 0)}),
    (ls.SpectralSharding, {"keep_ratio": np.float64(0.5), "clip_tau": np.int64(3)}, {"keep_ratio": 0.5, "clip_tau": 3}),
    (ls.SpectralSharding, {"keep_ratio": {np.float64(0.5): np.float64(1.0)}}, {"keep_ratio": {0.5: 1.0}}),
    (ls.SpectralSharding, {"keep_ratio": [np.float64(0.5), 1]}, {"keep_ratio": [0.5, 1]}),
    (ls.Zampling, {"compression": np.int64(8), "gain": np.float64(2.0)}, {"compression": 8, "gain": 2.0}),
    (ls.LayerChoices, {"split": {"*.qkv": np.int64(3)}}, {"split": {"*.qkv": 3}}),
    (ls.Schedule, {"values": {np.int64(0): ls.TopN()}}, {"values": {0: ls.TopN()}}),
    (ls.DirichletPartitioner, {"num_clients": np.int64(3), "alpha": 1}, {"num_clients": 3, "alpha": 1}),
    (
        ls.PachinkoPartitioner,
        {"num_clients": 3, "superclasses": np.array([0, 1]), "alpha": 1, "beta": np.float64(2.0)},
        {"num_clients": 3, "superclasses": (0, 1), "alpha": 1, "beta": 2.0},
    ),
]


@pytest.mark.parametrize(("kind", "given", "plain"), NUMPY)
def test_numbers_of_numpy_become_plain_ones(kind: Any, given: dict[str, Any], plain: dict[str, Any]) -> None:
    # the representation is what a checkpoint compares
    assert repr(kind(**given)) == repr(kind(**plain))


def test_numbers_of_numpy_become_plain_ones_in_modules() -> None:
    three = np.int64(3)
    model = ls.FederatedModule(LitNet(nn.Linear(3, 1)), clients_per_round=three, local_epochs=three, seed=three)
    data = ls.FederatedDataModule(TOY, ls.IIDPartitioner(2), batch_size=three, eval_batch_size=three, seed=three)
    found = [model.clients_per_round, model.local_epochs, model.seed, data.batch_size, data.eval_batch_size, data.seed]
    assert [type(number) for number in found] == [int] * 6


PROBS = torch.tensor([0.75, 0.5, 0.5, 0.25])


def conv(**options: Any) -> nn.Module:
    return ls.SpectralShardedConv2d(
        **{"in_channels": 4, "out_channels": 4, "kernel_size": (3, 3), **options}, num_terms=2
    )


def data(train: Any = TOY, **options: Any) -> ls.FederatedDataModule:
    return ls.FederatedDataModule(train, **{"partitioner": ls.IIDPartitioner(2), **options})


def federated(**options: Any) -> ls.FederatedModule:
    return ls.FederatedModule(LitNet(nn.Linear(3, 1)), **options)


def costs(**options: Any) -> Any:
    given = {"module": net(), "algorithm": ls.FIARSE(), "capacities": [0.5], "example_input": EXAMPLE}
    return ls.cost_table(**{**given, **options})


def fitting(**options: Any) -> Any:
    return ls.largest_that_fits(**{"module": net(), "algorithm": ls.LoRA(), "budget_bytes": 1e6, **options})


def drawn(num_samples: Any) -> Any:
    return ls.Brewer().sample(PROBS, num_samples, torch.Generator())


MISTAKES: list[tuple[Any, dict[str, Any], str]] = [
    (data, {"train": None}, r"`train` must be a map-style data set, .*, got None; pass the data set"),
    (data, {"train": pd.DataFrame({"age": [61, 70]})}, r"`train` must be a data set, got a DataFrame; write Tensor"),
    (data, {"train": "data/train"}, r"`train` must be a map-style data set, .*, got 'data/train'"),
    (data, {"train": TensorDataset}, r"`train` must be a map-style data set, .*TensorDataset"),
    (data, {"val": "data/val"}, r"`val` must be a data set, a dataloader or a list of them, got 'data/val'"),
    (data, {"test": TensorDataset}, r"`test` must be a data set"),
    (data, {"collate_fn": "pad"}, r"`collate_fn` must be a function .*, got 'pad'"),
    (data, {"labels": "label"}, r"`labels` must list one entry .*if it is a column, write labels=table\['label'\]"),
    (data, {"labels": dict.fromkeys(range(12), 1)}, r"`labels` must list one entry per example, .*, got a dict"),
    (data, {"labels": 2}, r"`labels` must list one entry per example, .*, got 2\."),
    (federated, {"filters": ls.TopK(0.1)}, r"`filters` must be a list, got .*; write filters=\[TopK\(share=0\.1\)\]"),
    (
        federated,
        {"filters": [ls.TopK]},
        r"`filters` must be an instance of Filter, got the class TopK; write TopK\(\.\.\.",
    ),
    (federated, {"filters": [None]}, r"`filters` must be an instance of Filter, got None"),
    (federated, {"filters": ["int8"]}, r"`filters` must be an instance of Filter, got the string 'int8'"),
    (federated, {"filters": 3}, r"`filters` must be an instance of Sequence, got 3"),
    (
        federated,
        {"privacy": None},
        r"FederatedModule has no argument `privacy`: write filters=\[ClientPrivacy\(\.\.\.\)\]",
    ),
    (federated, {"secure_sums": None}, r"FederatedModule has no argument `secure_sums`: write filters=\[SecureSums\("),
    (
        federated,
        {"update_bound": 1},
        r"FederatedModule has no argument `update_bound`: write filters=\[UsualUpdateNorm",
    ),
    (federated, {"personal": ["*"]}, r"FederatedModule has no argument `personal`: write filters=\[Personal\("),
    (federated, {"compression": None}, r"FederatedModule has no argument `compression`: write filters=\[TopK\("),
    (ls.FedAvg, {"personal": ["*"]}, r"FedAvg has no argument `personal`: write FederatedModule\(.*filters=\[Personal"),
    (ls.SpectralSharding, {"personal_epochs": 1}, r"no argument `personal_epochs`: write .*Personal\(.*, epochs=1"),
    (ls.Scaffold, {"compression": ls.Int8()}, r"Scaffold has no argument `compression`: write .*filters=\[TopK"),
    (ls.FedAvg, {"lr": 0.1}, r"FedAvg has no argument `lr`: write the rate into the optimizer of"),
    (ls.FIARSE, {"num_rounds": 9}, r"FIARSE has no argument `num_rounds`: write Trainer\(max_epochs=100\)"),
    (ls.FedAvg, {"strategy": ls.TopN()}, r"FedAvg has no argument `strategy`: write algorithm=ls.SpectralSharding"),
    (ls.LoRA, {"fraction_train": 0.1}, r"`fraction_train`: write FederatedModule\(\.\.\., clients_per_round=0.1"),
    (ls.LoRA, {"buffers": {}}, r"LoRA has no argument `buffers`: write FederatedModule\(\.\.\., buffers=\{"),
    (ls.Personal, {"patterns": []}, r"Personal needs patterns of names, .*; got none"),
    (ls.Personal, {"patterns": "head"}, r"`patterns` must be a sequence of patterns, got 'head'; write patterns="),
    (ls.NaturalPartitioner, {"keys": "user"}, r"`keys` must list one entry .* write keys=table\['user'\]"),
    (ls.NaturalPartitioner, {"keys": {0: "romeo", 1: "juliet"}}, r"`keys` must list one entry .*, got a dict"),
    (ls.NaturalPartitioner, {"keys": {"romeo", "juliet"}}, r"`keys` must list one entry .*, got a set"),
    (ls.NaturalPartitioner, {"keys": iter("ab")}, r"`keys` must list one entry .*, got <str.*iterator"),
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
    (ls.nn.FrobeniusDecay, {"coefficients": {0: 1e-4}}, r"maps names of layers to numbers, got the key 0"),
    (ls.ClientEvaluation, {"clients": np.array([1, 2])}, r"`clients` must be a whole number"),
    (ls.LossVarianceReduced, {"active": 2, "measure": np.array([1, 2])}, r"`measure` must be a whole number"),
    (conv, {"kernel_size": 3}, r"`kernel_size` must be 2 numbers, one for each dimension, got 3; write \(3, 3\)"),
    (conv, {"stride": 2}, r"`stride` must be 2 numbers, .*; write \(2, 2\)"),
    (conv, {"stride": (0, 1)}, r"`stride` must be at least 1, got 0"),
    (conv, {"dilation": (1,)}, r"`dilation` must be 2 numbers"),
    (conv, {"padding": 1}, r"`padding` must be 2 numbers, .*; write \(1, 1\)"),
    (conv, {"padding": "SAME"}, r"`padding` must be 'valid' or 'same', got 'SAME'"),
    (conv, {"padding_mode": "zero"}, r"`padding_mode` must be 'zeros', .*, got 'zero'"),
    (costs, {"capacities": 0.5}, r"`capacities` must be a .*; write capacities=\[0\.5\]"),
    (costs, {"capacities": []}, r"`capacities` must name at least one number"),
    (costs, {"algorithm": ls.FIARSE}, r"`algorithm` must be .* got the class FIARSE; write"),
    (fitting, {"algorithm": 0.5}, r"`algorithm` must be an instance of Algorithm"),
    (fitting, {"module": nn.Linear}, r"`module` must be .* got the class Linear; write"),
    (ls.nn.width_plan, {"module": net(), "example_input": EXAMPLE, "exclude": "2"}, r"write exclude=\('2',\)"),
    (ls.nn.width_plan, {"module": nn.Linear, "example_input": EXAMPLE}, r"`module` must be .* got the class Linear"),
    (ls.nn.zample, {"module": net(), "link": ""}, r"`link` must be an instance of Link"),
    (ls.nn.zample, {"module": net(), "link": functional.zampling.Sigmoid}, r"got the class Sigmoid; write Sigmoid"),
    (ls.nn.zample, {"module": nn.Linear}, r"`module` must be .* got the class Linear"),
    (testing.check_algorithm, {"algorithm": ls.FedAvg, "module": net(), "batch": EXAMPLE}, r"FedAvg; write FedAvg"),
    (testing.check_design, {"design": ls.Systematic}, r"`design` must be .* got the class Systematic; write"),
    (testing.check_strategy, {"strategy": ls.Systematic()}, r"`strategy` must be an instance of ShardingStrategy"),
    (testing.check_sampler, {"sampler": ls.Uniform}, r"`sampler` must be .* got the class Uniform"),
    (testing.check_channel_choice, {"channels": 3}, r"`channels` must be an instance of ChannelChoice, got 3"),
    (testing.check_partitioner, {"partitioner": ls.IIDPartitioner, "num_examples": 9}, r"got the class IIDPartitioner"),
    (working_open_terms, {"working_probs": PROBS, "num_terms": 2.5}, r"`num_terms` must be a whole number, got 2\.5"),
    (drawn, {"num_samples": 2.5}, r"`num_samples` must be a whole number, got 2\.5"),
]


@pytest.mark.parametrize(
    ("made", "given", "message"), MISTAKES, ids=[f"{made.__name__}-{list(given)[-1]}" for made, given, _ in MISTAKES]
)
def test_a_mistake_is_refused_with_its_remedy(made: Any, given: dict[str, Any], message: str) -> None:
    is_of_another_type = "no argument `" in message or "an instance of" in message
    with pytest.raises(TypeError if is_of_another_type else (TypeError, ValueError), match=message):
        made(**given)


def test_unavailable_models_are_lists_of_names(lit: pl.LightningModule) -> None:
    with pytest.raises(TypeError, match=r"`unavailable` lists models of a client, got 1\."):
        ls.MultiModelModule({"words": ls.FederatedModule(lit)}, participation=ls.Uniform(2), unavailable={0: 1})


@pytest.mark.parametrize("wrong", [lambda parameters: None, nn.Identity(), torch.optim.LBFGS])
def test_a_server_optimizer_that_is_none_is_refused_before_training(wrong: Any, lit: Any, data: Any, fit: Fit) -> None:
    rule = "must return a torch optimizer, got |steps once a round, without losses, which LBFGS needs"
    with pytest.raises((TypeError, ValueError), match=f"`server_optimizer` ({rule})"):
        fit(lit, data, server_optimizer=wrong)


def test_a_server_that_would_step_by_a_thousandth_is_warned_of(lit: Any) -> None:
    with pytest.warns(ls.errors.SpectralWarning, match=r"a thousandth of averaging; write functools\.partial") as said:
        ls.FederatedModule(lit, server_optimizer=torch.optim.SGD)
    assert said[0].filename == __file__
    ls.FederatedModule(lit, server_optimizer=partial(torch.optim.SGD, lr=1.0))  # warnings are errors


def test_harmless_forms_are_accepted() -> None:
    assert conv(kernel_size=[3, 3], padding="same", stride=(1, 1), padding_mode="reflect").kernel_size == (3, 3)
    spectral = ls.cost_table(net(), ls.SpectralSharding(), torch.linspace(0.5, 1, 2).tolist(), EXAMPLE)
    assert list(spectral.at) == [0.5, 1.0]
    assert ls.VirtualClock(DEVICE, macs={0.5: 1e6}).macs == {0.5: 1e6}
    table, of_shares = (ls.cost_table(net(), ls.FIARSE(), ratios, EXAMPLE) for ratios in ([0.5], {0.5: 1.0}))
    assert str(table) == str(of_shares)
    assert ls.VirtualClock(DEVICE, macs=lambda keep_ratio: 1e6 * keep_ratio).macs is not None
    assert ls.NaturalPartitioner(range(3), names={0: 5, 1: 5, 2: 5}.keys()).num_clients == 3
    assert ls.NaturalPartitioner(torch.arange(3), names=torch.arange(4).numpy()).num_clients == 4
    assert data([(torch.zeros(3), 0)] * 2, collate_fn=list, labels=(0, 1)).labels.tolist() == [0, 1]


def test_an_algorithm_of_ones_own_has_its_own_arguments() -> None:
    class OwnRate(ls.FedAvg):
        def __init__(self, lr: float) -> None:
            object.__setattr__(self, "lr", lr)

    assert OwnRate(lr=0.5) == OwnRate(0.5)
    with pytest.raises(TypeError, match="OwnRate has no argument `strategy`: write"):
        OwnRate(lr=0.5, strategy=None)  # type: ignore[call-arg]
