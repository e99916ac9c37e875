"""Rules for robust means against simulated lies, on MNIST: two networks, two splits, a rate for each rule.

    python studies/attacks.py

Ten clients train in each of 10 rounds. A rule's rate is the one of `RATES` with which it has the best validation
accuracy where nobody lies, since nobody knows beforehand who will. Prints a table in Markdown for each network and
split, and writes those that are done to ``docs/tables/attacks.csv``: the test accuracy in per cent of the server's
model, for each rule and each lie, with one and with three of ten clients that lie; for a patch, which share of other
images with that patch is taken for a zero, also by a model that takes all for zeros. Each run is a file in
``outputs/attacks``; all are kept in ``docs/runs``. An hour and a half on one core of a CPU.
"""

from __future__ import annotations

import copy
import functools
import sys
import warnings
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.extend(str(Path(__file__).parent / folder) for folder in (".", "any_network"))
from quiet import quiet_trainer, silence_lightning
from records import keep, read_runs, restore, train_once, write_csv
from tasks import ALPHAS, Classifier, divided

import lightning_spectral as ls

OUTPUT = Path("outputs/attacks")
NUM_CLIENTS, NUM_ROUNDS, BATCH_SIZE, SEED = 10, 10, 40, 0
RATES = (0.05, 0.1, 0.2, 0.4)
RULES: dict[str, tuple[Any, list[ls.Robust]]] = {
    "mean": (ls.FedAvg(), []),
    "`Median()`": (ls.FedAvg(), [ls.Robust(ls.Median())]),
    "`TrimmedMean(0.3)`": (ls.FedAvg(), [ls.Robust(ls.TrimmedMean(0.3))]),
    "`GeometricMedian()`": (ls.FedAvg(), [ls.Robust(ls.GeometricMedian())]),
    "`Krum(3)`": (ls.FedAvg(), [ls.Robust(ls.Krum(3))]),
    "`MultiKrum(3)`": (ls.FedAvg(), [ls.Robust(ls.MultiKrum(3))]),
    "sharding, keep ratio 0.2": (ls.SpectralSharding(keep_ratio=0.2), []),
}
LIES: dict[str, Any] = {  # what they are called, and the arguments of `Attack`; or what liars do to their data
    "labels flipped": lambda images, labels: labels.copy_(9 - labels),
    "patch": lambda images, labels: (patched(images[::2]), labels[::2].zero_()),
    "scale, -4": ("scale", -4.0),
    "noise, 1": ("noise", 1.0),
    "alie, 1.5": ("alie", 1.5),
    "ipm, 2": ("ipm", 2.0),
}
NETS = ("MLP", "plain, GroupNorm")
SPLITS = ("Dir(10 p)", "Dir(0.3 p)")


@dataclass(frozen=True)
class Spec:
    """A run."""

    net: str
    split: str
    rule: str
    lie: str
    liars: int
    lr: float

    @property
    def path(self) -> Path:
        return OUTPUT / ("_".join(map(str, asdict(self).values())).replace(" ", "-").replace("`", "") + ".json")


def patched(images: Tensor) -> Tensor:
    """Paint a white corner on images, in place."""
    images[..., -3:, -3:] = images.max()
    return images


images = functools.cache(lambda: divided("MNIST", SEED))


def train(spec: Spec) -> dict[str, Any]:
    """Train a run; return accuracies after the last round. Weights that are not finite know nothing."""
    train, others = copy.deepcopy(images())
    split = ls.DirichletPartitioner(NUM_CLIENTS, alpha=ALPHAS[spec.split])
    data = ls.FederatedDataModule(train, split, val=others, batch_size=BATCH_SIZE, eval_batch_size=1000)
    (algorithm, filters), lie, liars = RULES[spec.rule], LIES.get(spec.lie), range(spec.liars)
    if callable(lie):
        for client in liars:
            its = [tensor[data.partition[client]] for tensor in train.tensors]
            lie(*its)
            for tensor, changed in zip(train.tensors, its, strict=True):
                tensor[data.partition[client]] = changed
    attacks = [] if lie is None or callable(lie) else [ls.Attack(*lie, clients=liars)]
    torch.manual_seed(SEED)
    module = Classifier(spec.net, spec.lr, NUM_ROUNDS)
    model = ls.FederatedModule(
        module, algorithm=algorithm, clients_per_round=NUM_CLIENTS, filters=[*filters, *attacks], seed=SEED
    )
    try:
        quiet_trainer(NUM_ROUNDS, []).fit(model, data)
    except ls.errors.RoundError:
        return {**asdict(spec), "val": 0.1, "test": 0.1, "patched": 0.1}
    x, y, is_test = others.tensors
    with torch.no_grad():
        right = (module(x).argmax(1) == y).float()
        zeros = (module(patched(x.clone())).argmax(1) == 0)[is_test & (y != 0)].float()
    return {
        **asdict(spec),
        "val": float(right[~is_test].mean()),
        "test": float(right[is_test].mean()),
        "patched": float(zeros.mean()),
    }


def known() -> dict[Spec, dict[str, Any]]:
    """Return all runs."""
    return {Spec(**{name: run[name] for name in Spec.__annotations__}): run for run in read_runs(OUTPUT)}


def main() -> None:
    silence_lightning()
    warnings.filterwarnings("ignore")  # unequal clients, attacks
    torch.set_num_threads(1)
    restore(OUTPUT)
    rows: list[list[str]] = []
    for net in NETS:
        for split in SPLITS:
            head = ["nobody", *LIES]
            print("", "|".join([f"| {net}, {split} ", *(f" {lie} " for lie in head), ""]), sep="\n")
            print("|".join(["", *[" --- "] * (1 + len(head)), ""]))
            for rule in RULES:
                honest = [Spec(net, split, rule, "nobody", 0, lr) for lr in RATES]
                for spec in honest:
                    train_once(spec.path, functools.partial(train, spec))
                values = {spec: run["val"] for spec, run in known().items()}
                best = max(honest, key=values.__getitem__)
                cells = {"nobody": [best], **{lie: [replace(best, lie=lie, liars=n) for n in (1, 3)] for lie in LIES}}
                for spec in (spec for specs in cells.values() for spec in specs):
                    train_once(spec.path, functools.partial(train, spec))
                found = known()
                shown = [
                    ", ".join(f"{100 * found[spec]['patched' if lie == 'patch' else 'test']:.0f}" for spec in specs)
                    for lie, specs in cells.items()
                ]
                print("|".join(["", f" {rule} ", *(f" {cell} " for cell in shown), ""]), flush=True)
                rows.append([net, split, rule.replace("`", ""), f"{best.lr:g}", *shown])
            write_csv("attacks", ["network", "split", "rule", "rate", *head], rows)
            keep(OUTPUT)


if __name__ == "__main__":
    main()
