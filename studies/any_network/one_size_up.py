"""The tied case one size up: CIFAR-10 at 32 x 32 and ResNet-18 of half the width, 2,000 images of 20 clients.

Ten clients hold four of the labels and a tenth of the terms, ten the others and four times as many. The best of the
layouts and of the ways to average two capacities, beside the whole network for all and a narrow one. ``python
studies/any_network/one_size_up.py`` takes hours on one core, continues where it stopped, and prints what it has.
"""

from __future__ import annotations

import math
import sys
import time
import warnings
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import TensorDataset

sys.path.append(str(Path(__file__).parents[1]))  # code that the studies share
from photos import cifar10
from plans import final
from quiet import silence_lightning
from records import keep, read_runs, restore, train_once
from run import fitted
from setups import NARROW, SERVERS, SETUPS, few_label_hooks
from tasks import BATCH_SIZE, LOCAL_EPOCHS, Classifier, by_halves

import lightning_spectral as ls

OUTPUT = Path("outputs/one_size_up")
NUM_CLIENTS, CLIENTS_PER_ROUND, NUM_TRAIN, NUM_VAL, NUM_TEST = 20, 5, 2_000, 400, 1_000
NUM_ROUNDS = 40
SMALL, LARGE = 0.1, 0.4  # keep ratios of the two halves
RATES = (0.05, 0.1, 0.025)
CONTENDERS = ("FedHM", NARROW, "sharding", "Tucker factors", "FedAvg")
EQUAL = ("Tucker factors", NARROW)  # whose clients are all small


class LitResNet(Classifier):
    """ResNet-18 of half the width, with GroupNorm."""

    def __init__(self, lr: float) -> None:
        super().__init__("residual", lr, NUM_ROUNDS)
        self.net = ls.models.ResNet18(width=32)
        self.example_input_array = self.net.example_input()


def dealt() -> ls.FederatedDataModule:
    """The first training images for the clients; of the test images some for choosing rates, and some for testing."""
    images, labels, others, other_labels = cifar10(sheets=(1,), side=32)
    train = TensorDataset(images[:NUM_TRAIN], labels[:NUM_TRAIN])
    is_test = torch.arange(NUM_VAL + NUM_TEST) >= NUM_VAL
    val = TensorDataset(others[: len(is_test)], other_labels[: len(is_test)], is_test)
    clients = by_halves(train.tensors[1], NUM_CLIENTS)
    return ls.FederatedDataModule(train, clients, val=val, batch_size=BATCH_SIZE, eval_batch_size=len(val))


def train(contender: str, lr: float) -> dict[str, Any]:
    """Train a run, with the hooks for clients with few labels. Return accuracies and the bytes of a turn."""
    torch.manual_seed(0)
    module: Any = LitResNet(lr)
    ratios = [SMALL] * (NUM_CLIENTS // 2) + [LARGE] * (NUM_CLIENTS // 2)
    if contender == NARROW:
        by_width = ls.WidthSharding(keep_ratio=math.sqrt(SMALL))
        module = ls.algorithms.narrow_model(ls.FederatedModule(module, algorithm=by_width), math.sqrt(SMALL))
    begun = time.perf_counter()
    federation = partial(
        ls.FederatedModule,
        module,
        algorithm=SETUPS[contender](SMALL if contender in EQUAL else ratios, module),
        local_hooks=few_label_hooks(module, NUM_ROUNDS),
        clients_per_round=CLIENTS_PER_ROUND,
        local_epochs=LOCAL_EPOCHS,
        server_optimizer=SERVERS["momentum"],
    )
    curves, turns, error = fitted(federation, dealt(), NUM_ROUNDS)
    seconds = round(time.perf_counter() - begun, 1)
    return {"contender": contender, "lr": lr, **curves, "bytes_per_turn": turns, "error": error, "seconds": seconds}


def main() -> None:
    silence_lightning()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    restore(OUTPUT)
    for lr, contender in product(RATES, CONTENDERS):
        train_once(OUTPUT / f"{contender.replace(' ', '-')}_{lr}.json", partial(train, contender, lr))
        runs = [run for run in read_runs(OUTPUT) if run["contender"] == contender]
        if runs:
            best = max(runs, key=lambda run: final(run, "val"))
            curve = " ".join(f"{100 * accuracy:.1f}" for accuracy in best["test"])
            print(
                f"{contender} at {best['lr']}: {final(best, 'test'):.1%} ({curve})", best["bytes_per_turn"], flush=True
            )
        keep(OUTPUT)


if __name__ == "__main__":
    main()
