"""Federated Zampling on MNIST: Figure 4 and Table 1 of the paper, and what changes when its choices do.

    python studies/zampling/federated.py table1     # hours on one core; goes on where it stopped
    python studies/zampling/report.py

Ten clients with 6,000 images each, drawn at random; all take part in each of 40 rounds, after which hardly a
probability still moves; the paper has 100. It does not say how large batches are, nor how many local epochs a round has
("up to 100"): here 128, and one.
"""

from __future__ import annotations

import argparse
import json
import logging
import time
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from digits import mnist
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import lightning_spectral as ls

OUTPUT = Path("outputs/zampling")
NUM_CLIENTS, BATCH_SIZE, NUM_SAMPLES, EVERY = 10, 128, 100, 5

SETUPS: dict[str, dict[str, Any]] = {
    "published": {"init": "paper"},
    "He start": {},
    "He, smoothing 0.1": {"smoothing": 0.1},
    "He, smoothing 1": {"smoothing": 1.0},
    "He, not absorbing": {"link": ls.Clip(absorbing=False)},
    "sigmoid": {"link": ls.Sigmoid()},
    "continuous": {"sampled": False},
    "gain 2": {"gain": 2.0},
    "gain 3": {"gain": 3.0},
    "continuous, gain 2": {"sampled": False, "gain": 2.0},
    "8 bits down": {"downlink_bits": 8},
    "4 bits down": {"downlink_bits": 4},
    "gain 2, 4 bits down": {"gain": 2.0, "downlink_bits": 4},
}


@dataclass(frozen=True)
class Spec:
    """One run.

    Attributes:
        setup: Name of the setup.
        compression: Number of weights for each probability; 0 for federated averaging.
        lr: Learning rate of Adam.
        decay: Whether it falls to zero over the rounds, along a cosine.
        server_lr: Learning rate of the server: how far p moves towards the mean of the bits.
        momentum: Of the server.
        local_epochs: Passes over a client's images in a round.
        num_rounds: Number of rounds.
        seed: Of Q, the first probabilities and every other draw.
    """

    setup: str
    compression: int
    lr: float = 0.1
    decay: bool = False
    server_lr: float = 1.0
    momentum: float = 0.0
    local_epochs: int = 1
    num_rounds: int = 40
    seed: int = 0

    @property
    def path(self) -> Path:
        """Where the result is written."""
        name = "_".join(str(value) for value in asdict(self).values())
        return OUTPUT / f"{''.join(c if c.isalnum() or c in '._-' else '-' for c in name)}.json"


def table1() -> Iterator[Spec]:
    """The paper's three compressions as published, three seeds, and FedAvg; one of them for all of its 100 rounds."""
    yield Spec("published", 32, num_rounds=100)
    for seed, compression in product(range(3), (32, 8, 1)):
        yield Spec("published", compression, seed=seed)
    yield Spec("FedAvg", 0, lr=0.001)


def choices() -> Iterator[Spec]:
    """What the choices change, at compression 32, in 20 rounds."""
    for setup in SETUPS:
        yield Spec(setup, 32, num_rounds=20)
    short = {"compression": 32, "num_rounds": 20}
    for lr, server_lr in product((0.1, 0.03, 0.01), (1.0, 0.3)):
        yield Spec("published", lr=lr, server_lr=server_lr, **short)
    for setup in ("He start", "He, not absorbing", "He, smoothing 0.1"):
        yield Spec(setup, lr=0.03, server_lr=0.3, **short)
    yield Spec("published", momentum=0.5, **short)
    yield Spec("published", local_epochs=3, **short)
    yield Spec("published", decay=True, **short)


def best() -> Iterator[Spec]:
    """What was found to be best: a wider Q, longer local training, and a server that moves half of the way."""
    yield Spec("gain 2", 32, server_lr=0.5, local_epochs=5)
    yield Spec("gain 2", 8, server_lr=0.5, local_epochs=5, num_rounds=60)


PLANS = {plan.__name__: plan for plan in (table1, choices, best)}


class MnistFC(pl.LightningModule):
    """784-300-100-10, the network of the paper's federated experiments: 266,610 weights."""

    def __init__(self, lr: float, decay_rounds: int = 0) -> None:
        super().__init__()
        layers = [nn.Linear(784, 300), nn.ReLU(), nn.Linear(300, 100), nn.ReLU(), nn.Linear(100, 10)]
        self.net, self.lr, self.decay_rounds = nn.Sequential(*layers), lr, decay_rounds

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch: tuple[Tensor, Tensor]) -> None:
        self.log("accuracy", (self.net(batch[0]).argmax(1) == batch[1]).float().mean())

    def configure_optimizers(self) -> Any:
        adam = torch.optim.Adam(self.parameters(), lr=self.lr)
        if not self.decay_rounds:
            return adam
        return [adam], [torch.optim.lr_scheduler.CosineAnnealingLR(adam, T_max=self.decay_rounds)]


def train(spec: Spec) -> dict[str, Any]:
    """Accuracy of the expected network along the way, of sampled ones at the end, and the bytes of a client's turn."""
    torch.manual_seed(spec.seed)
    x, y, test_x, test_y = mnist()
    algorithm = ls.Zampling(spec.compression, **SETUPS[spec.setup]) if spec.compression else ls.FedAvg()
    model = ls.FederatedModule(
        MnistFC(spec.lr, spec.num_rounds if spec.decay else 0),
        algorithm=algorithm,
        clients_per_round=NUM_CLIENTS,
        local_epochs=spec.local_epochs,
        server_optimizer=ls.FedAvgM(spec.server_lr, spec.momentum),
        seed=spec.seed,
    )
    data = ls.FederatedDataModule(
        TensorDataset(x, y),
        ls.IIDPartitioner(num_clients=NUM_CLIENTS),
        val=TensorDataset(test_x, test_y),
        batch_size=BATCH_SIZE,
        eval_batch_size=len(test_y),
        seed=spec.seed,
    )
    history, ledger = ls.RoundHistory(), ls.CommunicationLedger()
    begun = time.perf_counter()
    pl.Trainer(
        max_epochs=spec.num_rounds,
        accelerator="cpu",
        logger=False,
        callbacks=[history, ledger],
        check_val_every_n_epoch=EVERY,
        num_sanity_val_steps=0,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
    ).fit(model, data)
    names = ("accuracy", "fl/loss", "fl/bit_entropy", "fl/bits_agreed", "fl/bit_disagreement")
    curves = {name: [row[name] for row in history.rows if name in row] for name in names}
    down, up = next(iter(ledger.bytes_per_client().values()))
    seconds = round(time.perf_counter() - begun, 1)
    sampled = sampled_accuracies(model, test_x, test_y) if spec.compression else []
    return {**asdict(spec), **curves, "sampled": sampled, "down": down, "up": up, "seconds": seconds}


@torch.no_grad()
def sampled_accuracies(model: ls.FederatedModule, images: Tensor, labels: Tensor) -> list[float]:
    """Test accuracy of a hundred sampled networks."""
    algorithm, module = model.algorithm, model.module
    assert isinstance(algorithm, ls.Zampling)
    found = []
    for i in range(NUM_SAMPLES):
        weights = algorithm.network(module, model.state, torch.Generator().manual_seed(i))
        logits = torch.func.functional_call(module.net, {n.removeprefix("net."): w for n, w in weights.items()}, images)
        found.append(float((logits.argmax(1) == labels).float().mean()))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="Federated Zampling on MNIST.")
    parser.add_argument("plans", nargs="*", default=list(PLANS), help=f"which runs: {', '.join(PLANS)} (all)")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning)
    torch.set_num_threads(1)
    OUTPUT.mkdir(parents=True, exist_ok=True)
    for spec in (spec for plan in parser.parse_args().plans for spec in PLANS[plan]()):
        if not spec.path.exists():
            result = train(spec)
            spec.path.write_text(json.dumps(result))
            print(f"{spec.path.stem}: {result['accuracy'][-1]:.2%} ({result['seconds']:.0f} s)", flush=True)


if __name__ == "__main__":
    main()
