"""Are other probabilities better if the number of active processors is fixed? Measured on a federation's updates.

    python studies/several_models/fixed_size.py

trains the first of the three models with full participation, keeps all updates of some rounds, and compares ways to
draw 12 of the clients by the mean squared error of the estimated sum of weighted updates, relative to the square of the
sum. It takes two minutes and writes ``docs/tables/several_models_fixed_size.csv``.

Coefficients w / p are the only unbiased ones that depend on the processor alone, so only the probabilities p can be
chosen. For independent draws the best probabilities are proportional to the norms of the weighted updates. For a fixed
size they are not: what all updates have in common cancels, to the extent that p is proportional to w.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
import torch
from federations import FEDERATIONS
from quiet import quiet_trainer, silence_lightning
from records import write_csv
from scipy.optimize import minimize
from setups import ACTIVE
from tasks import LOCAL_EPOCHS
from torch import Tensor

import lightning_spectral as ls
from lightning_spectral.algorithms import DenseRound
from lightning_spectral.functional.sampling.inclusion import assignment_probs

ROUNDS = (1, 10, 30, 60)
DESIGN = ls.ConditionalPoisson()
HEAD = ["round", "probabilities", "independent draws", "fixed size"]


class RecordingRound(DenseRound):
    def add(self, receipt: Any, upload: Any) -> None:
        changes = [(after - self.tensors[name]).flatten() for name, after in upload.tensors.items()]
        algorithm: Any = self.half.algorithm
        algorithm.updates[receipt.unit.client_id] = torch.cat(changes).double()
        super().add(receipt, upload)


@dataclass(frozen=True)
class Recording(ls.FedAvg):
    """Federated averaging that keeps the updates of the last round.

    Attributes:
        updates: The flattened updates, by client.
    """

    round = RecordingRound
    updates: dict[int, Tensor] = field(default_factory=dict, repr=False, compare=False)


class KeepGrams(pl.Callback):
    """Keeps the weights, and the inner products of the weighted updates, after chosen rounds."""

    def __init__(self, updates: dict[int, Tensor], sizes: Tensor, rounds: tuple[int, ...]) -> None:
        self.updates, self.sizes, self.rounds = updates, sizes.double(), rounds
        self.kept: dict[int, tuple[Tensor, Tensor]] = {}

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.current_epoch + 1 in self.rounds:
            clients = sorted(self.updates)
            weights = self.sizes[clients] / self.sizes.sum()
            weighted = weights[:, None] * torch.stack([self.updates[client] for client in clients])
            self.kept[trainer.current_epoch + 1] = weights, weighted @ weighted.T
        self.updates.clear()


def trained(rounds: tuple[int, ...] = ROUNDS) -> Mapping[int, tuple[Tensor, Tensor]]:
    """Train, and return weights, shape ``(P,)``, and Gram matrix of the weighted updates, ``(P, P)``, by round."""
    federation = FEDERATIONS["three"]
    name = federation.models[0]
    data = federation.deal(0).modules[name]
    algorithm = Recording()
    torch.manual_seed(0)
    module = ls.FederatedModule(
        federation.module(name),
        algorithm=algorithm,
        participation=ls.FullParticipation(),
        local_epochs=LOCAL_EPOCHS,
        faults=ls.Faults(on_no_data=ls.LeaveOut()),
    )
    keep = KeepGrams(algorithm.updates, data.partition.sizes, rounds)
    quiet_trainer(max(rounds), [keep]).fit(module, datamodule=data)
    return keep.kept


def error(gram: Tensor, probs: Tensor, joint: Tensor) -> float:
    """Return the exact mean squared error of the estimated sum, relative to the square of the sum."""
    return float((gram * (joint / torch.outer(probs, probs) - 1)).sum() / gram.sum())


def independent(probs: Tensor) -> Tensor:
    """Return the joint probabilities of independent draws."""
    return torch.outer(probs, probs).fill_diagonal_(0.0) + probs.diag()


def best_of_fixed_size(gram: Tensor, start: Tensor, size: int) -> Tensor:
    """Search locally for the probabilities with the least error of a fixed-size draw, in Hájek's approximation.

    Args:
        gram: Inner products of the weighted updates, shape ``(P, P)``.
        start: Initial probabilities, shape ``(P,)``.
        size: Sum of the probabilities.
    """

    def loss(values: Any) -> tuple[float, Any]:
        probs = torch.tensor(values, requires_grad=True)
        relative = approximate_error(gram, probs) / gram.sum()
        relative.backward()
        return relative.item(), probs.grad.numpy()

    least = 1e-3  # at probability one, both weights of Hájek's formula vanish
    found = minimize(
        loss,
        start.clamp(least, 1 - least).numpy(),
        jac=True,
        method="SLSQP",
        bounds=[(least, 1 - least)] * len(start),
        constraints={"type": "eq", "fun": lambda p: p.sum() - size, "jac": lambda p: p * 0 + 1},
        options={"maxiter": 300},
    )
    probs = torch.tensor(found.x)
    return probs * (size / probs.sum())


def approximate_error(gram: Tensor, probs: Tensor) -> Tensor:
    """Return Hájek's (1964) error: residuals of expanded updates around their mean, both weighted by p (1 - p)."""
    weights = probs * (1 - probs)
    expanded = gram / torch.outer(probs, probs)
    return weights @ expanded.diagonal() - weights @ expanded @ weights / weights.sum()


def rows(grams: Mapping[int, tuple[Tensor, Tensor]], size: int = ACTIVE) -> Iterator[list[str]]:
    """Yield round, probabilities, and both errors."""
    for round_number, (weights, gram) in grams.items():
        norms = gram.diagonal().sqrt()
        by_norm = assignment_probs(norms[:, None], size)[:, 0]
        choices = {
            "all alike": torch.full_like(weights, size / len(weights)),
            "by examples": assignment_probs(weights[:, None], size)[:, 0],
            "by norm (GVR)": by_norm,
            "searched for the fixed size": best_of_fixed_size(gram, by_norm, size),
        }
        for name, probs in choices.items():
            fixed = error(gram, probs, DESIGN.joint_inclusion_probs(probs))
            yield [str(round_number), name, f"{error(gram, probs, independent(probs)):.3f}", f"{fixed:.3f}"]


def main() -> None:
    silence_lightning()
    torch.set_num_threads(1)
    write_csv("several_models_fixed_size", HEAD, rows(trained()))


if __name__ == "__main__":
    main()
