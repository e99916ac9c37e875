"""LightningModules that train a model on a task: loss, accuracy, optimizer and schedule."""

from __future__ import annotations

import math
from typing import Literal, Protocol, runtime_checkable

import lightning.pytorch as pl
import torch.nn.functional as F
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.optim import SGD
from torch.optim.lr_scheduler import CosineAnnealingLR
from torchmetrics import Metric
from torchmetrics.classification import MulticlassAccuracy

Batch = tuple[Tensor, Tensor]


@runtime_checkable
class HasExampleInput(Protocol):
    """A model that provides an example of its input."""

    def example_input(self) -> Tensor:
        """A batch of one example; the values are arbitrary."""
        ...


class LitClassifier(pl.LightningModule):
    """Cross entropy and accuracy of a classifier, trained by SGD with momentum and a cosine schedule.

    An ordinary LightningModule: train it with a plain Trainer, or wrap it in a `FederatedModule`. It logs
    ``train_loss``, ``train_accuracy``, and the same with ``val_`` and ``test_``, once per epoch, which is a round in a
    federation. Batches are pairs of inputs and class indices. In the YAML of a `LightningCLI` it is::

        model:
          class_path: lightning_spectral.models.LitClassifier
          init_args:
            model: {class_path: lightning_spectral.models.ResNet18, init_args: {num_classes: 100}}
            num_classes: 100
            lr: 0.05

    Args:
        model: Maps inputs to logits, shape ``(batch, num_classes)``. If it has a method ``example_input``, as this
            package's models do, Lightning's ``example_input_array`` is set to what that returns.
        num_classes: Number of classes.
        lr: Initial learning rate. Korzhenkov & Louizos (2024) use 0.1 for CIFAR-10 and Shakespeare, 0.05 for CIFAR-100
            and TinyImageNet; PriSM uses 0.1, and 0.01 for FEMNIST.
        momentum: Momentum of SGD. 0.9 in the 2024 paper (section 3.3) and in PriSM (Tables 7-9).
        weight_decay: Coefficient of the penalty on squared weights. 0.0002 in PriSM; the default 0 is our choice,
            because the 2024 paper names none other than its own Frobenius decay.
        eta_min: Learning rate at the end. The default 0 is our choice; the papers only say "cosine annealing".
        ignore_index: Targets with this value are ignored in the loss and the accuracy; the default is PyTorch's.

    Note:
        The cosine spans ``trainer.estimated_stepping_batches``: all rounds of a federation, in which the rate is
        constant within a round, or all optimizer steps of a plain Trainer.

    Example:
        >>> from lightning_spectral.models import MLP
        >>> task = LitClassifier(MLP(num_classes=10), num_classes=10, lr=0.05)
        >>> task(task.example_input_array).shape
        torch.Size([1, 10])
    """

    def __init__(
        self,
        model: nn.Module,
        num_classes: int,
        lr: float = 0.1,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        eta_min: float = 0.0,
        ignore_index: int = -100,
    ) -> None:
        super().__init__()
        self.save_hyperparameters(ignore=["model"])
        self.model = model
        self.lr = lr
        self.momentum = momentum
        self.weight_decay = weight_decay
        self.eta_min = eta_min
        self.ignore_index = ignore_index
        accuracy = MulticlassAccuracy(num_classes, average="micro", ignore_index=ignore_index)
        self.train_accuracy, self.val_accuracy, self.test_accuracy = accuracy, accuracy.clone(), accuracy.clone()
        if isinstance(model, HasExampleInput):
            self.example_input_array = model.example_input()

    def forward(self, inputs: Tensor) -> Tensor:
        logits: Tensor = self.model(inputs)
        return logits

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return self._log_step("train", self.train_accuracy, batch)

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self._log_step("val", self.val_accuracy, batch)

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        self._log_step("test", self.test_accuracy, batch)

    def configure_optimizers(self) -> OptimizerLRScheduler:
        num_steps = self.trainer.estimated_stepping_batches
        if math.isinf(num_steps):
            raise ValueError("A cosine schedule needs the length of the run; set the Trainer's `max_epochs`.")
        optimizer = SGD(self.parameters(), self.lr, self.momentum, weight_decay=self.weight_decay)
        schedule = CosineAnnealingLR(optimizer, int(num_steps), self.eta_min)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def _scores(self, batch: Batch) -> Batch:
        """Logits ``(N, num_classes)`` and targets ``(N,)``, one row per prediction."""
        inputs, targets = batch
        return self(inputs), targets

    def _log_step(self, stage: Literal["train", "val", "test"], accuracy: Metric, batch: Batch) -> Tensor:
        logits, targets = self._scores(batch)
        loss = F.cross_entropy(logits, targets, ignore_index=self.ignore_index)
        accuracy.update(logits, targets)
        values: dict[str, Tensor | Metric] = {f"{stage}_loss": loss, f"{stage}_accuracy": accuracy}
        self.log_dict(values, on_step=False, on_epoch=True, prog_bar=True, batch_size=len(batch[1]))
        return loss


class LitNextToken(LitClassifier):
    """Loss and accuracy of a language model, over all positions of all sequences.

    Like `LitClassifier`, with these differences: ``num_classes`` is the size of the vocabulary, the model's logits have
    shape ``(batch, length, num_classes)``, and batches are pairs of tokens and next tokens, both ``(batch, length)``.
    Pass the id of the padding as ``ignore_index``: it is 0 in TensorFlow Federated's Shakespeare, where the accuracy
    also leaves out padding.

    Note:
        The loss of a batch is the mean over its tokens. Means over batches and over clients are weighted by numbers of
        sequences.

    Example:
        >>> from lightning_spectral.models import CharTransformer
        >>> task = LitNextToken(CharTransformer(vocab_size=12, width=16), num_classes=12, ignore_index=0)
        >>> task(task.example_input_array).shape
        torch.Size([1, 80, 12])
    """

    def _scores(self, batch: Batch) -> Batch:
        tokens, next_tokens = batch
        logits: Tensor = self(tokens)
        return logits.flatten(0, 1), next_tokens.flatten()
