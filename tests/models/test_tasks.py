"""The LightningModules, in a plain Trainer, in a federation, and from YAML."""

import inspect
import math
import sys
import textwrap
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from federation import Fit
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from toy_models import LitNet

import lightning_spectral as ls
from lightning_spectral import models

pytestmark = pytest.mark.filterwarnings("ignore:The '.*_dataloader' does not have many workers")


class LearningRates(Callback):
    def __init__(self) -> None:
        self.rates: list[float] = []

    def on_train_batch_start(self, trainer: pl.Trainer, *args: Any) -> None:
        self.rates.append(trainer.optimizers[0].param_groups[0]["lr"])


def fit_centrally(trainer: pl.Trainer, lit: pl.LightningModule, dataset: TensorDataset) -> None:
    trainer.fit(lit, DataLoader(dataset, batch_size=30), DataLoader(dataset, batch_size=30))


def mlp() -> models.MLP:
    return models.MLP(in_features=6, hidden_features=(8, 8), num_classes=3)


def cosine(num_steps: int, lr: float, eta_min: float) -> list[float]:
    """Loshchilov & Hutter (2017), equation (5), without restarts."""
    return [eta_min + (lr - eta_min) * (1 + math.cos(math.pi * t / num_steps)) / 2 for t in range(num_steps)]


def test_the_cosine_spans_the_steps_of_a_plain_trainer(toy: TensorDataset, quiet: dict[str, Any]) -> None:
    watch = LearningRates()
    lit = models.LitClassifier(mlp(), num_classes=3, lr=0.2, eta_min=0.02)
    fit_centrally(pl.Trainer(max_epochs=2, callbacks=[watch], **quiet), lit, toy)
    assert watch.rates == pytest.approx(cosine(8, 0.2, 0.02))


def test_the_cosine_spans_the_rounds_of_a_federation(data: ls.FederatedDataModule, fit: Fit) -> None:
    lit = models.LitClassifier(mlp(), num_classes=3, lr=0.2, eta_min=0.02)
    history = fit(lit, data, clients_per_round=2, max_epochs=5).history
    assert history.column("fl/lr") == pytest.approx(cosine(5, 0.2, 0.02))


def test_a_run_of_unknown_length_is_refused(toy: TensorDataset, quiet: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="needs the length of the run; set the Trainer's `max_epochs`"):
        fit_centrally(pl.Trainer(max_epochs=-1, **quiet), models.LitClassifier(mlp(), 3), toy)


def test_the_optimizer_has_the_options_given(toy: TensorDataset, quiet: dict[str, Any]) -> None:
    lit = models.LitClassifier(mlp(), num_classes=3, lr=0.3, momentum=0.7, weight_decay=0.01)
    trainer = pl.Trainer(max_epochs=1, **quiet)
    fit_centrally(trainer, lit, toy)
    (group,) = trainer.optimizers[0].param_groups
    assert (group["initial_lr"], group["momentum"], group["weight_decay"]) == (0.3, 0.7, 0.01)


@pytest.mark.parametrize("stage", ["val", "test"])
def test_loss_and_accuracy_are_those_of_all_examples(stage: str, toy: TensorDataset, quiet: dict[str, Any]) -> None:
    lit = models.LitClassifier(mlp(), num_classes=3)
    trainer, loader = pl.Trainer(**quiet), DataLoader(toy, batch_size=50)  # 50, 50 and 20
    (metrics,) = {"val": trainer.validate, "test": trainer.test}[stage](lit, loader, verbose=False)
    inputs, targets = toy.tensors
    with torch.no_grad():
        logits = lit(inputs)
    assert metrics[f"{stage}_loss"] == pytest.approx(F.cross_entropy(logits, targets).item(), rel=1e-5)
    assert metrics[f"{stage}_accuracy"] == pytest.approx((logits.argmax(1) == targets).double().mean().item())


class Fixed(nn.Module):
    """A language model of three tokens that predicts the same at every position."""

    def __init__(self) -> None:
        super().__init__()
        self.logits = nn.Parameter(torch.tensor([0.0, 2.0, 1.0]))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.logits.expand(*tokens.shape, 3)


def test_padding_counts_neither_in_the_loss_nor_in_the_accuracy(quiet: dict[str, Any]) -> None:
    tokens = torch.tensor([[1, 2, 1, 0], [2, 1, 0, 0]])
    next_tokens = torch.tensor([[1, 1, 2, 0], [1, 0, 0, 0]])
    lit = models.LitNextToken(Fixed(), num_classes=3, ignore_index=0)
    loader = DataLoader(TensorDataset(tokens, next_tokens), batch_size=2)
    (metrics,) = pl.Trainer(**quiet).validate(lit, loader, verbose=False)
    log_probs = Fixed().logits.log_softmax(0)
    assert metrics["val_accuracy"] == pytest.approx(3 / 4)  # it always predicts 1; three of four targets are 1
    assert metrics["val_loss"] == pytest.approx(-(3 * log_probs[1] + log_probs[2]).item() / 4)


def test_a_users_model_needs_no_example_input() -> None:
    lit = models.LitClassifier(nn.Linear(6, 3), num_classes=3)
    assert lit.example_input_array is None
    assert lit(torch.zeros(2, 6)).shape == (2, 3)


def test_a_checkpoint_restores_the_task(toy: TensorDataset, quiet: dict[str, Any], tmp_path: Any) -> None:
    lit = models.LitClassifier(mlp(), num_classes=3, lr=0.2)
    trainer = pl.Trainer(max_epochs=1, **quiet)
    fit_centrally(trainer, lit, toy)
    trainer.save_checkpoint(tmp_path / "task.ckpt")
    again = models.LitClassifier.load_from_checkpoint(tmp_path / "task.ckpt", model=mlp())
    assert again.lr == 0.2
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), lit.parameters(), strict=True))


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


class LitLine(LitNet):
    """A model of a given width, for YAML."""

    def __init__(self, width: int) -> None:
        super().__init__(nn.Linear(width, 1), loss=lambda lit, batch: lit(batch[0]).square().mean())


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
    assert len(cli.model.federation.cohorts.units(0)) > 0
