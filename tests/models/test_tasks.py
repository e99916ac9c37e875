"""The LightningModules, in a plain Trainer and in a federation."""

import math
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from federation import Fit
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_spectral as ls
from lightning_spectral import models

pytestmark = pytest.mark.filterwarnings("ignore:The '.*_dataloader' does not have many workers")


class LearningRates(Callback):
    """The learning rate of every step of a plain Trainer."""

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
    run = {"val": trainer.validate, "test": trainer.test}[stage]
    (metrics,) = run(lit, loader, verbose=False)
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


def test_the_example_input_is_the_models() -> None:
    lit = models.LitClassifier(models.FEMNISTCNN(), num_classes=62)
    assert isinstance(lit.example_input_array, Tensor)
    assert lit.example_input_array.shape == (1, 1, 28, 28)


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
