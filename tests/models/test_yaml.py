"""Every model from a file: by jsonargparse, which LightningCLI is made of."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

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


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("task", [models.LitClassifier, models.LitNextToken])
def test_a_task_and_its_model_come_from_yaml(task: type[models.LitClassifier], name: str) -> None:
    parser = jsonargparse.ArgumentParser()
    parser.add_subclass_arguments(pl.LightningModule, "task")
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
    lit = parser.instantiate_classes(parser.parse_string(text)).task
    assert type(lit) is task
    assert type(lit.model) is getattr(models, name)
    assert lit.lr == 0.05
    assert lit(lit.example_input_array).shape[-1] == 3


def test_every_model_has_a_config_here() -> None:
    kinds = [getattr(models, name) for name in models.__all__]
    assert CONFIGS.keys() == {
        kind.__name__ for kind in kinds if issubclass(kind, nn.Module) and hasattr(kind, "example_input")
    }


@pytest.mark.filterwarnings("ignore:The 'train_dataloader' does not have many workers")
def test_the_command_line_of_lightning_trains_one(quiet: dict[str, Any]) -> None:
    from lightning.pytorch.cli import LightningCLI

    config = {
        "seed_everything": False,
        "model": {
            "class_path": "lightning_spectral.models.LitClassifier",
            "init_args": {
                "model": {
                    "class_path": "lightning_spectral.models.MLP",
                    "init_args": {"in_features": 6, "hidden_features": [8], "num_classes": 3},
                },
                "num_classes": 3,
            },
        },
    }
    trainer_defaults = {**quiet, "max_steps": 1, "default_root_dir": str(quiet["default_root_dir"])}
    cli = LightningCLI(
        pl.LightningModule,
        subclass_mode_model=True,
        trainer_defaults=trainer_defaults,
        save_config_callback=None,
        run=False,
        args=config,
    )
    before = cli.model.model.head.weight.detach().clone()
    cli.trainer.fit(cli.model, DataLoader(TensorDataset(torch.ones(4, 6), torch.arange(4) % 3), batch_size=4))
    assert cli.trainer.global_step == 1
    assert not torch.equal(cli.model.model.head.weight, before)


def test_the_reference_has_every_model() -> None:
    reference = (Path(__file__).parents[2] / "docs" / "api.md").read_text()
    assert not [name for name in models.__all__ if f":: lightning_spectral.models.{name}\n" not in reference]


def test_the_package_does_not_need_its_models() -> None:
    code = "import sys, lightning_spectral; assert 'lightning_spectral.models' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_models_know_nothing_of_the_package() -> None:
    folder = Path(models.__file__).parent
    imports = [line for file in folder.glob("*.py") for line in file.read_text().splitlines() if "import" in line]
    ours = [line for line in imports if line.startswith(("from lightning_spectral", "import lightning_spectral"))]
    assert ours
    assert all(line.startswith("from lightning_spectral.models.") for line in ours)
