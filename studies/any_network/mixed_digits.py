"""Clients that differ in capacity and in labels at once, on scikit-learn's digits; minutes for each line.

    python studies/any_network/mixed_digits.py
    python studies/any_network/mixed_digits.py --only "terms, mixed" --rates 0.1 --seeds 0 1

Ten of 20 clients hold the digits 0 to 3, and ten the others; ``mixed`` gives the first ten a tenth of the terms, and
the others four tenths. ``--untied`` deals the digits to all clients alike. Prints the test accuracy of the server's
model, on the two groups of digits as well.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor
from torch.utils.data import TensorDataset

sys.path.append(str(Path(__file__).parents[1]))  # code that the studies share
from quiet import quiet_trainer, silence_lightning
from setups import SERVERS, few_label_hooks
from tasks import BATCH_SIZE, FEW, LOCAL_EPOCHS, Classifier, by_halves

import lightning_spectral as ls

NUM_TRAIN, NUM_VAL, NUM_ROUNDS = 1397, 10, 60
MIXED = [0.1] * 10 + [0.4] * 10
TUCKER = {"layers": ls.LayerChoices(convolutions="tucker")}
CONTENDERS: dict[str, ls.Algorithm] = {
    "FedAvg": ls.FedAvg(),
    **{
        f"{kind}, {name}": ls.SpectralSharding(keep_ratio=ratio, **options, **more)
        for kind, options in {"terms": {}, "Tucker": TUCKER}.items()
        for name, ratio, more in (
            ("all 0.1", 0.1, {}),
            ("all 0.4", 0.4, {}),
            ("mixed", MIXED, {}),
            ("mixed, TopN", MIXED, {"strategy": ls.TopN()}),
            ("mixed, means of terms", MIXED, {"aggregation": ls.algorithms.TermMeans()}),
        )
    },
}


def deal(images: Tensor, digits: Tensor, tied: bool, others: TensorDataset, seed: int) -> ls.FederatedDataModule:
    """Deal the examples to 20 clients, by their digits or not."""
    dealt = by_halves(digits, 20) if tied else ls.NaturalPartitioner(torch.arange(len(digits)) % 20)
    options = {"batch_size": BATCH_SIZE, "seed": seed}
    size = len(others)
    return ls.FederatedDataModule(TensorDataset(images, digits), dealt, val=others, eval_batch_size=size, **options)


def train(algorithm: ls.Algorithm, lr: float, seed: int, tied: bool, hooked: bool) -> list[float]:
    """Return the accuracy in per cent on all test images, on those of 0 to 3, and on the others."""
    found: Any = load_digits()
    images, digits = torch.tensor(found.images, dtype=torch.float32)[:, None] / 16, torch.tensor(found.target)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    own, rest = order[:NUM_TRAIN], order[NUM_TRAIN:]
    others = TensorDataset(images[rest], digits[rest], torch.arange(len(rest)) >= NUM_VAL)
    torch.manual_seed(seed)
    module = Classifier("plain, GroupNorm", lr, NUM_ROUNDS)
    module.example_input_array = images[:2]
    model = ls.FederatedModule(
        module,
        algorithm=algorithm,
        clients_per_round=10,
        local_epochs=LOCAL_EPOCHS,
        server_optimizer=SERVERS["momentum"],
        local_hooks=few_label_hooks(module, NUM_ROUNDS) if hooked else [],
        seed=seed,
    )
    quiet_trainer(NUM_ROUNDS, [], NUM_ROUNDS).fit(model, deal(images[own], digits[own], tied, others, seed))
    test = rest[NUM_VAL:]
    with torch.no_grad():
        right = (module(images[test]).argmax(1) == digits[test]).float()
    few = digits[test] < FEW
    return [round(100 * float(part.mean()), 1) for part in (right, right[few], right[~few])]


def main() -> None:
    parser = argparse.ArgumentParser(description="Train clients that differ in capacity and in labels at once.")
    parser.add_argument("--only", nargs="+", choices=CONTENDERS, default=list(CONTENDERS), help="contenders (all)")
    parser.add_argument("--rates", nargs="+", type=float, default=[0.05, 0.1], help="learning rates (0.05 0.1)")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0], help="seeds (0)")
    parser.add_argument("--untied", action="store_true", help="deal all digits to all clients")
    parser.add_argument("--hooks", action="store_true", help="calibrate logits and clip gradients")
    args = parser.parse_args()
    silence_lightning()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    for name in args.only:
        for lr in args.rates:
            for seed in args.seeds:
                accuracy = train(CONTENDERS[name], lr, seed, not args.untied, args.hooks)
                print(f"{name}, rate {lr:g}, seed {seed}:", *accuracy, flush=True)


if __name__ == "__main__":
    main()
