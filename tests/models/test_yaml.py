"""Every model from YAML, through jsonargparse, on which LightningCLI is built."""

import inspect
import sys
import textwrap
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import lightning_spectral as ls
from lightning_spectral import models

jsonargparse = pytest.importorskip("jsonargparse", reason="comes with the `test` extra")

CONFIGS = {
    "MLP": "{in_features: 6, hidden_features: [8, 4], num_classes: 3}",
    "FEMNISTCNN": "{num_classes: 3, channels: [4, 8], hidden_features: null}",
    "ResNet18": "{num_classes: 3, width: 8, num_groups: 4}",
    "CCT": "{num_classes: 3, width: 8, num_layers: 1, attention_dropout: 0.0}",
    "CharTransformer": "{vocab_size: 3, width: 8, num_heads: 2}",
    "LSTMClassifier": "{num_classes: 3, hidden_size: 8}",
}


def built(text: str, key: str) -> Any:
    parser = jsonargparse.ArgumentParser()
    parser.add_subclass_arguments(pl.LightningModule, key)
    return parser.instantiate(parser.parse_string(text))[key]


def test_the_yaml_of_the_docstring_works() -> None:
    _, yaml = str(inspect.getdoc(models.LitClassifier)).split("it is::\n")
    lit = built(textwrap.dedent(yaml.split("Args:")[0]), "model")
    assert isinstance(lit.model, models.ResNet18)
    assert (lit.model.head.out_features, lit.lr) == (100, 0.05)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("task", [models.LitClassifier, models.LitNextToken])
def test_a_task_and_its_model_come_from_yaml(task: type[models.LitClassifier], name: str) -> None:
    text = f"""
    task:
      class_path: lightning_spectral.models.{task.__name__}
      init_args:
        model:
          class_path: lightning_spectral.models.{name}
          init_args: {CONFIGS[name]}
        num_classes: 3
        lr: 0.05
    """
    lit = built(text, "task")
    assert type(lit) is task
    assert type(lit.model) is getattr(models, name)
    assert lit.lr == 0.05
    assert lit(lit.example_input_array).shape[-1] == 3


def test_every_model_has_a_config_here() -> None:
    classes = [getattr(models, name) for name in models.__all__]
    assert CONFIGS.keys() == {
        cls.__name__ for cls in classes if issubclass(cls, nn.Module) and hasattr(cls, "example_input")
    }


class LitLine(pl.LightningModule):
    """A model of a given width, for YAML."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.line = nn.Linear(width, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.line(batch[0]).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Lines(ls.FederatedDataModule):
    """Data of a given width; data modules for YAML build their data sets themselves."""

    def __init__(self, width: int) -> None:
        super().__init__(TensorDataset(torch.ones(12, width)), ls.IIDPartitioner(num_clients=6))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Lightning 2.6 calls methods that jsonargparse renamed
def test_several_models_come_from_yaml(quiet: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning.pytorch.cli import LightningCLI

    monkeypatch.setattr(sys, "argv", ["train"])
    widths = {"words": 3, "images": 4}

    def part(kind: type, **options: Any) -> dict[str, Any]:
        return {"class_path": f"{kind.__module__}.{kind.__qualname__}", "init_args": options}

    config = {
        "seed_everything": False,
        "model": {
            "models": {n: part(ls.FederatedModule, module=part(LitLine, width=w)) for n, w in widths.items()},
            "participation": part(ls.LossVarianceReduced, active=3, design=part(ls.ConditionalPoisson), measure=2),
            "processors": {2: 0.5, 1: 0.5},
            "unavailable": {1: ["words"]},
        },
        "data": {"modules": {name: part(Lines, width=width) for name, width in widths.items()}},
    }
    cli = LightningCLI(
        ls.MultiModelModule,
        ls.MultiModelDataModule,
        trainer_defaults={**quiet, "max_epochs": 1, "default_root_dir": str(quiet["default_root_dir"])},
        save_config_callback=None,
        run=False,
        args=config,
    )
    cli.trainer.fit(cli.model, cli.datamodule)
    assert cli.model.participation == ls.LossVarianceReduced(active=3, design=ls.ConditionalPoisson(), measure=2)
    assert cli.model.unavailable == {1: ("words",)}
    assert len(cli.model.cohort(0)) > 0
