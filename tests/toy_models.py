"""The small modules that most tests train, their examples, and an algorithm that stores something of each client."""

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
import torchmetrics
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import lightning_spectral as ls
from lightning_spectral.algorithms.fed_avg import DenseRound
from lightning_spectral.protocol.records import Receipt, Upload


def toy_examples(number: int = 120, seed: int = 0) -> TensorDataset:
    """Six features each, and one of three labels that follows from them."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(number, 6, generator=generator)
    return TensorDataset(x, (x @ torch.randn(6, 3, generator=generator)).argmax(1))


def cross_entropy(module: Any, batch: Any) -> Tensor:
    """Of the logits for each example, or for each token of each example."""
    return nn.functional.cross_entropy(module(batch[0]).flatten(0, -2), batch[1].flatten())


def squared_error(module: Any, batch: Any) -> Tensor:
    """Of the only output for each example."""
    return (module(batch[0]).squeeze(1) - batch[1]).square().mean()


class LitNet(pl.LightningModule):
    """Any network, trained by cross-entropy and SGD, or by another loss or optimizer.

    Args:
        net: The network, called by `forward`.
        lr: Learning rate of SGD.
        momentum: Momentum of SGD.
        loss: The loss of a batch, from this module and the batch.
        optimizer: Makes the optimizer from the trainable parameters; `lr` and `momentum` are then unused.
        example: An example input, for algorithms that trace the network.
    """

    def __init__(
        self,
        net: nn.Module,
        lr: float = 0.1,
        momentum: float = 0.0,
        *,
        loss: Callable[[Any, Any], Tensor] = cross_entropy,
        optimizer: Callable[[Any], Any] | None = None,
        example: Any = None,
    ) -> None:
        super().__init__()
        self.net, self.loss_of = net, loss
        self.optimizer_of, self.sgd = optimizer, {"lr": lr, "momentum": momentum}
        if example is not None:
            self.example_input_array = example

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss_of(self, batch)

    def configure_optimizers(self) -> Any:
        parameters = [p for p in self.parameters() if p.requires_grad]
        return torch.optim.SGD(parameters, **self.sgd) if self.optimizer_of is None else self.optimizer_of(parameters)


class Net(nn.Module):
    """Layers under given names, and a `forward` that is given them and the inputs."""

    def __init__(self, forward: Callable[..., Any], **layers: nn.Module) -> None:
        super().__init__()
        self.run = forward
        for name, layer in layers.items():
            self.add_module(name, layer)

    def forward(self, *inputs: Any, **options: Any) -> Any:
        return self.run(self, *inputs, **options)


def variant(
    kind: type[Any],
    prepare: Callable[[Any], object] | None = None,
    /,
    before_step: Callable[[Any, Any], object] | None = None,
    **members: Any,
) -> type[Any]:
    """A subclass called ``Lit``, for a module that differs in a method or two.

    Args:
        kind: The class to derive from. A method that extends one of its methods calls that one by name:
            ``lambda self, *args: 2 * kind.training_step(self, *args)``.
        prepare: Is called with every new module at the end of its ``__init__``.
        before_step: Is called with the module and the batch at the beginning of ``training_step``.
        **members: Methods, properties and attributes of the subclass.
    """
    if prepare is not None:

        def __init__(self: Any, *args: Any, **options: Any) -> None:
            kind.__init__(self, *args, **options)
            prepare(self)

        members["__init__"] = __init__
    if before_step is not None:

        def training_step(self: Any, batch: Any, batch_idx: int) -> Any:
            before_step(self, batch)
            return kind.training_step(self, batch, batch_idx)

        members["training_step"] = training_step
    return type("Lit", (kind,), members)


def plain_sgd(lr: float = 0.1, **options: Any) -> Callable[[Any], torch.optim.Optimizer]:
    """The method `configure_optimizers` of a module that is trained by SGD without a schedule."""
    return lambda module: torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=lr, **options)


class LitMLP(pl.LightningModule):
    """A typical module of a user: metrics, dropout, momentum, a schedule; a BatchNorm if asked for."""

    def __init__(
        self, lr: float = 0.1, momentum: float = 0.9, dropout: float = 0.1, width: int = 12, norm: bool = False
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(
            nn.Linear(6, width), nn.ReLU(), nn.Linear(width, width), nn.Dropout(dropout), nn.ReLU(), nn.Linear(width, 3)
        )
        if norm:
            self.net.insert(1, nn.BatchNorm1d(width))
        self.train_acc = torchmetrics.classification.MulticlassAccuracy(3, average="micro")
        self.val_acc = torchmetrics.classification.MulticlassAccuracy(3, average="micro")

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        logits = self(x)
        loss = nn.functional.cross_entropy(logits, y)
        self.train_acc.update(logits, y)  # a call, as in `validation_step`, computes it for the batch, too
        self.log("train_loss", loss, prog_bar=True)
        self.log_dict({"train_acc": self.train_acc})
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        logits = self(x)
        self.val_acc(logits, y)
        self.log("val_loss", nn.functional.cross_entropy(logits, y))
        self.log("val_acc", self.val_acc, prog_bar=True)

    def test_step(self, batch: Any) -> None:
        x, y = batch
        self.log("test_loss", nn.functional.cross_entropy(self(x), y))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=self.hparams.lr, momentum=self.hparams.momentum)
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)]


def step_by_hand(module: Any, loss: Tensor) -> None:
    """Take a step of all optimizers of a module with manual optimisation."""
    for optimizer in module.optimizers():
        optimizer.zero_grad()
    module.manual_backward(loss)
    for optimizer in module.optimizers():
        optimizer.step()


class LitHalves(LitMLP):
    """Steps its two halves itself, one after the other, each with an optimizer and a schedule of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        step_by_hand(self, loss)
        return loss

    def on_train_epoch_end(self) -> None:
        for scheduler in self.lr_schedulers():
            scheduler.step()

    def configure_optimizers(self) -> Any:
        halves = [
            torch.optim.SGD(self.net[:2].parameters(), lr=0.1, momentum=0.9),
            torch.optim.AdamW(self.net[2:].parameters(), lr=0.01),
        ]
        return halves, [torch.optim.lr_scheduler.StepLR(half, 1, 0.5) for half in halves]


class LitSmall(LitMLP):
    """Has an example input, by default no dropout, and a BatchNorm whose averages are shared."""

    example_input_array = torch.zeros(2, 6)

    def __init__(self, momentum: float = 0.9, dropout: float = 0.0) -> None:
        super().__init__(momentum=momentum, dropout=dropout, norm=True)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None if len(batch[0]) == 1 else super().training_step(batch, batch_idx)


class LitFrozenParts(LitSmall):
    """A bias that travels once, and a frozen layer that is cut or chosen from."""

    def __init__(self) -> None:
        super().__init__()
        self.net[3].requires_grad_(False)
        self.net[6].bias.requires_grad_(False)


class Detour(nn.Module):
    """Registers its layers in another order than it runs them, and one that never runs."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 2)
        self.mid = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
        self.unused = nn.Linear(4, 4)
        self.stem = nn.Linear(3, 4)

    def forward(self, x: Tensor, twice: bool = False) -> Tensor:
        x = self.mid(self.stem(x))
        return self.head(self.mid(x) if twice else x)


class RememberingRound(DenseRound):
    def add(self, receipt: Receipt, upload: Upload) -> None:
        store, unit = self.cohort.store, receipt.unit
        turns = store[unit]["turns"] + 1 if unit in store else torch.tensor(1)
        self.mean.add(upload.tensors, unit.coefficient / int(turns))
        store[unit] = {"loss": torch.tensor(upload.loss, dtype=torch.float64), "turns": turns}


class Remembering(ls.FedAvg):
    """Keeps each client's last loss at the server, and gives a client less weight the more often it has trained."""

    round = RememberingRound


class Renamed(ls.FedAvg):
    """Differs in nothing that concerns uploads, and says so."""

    promises = ls.FedAvg.promises
