"""Every number and flag that a public class or function takes is checked, by its name.

The arguments are found by their type hints, so that a new public class is tested as soon as it has a name in `PUBLIC`.
"""

import dataclasses
import inspect
import math
import re
import types
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Union, get_args, get_origin

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from public_names import PUBLIC
from torch import nn
from torch.utils.data import TensorDataset

import lightning_spectral as ls


class LitLine(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(3, 1)

    def training_step(self, batch: Any) -> Any: ...


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 2))


def by_width() -> ls.FederatedModule:
    lit = LitLine()
    lit.forward, lit.example_input_array = lit.line.forward, torch.zeros(2, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ls.SpectralWarning)  # it has no channel to cut
        return ls.FederatedModule(lit, algorithm=ls.WidthSharding(), clients_per_round=1)


EXAMPLE, TOY = torch.zeros(1, 8), TensorDataset(torch.zeros(12, 3))
DEVICE = ls.simulation.DeviceProfile(1.0, 1.0, 1.0)

# What must be given in addition to the argument that is wrong.
NEEDED: Mapping[str, Callable[[], dict[str, Any]]] = {
    "ClientDropout": lambda: {"probability": 0.5},
    "DeviceProfile": lambda: {"downlink": 1.0, "uplink": 1.0, "macs_per_second": 1.0},
    "DirichletPartitioner": lambda: {"num_clients": 3, "alpha": 1.0},
    "EffectiveLRClip": lambda: {"tau": 10.0},
    "FederatedDataModule": lambda: {"train": TOY, "partitioner": ls.IIDPartitioner(2)},
    "FederatedModule": lambda: {"module": LitLine()},
    "FrobeniusDecay": lambda: {"coefficients": {}},
    "GradientClip": lambda: {"max_norm": 1.0},
    "IIDPartitioner": lambda: {"num_clients": 3},
    "LossVarianceReduced": lambda: {"active": 2},
    "MultiModelModule": lambda: {
        "models": {"words": ls.FederatedModule(LitLine())},
        "participation": ls.LossVarianceReduced(active=2),
    },
    "PachinkoPartitioner": lambda: {"num_clients": 3, "superclasses": [0, 0, 1], "alpha": 1.0, "beta": 10.0},
    "ProximalTerm": lambda: {"mu": 0.1},
    "RoundRobin": lambda: {"active": 2},
    "SpectralShardedConv1d": lambda: {"in_channels": 4, "out_channels": 4, "kernel_size": (3,), "num_terms": 2},
    "SpectralShardedConv2d": lambda: {"in_channels": 4, "out_channels": 4, "kernel_size": (3, 3), "num_terms": 2},
    "SpectralShardedConv3d": lambda: {"in_channels": 4, "out_channels": 4, "kernel_size": (3, 3, 3), "num_terms": 2},
    "SpectralShardedLinear": lambda: {"in_features": 4, "out_features": 4, "num_terms": 2},
    "StaleUpdateVarianceReduced": lambda: {"active": 2},
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
LEFT_OUT = {
    "ClientRow",
    "ClientTable",
    "CostTable",
    "load_user_module",
}
MAY_BE_NEGATIVE = {"absent", "seed"}
MAY_BE_INFINITE = re.compile(
    r"budget|every_n_seconds|slack|clip_|deadline|downlink$|uplink$|macs_per|max_norm|EffectiveLRClip\.tau"
)


def alternatives(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def arguments() -> Iterator[tuple[str, str, Any]]:
    """Public name, argument and type hint of everything that takes arguments of our own."""
    for name, made in PUBLIC.items():
        function = made.__init__ if isinstance(made, type) else made
        is_ours = getattr(function, "__module__", "").startswith("lightning_spectral") or dataclasses.is_dataclass(made)
        if is_ours and not inspect.isabstract(made) and name not in LEFT_OUT:
            for parameter in inspect.signature(function, eval_str=True).parameters.values():
                yield name, parameter.name, parameter.annotation


def wrong_values(name: str, argument: str, hint: Any) -> Iterator[Any]:
    found = alternatives(hint)
    if bool in found:
        yield from ("no", 1)
    if int in found or float in found:
        yield from ("8", "a word", True, math.nan, [[2]], object())
        yield from () if argument in MAY_BE_NEGATIVE else (-1,)
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
    (ls.server.FedAvgM, {"lr": np.float32(0.5), "momentum": np.float64(0.5)}, {"lr": 0.5, "momentum": 0.5}),
    (ls.server.FedAdam, {"betas": [np.float64(0.5), 0]}, {"betas": (0.5, 0)}),
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
    model = ls.FederatedModule(LitLine(), clients_per_round=three, local_epochs=three, seed=three)
    data = ls.FederatedDataModule(TOY, ls.IIDPartitioner(2), batch_size=three, eval_batch_size=three, seed=three)
    found = [model.clients_per_round, model.local_epochs, model.seed, data.batch_size, data.eval_batch_size, data.seed]
    assert [type(number) for number in found] == [int] * 6
