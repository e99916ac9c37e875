"""A run's settings: as loggers and checkpoints hold them, and fixed where a new value would be ignored."""

from dataclasses import dataclass
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import yaml
from federation import Fit, seeded
from lightning.pytorch.loggers import CSVLogger
from linear_models import two_lines

import lightning_spectral as ls
from lightning_spectral.plugin.settings import as_config


@dataclass(frozen=True)
class Choice:
    ratio: float = 0.5
    hidden: Any = None


def a_function() -> None: ...


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
        (type("Anything", (), {})(), "Anything"),  # its `repr` is an address
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
        "local_hooks": [ls.ProximalTerm(0.1)],
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
    assert written["data"] == {**dealt, "partitioner": {"name": "IIDPartitioner", "num_clients": 12, "sizes": None}}
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


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        *((kind, name) for kind in (ls.FederatedModule, ls.MultiModelModule) for name in signature(kind).parameters),
        *((ls.FederatedDataModule, name) for name in ("train", "collate_fn", "num_workers")),
    ],
)
def test_an_argument_is_fixed(kind: type, name: str, lit: Any, data: Any) -> None:
    one, (several, _) = ls.FederatedModule(lit, clients_per_round=4), two_lines(ls.Uniform(active=3))
    (built,) = (each for each in (one, several, data) if type(each) is kind)
    own = rf"{kind.__name__} .*: {kind.__name__}\(\.\.\., {name}=\.\.\.\)"
    with pytest.raises(AttributeError, match=f"`{name}` cannot be changed in a {own}"):
        setattr(built, name, 2)


@pytest.mark.parametrize("name", ["partitioner", "seed", "client_val_fraction", "labels"])
def test_what_decides_the_partition_is_fixed_once_it_is_drawn(name: str, data: Any) -> None:
    data.seed = 5
    assert data.partition.num_clients == 12
    with pytest.raises(AttributeError, match=rf"`{name}` cannot be changed in a FederatedDataModule"):
        setattr(data, name, 2)


def test_attributes_of_a_subclass_and_sizes_of_batches_can_be_changed(lit: Any, data: Any, fit: Fit) -> None:
    class Own(ls.FederatedModule):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            self.notes = 1

    model = Own(lit, clients_per_round=4)
    model.notes, data.batch_size, data.drop_last = 2, 5, True
    assert fit(model, data).history.rows
