"""Rules for robust means against simulated lies, on MNIST; five minutes on one core of a CPU.

    python studies/attacks.py

Prints a table in Markdown: the test accuracy in per cent of the server's model, for each rule and each lie, with one
and with three of ten clients that lie. All clients train in each of 10 rounds, with the same learning rate.
"""

from __future__ import annotations

import copy
import functools
import sys
import warnings
from pathlib import Path

import torch

sys.path.extend(str(Path(__file__).parent / folder) for folder in (".", "any_network"))
from quiet import quiet_trainer, silence_lightning
from tasks import Classifier, divided

import lightning_spectral as ls

NUM_CLIENTS, NUM_ROUNDS, BATCH_SIZE, LR, SEED = 10, 10, 40, 0.1, 0
RULES = {
    "mean": [],
    "`Median()`": [ls.Robust(ls.server.Median())],
    "`TrimmedMean(0.3)`": [ls.Robust(ls.server.TrimmedMean(0.3))],
    "`GeometricMedian()`": [ls.Robust(ls.server.GeometricMedian())],
    "`Krum(3)`": [ls.Robust(ls.server.Krum(3))],
    "`MultiKrum(3)`": [ls.Robust(ls.server.MultiKrum(3))],
}
LIES = {  # what they are called, and the arguments of `Attack`; labels are flipped in the data
    "labels": None,
    "scale, -4": ("scale", -4.0),
    "noise, 1": ("noise", 1.0),
    "alie, 1.5": ("alie", 1.5),
    "ipm, 2": ("ipm", 2.0),
}


images = functools.cache(lambda: divided("MNIST", SEED))


def accuracy(rule: str, lie: str, num_liars: int) -> float:
    """Return the test accuracy in per cent after the last round; that of a model that is not finite is 10."""
    train, others = copy.deepcopy(images())
    data = ls.FederatedDataModule(
        train, ls.DirichletPartitioner(NUM_CLIENTS, alpha=10.0), val=others, batch_size=BATCH_SIZE, eval_batch_size=1000
    )
    liars, filters = range(num_liars), [*RULES[rule]]
    if num_liars and LIES[lie] is None:
        for client in liars:
            train.tensors[1][data.partition[client]] = 9 - train.tensors[1][data.partition[client]]
    elif num_liars:
        filters.append(ls.Attack(*LIES[lie], clients=liars))
    torch.manual_seed(SEED)
    module = Classifier("MLP", LR, NUM_ROUNDS)
    model = ls.FederatedModule(module, clients_per_round=NUM_CLIENTS, filters=filters, seed=SEED)
    try:
        quiet_trainer(NUM_ROUNDS, []).fit(model, data)
    except ls.errors.RoundError:
        return 10.0
    x, y, is_test = others.tensors
    with torch.no_grad():
        right = (module(x[is_test]).argmax(1) == y[is_test]).float()
    return 100 * float(right.mean())


def main() -> None:
    silence_lightning()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    print("|", " | ".join(["", "nobody", *(f"{lie}: 1, 3" for lie in LIES)]), "|")
    print("|", " | ".join(["---"] * (2 + len(LIES))), "|")
    for rule in RULES:
        cells = [f"{accuracy(rule, 'labels', 0):.0f}"]
        cells += [", ".join(f"{accuracy(rule, lie, number):.0f}" for number in (1, 3)) for lie in LIES]
        print("|", " | ".join([rule, *cells]), "|", flush=True)


if __name__ == "__main__":
    main()
