"""Callbacks for what some figures measure in addition to accuracy."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import lightning_spectral as ls
from lightning_spectral.functional.figures import entropy_rank

NUM_EXAMPLES = 2_000  # on which the training loss is measured


class Every(ls.RoundCallback):
    """Logs some values at the end of every n-th round.

    Args:
        every: The interval n, in rounds.
    """

    def __init__(self, every: int) -> None:
        self.every = every

    def values(self, module: pl.LightningModule) -> dict[str, float]:
        """Return the values to log for the server's model, by name."""
        raise NotImplementedError

    def on_round_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, summary: Any) -> None:
        if (summary.round_idx + 1) % self.every == 0:
            values = {name: torch.tensor(value) for name, value in self.values(pl_module.module).items()}
            pl_module.log_dict(values, on_step=False, on_epoch=True, batch_size=1)


class Ranks(Every):
    """Logs ``rank/<layer>``, the entropy rank of every 3 x 3 convolution as a share of N."""

    def values(self, module: pl.LightningModule) -> dict[str, float]:
        weights = {
            name: layer.weight.detach().flatten(1)
            for name, layer in module.named_modules()
            if isinstance(layer, nn.Conv2d) and layer.kernel_size == (3, 3)
        }
        shares = {
            name: entropy_rank(torch.linalg.svdvals(weight)) / min(weight.shape) for name, weight in weights.items()
        }
        return {f"rank/{name}": share for name, share in shares.items()}


class TrainingLoss(Every):
    """Logs ``training_loss``, the server model's cross entropy on examples of the clients.

    Args:
        every: The interval between two measurements, in rounds.
        train: All examples of the clients; only the first ones are used.
    """

    def __init__(self, every: int, train: TensorDataset) -> None:
        super().__init__(every)
        self.inputs, self.labels = (part[:NUM_EXAMPLES] for part in train.tensors)

    @torch.no_grad()
    def values(self, module: pl.LightningModule) -> dict[str, float]:
        was_training = module.training
        module.eval()
        total = sum(self._loss(module, part) for part in torch.arange(len(self.labels)).split(500))
        module.train(was_training)
        return {"training_loss": total / len(self.labels)}

    def _loss(self, module: pl.LightningModule, part: Tensor) -> float:
        inputs, labels = (tensor[part].to(module.device) for tensor in (self.inputs, self.labels))
        return float(nn.functional.cross_entropy(module(inputs), labels, reduction="sum"))


class Holders(ls.RoundCallback):
    """Computes the expected number of clients that hold each term, averaged over the rounds.

    Attributes:
        sums: Sums over rounds, by layer, shape ``(N,)``.
        num_rounds: Number of rounds.
    """

    def __init__(self) -> None:
        self.sums: dict[str, Tensor] = defaultdict(lambda: torch.zeros(()))
        self.num_rounds = 0

    def on_round_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, opened: Any) -> None:
        self.num_rounds += 1
        for name, draws in opened.observed().term_draws.items():
            for group in draws.groups.values():
                self.sums[name] = self.sums[name] + group.num_clients * group.inclusion_probs

    def state_dict(self) -> dict[str, Any]:
        return {"sums": dict(self.sums), "num_rounds": self.num_rounds}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.sums.update(state_dict["sums"])
        self.num_rounds = state_dict["num_rounds"]

    def means(self) -> dict[str, list[float]]:
        """Return the mean number of clients that hold each term, largest singular value first, by layer."""
        return {
            name: [round(value, 4) for value in (total / self.num_rounds).tolist()] for name, total in self.sums.items()
        }


MEASURES: dict[str, Callable[[int, TensorDataset], pl.Callback]] = {
    "alignment": lambda every, train: ls.plugin.callbacks.UpdateAlignment(every),
    "ranks": lambda every, train: Ranks(every),
    "training loss": TrainingLoss,
    "holders": lambda every, train: Holders(),
}
