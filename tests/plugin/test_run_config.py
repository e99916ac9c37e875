"""A run's settings as loggers and checkpoints hold them: keys to filter and group by."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import yaml
from federation import Fit, seeded
from lightning.pytorch.loggers import CSVLogger

import lightning_spectral as ls
from lightning_spectral.plugin.settings import as_config


@dataclass(frozen=True)
class Choice:
    ratio: float = 0.5
    hidden: Any = None


def a_function() -> None: ...


class Anything:
    """Its ``repr`` is an address."""


@pytest.mark.parametrize(
    ("value", "config"),
    [
        (None, None),
        (True, True),
        (np.float64(0.5), 0.5),
        (np.int64(3), 3),
        (Choice(), {"name": "Choice", "ratio": 0.5, "hidden": None}),
        ([Choice(1.0)], {"0": {"name": "Choice", "ratio": 1.0, "hidden": None}}),
        ((0.2, 0.4), [0.2, 0.4]),
        ({"a": Choice}, {"a": "Choice"}),
        ({0.2: 0.6, 0.4: 0.4}, "{0.2: 0.6, 0.4: 0.4}"),
        (ls.Schedule({0: ls.TopN()}), {"name": "Schedule", "values": "{0: TopN()}"}),
        (partial(a_function, lr=0.1), {"name": "a_function", "lr": 0.1}),
        (Anything(), "Anything"),
        (list(range(1000)), f"{str(list(range(1000)))[:197]}..."),
    ],
)
def test_a_setting_becomes_plain_values_under_names(value: Any, config: Any) -> None:
    made = as_config(value)
    assert made == config
    assert type(made) is type(config)


def test_a_plan_is_what_was_chosen(lit: Any) -> None:
    choices = ls.LayerChoices(exclude=["net.0"])
    sharding = ls.SpectralSharding(layers=ls.validate(lit, layers=choices))
    assert as_config(sharding) == as_config(ls.SpectralSharding(layers=choices))


def test_loggers_get_every_choice_as_a_key(lit: Any, data: Any, fit: Fit, tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path, name=None, version="csv")
    options = {
        "algorithm": ls.SpectralSharding(keep_ratio=0.5),
        "local_hooks": [ls.client.ProximalTerm(0.1)],
        "seed": 7,
    }
    fit(lit, data, **options, clients_per_round=3, local_epochs=2, trainer={"logger": logger})
    written = yaml.safe_load((tmp_path / "csv/hparams.yaml").read_text())
    federation, algorithm = written["federation"], written["federation"]["algorithm"]
    assert (algorithm["name"], algorithm["keep_ratio"], algorithm["design"]) == ("SpectralSharding", 0.5, None)
    assert algorithm["strategy"] == {"name": "Collective", "cohort": "group"}
    assert federation["participation"] == {"name": "UniformParticipation", "clients_per_round": 3}
    assert federation["server_optimizer"] == {"name": "FedAvgM", "lr": 1.0, "momentum": 0.0}
    assert federation["local_hooks"] == {"0": {"name": "ProximalTerm", "mu": 0.1}}
    assert (federation["seed"], federation["local_epochs"]) == (7, 2)
    dealt = {"batch_size": 4, "num_clients": 12, "num_examples": 120, "seed": 0}
    assert written["data"] == {**dealt, "partitioner": {"name": "IIDPartitioner", "num_clients": 12}}
    assert written["user_module"]["lr"] == 0.1


def test_loggers_get_the_choices_of_each_model(lit_mlp: Any, toy: Any, quiet: Any, tmp_path: Path) -> None:
    algorithms = {"dense": ls.FedAvg(), "bits": ls.Zampling(4, degree=3)}
    models = {name: ls.FederatedModule(seeded(lit_mlp), algorithm=one) for name, one in algorithms.items()}
    model = ls.MultiModelModule(models, participation=ls.Uniform(active=2), processors={2: 0.5, 1: 0.5})
    data = {
        name: ls.FederatedDataModule(toy, ls.IIDPartitioner(8), batch_size=size)
        for name, size in [("dense", 8), ("bits", 4)]
    }
    logger = CSVLogger(tmp_path, name=None, version="csv")
    pl.Trainer(max_epochs=1, **{**quiet, "logger": logger}).fit(model, ls.MultiModelDataModule(data))
    written = yaml.safe_load((tmp_path / "csv/hparams.yaml").read_text())
    assert written["federation"]["participation"]["name"] == "Uniform"
    assert written["federation"]["processors"] == "{2: 0.5, 1: 0.5}"
    names = {name: part["algorithm"]["name"] for name, part in written["federation"]["models"].items()}
    assert names == {"dense": "FedAvg", "bits": "Zampling"}
    assert {name: part["batch_size"] for name, part in written["data"].items()} == {"dense": 8, "bits": 4}
    assert written["user_module"]["bits"]["width"] == 12
