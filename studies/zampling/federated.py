"""Federated Zampling on MNIST: Figure 4 and Table 1 of the paper, and the effect of other choices.

    python studies/zampling/federated.py table1     # hours on one core; continues where it stopped
    python studies/zampling/report.py

Ten clients have 6,000 images each, drawn at random, and train on batches of 128, as in the paper. All take part in each
of 40 rounds of one local epoch, after which hardly any probability still changes. The paper has 100 rounds of up to 100
epochs with early stopping; ``stopped`` has two rounds of these. ``--list`` prints the missing runs.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from plans import OUTPUT, PLANS, Spec
from quiet import quiet_trainer, silence_lightning
from records import restore, train_once
from tasks import NUM_CLIENTS, TASKS, Classifier, deal
from torch import Tensor
from torch.utils.data import TensorDataset

import lightning_spectral as ls

EVERY = 5  # rounds between two tests, in runs whose clients do not stop early


def train(spec: Spec) -> dict[str, Any]:
    """Train a run. Return the expected network's accuracies, those of sampled ones at the end, and bytes of a turn."""
    torch.manual_seed(spec.seed)
    task = TASKS[spec.task]
    model = ls.FederatedModule(
        Classifier(task.net(), spec.lr, spec.num_rounds if spec.decay else 0, task.patience),
        algorithm=spec.algorithm,
        clients_per_round=NUM_CLIENTS,
        local_epochs=spec.local_epochs,
        server_optimizer=ls.FedAvgM(lr=spec.server_lr, momentum=spec.momentum),
        seed=spec.seed,
    )
    data = deal(task, spec.seed)
    history, ledger = ls.RoundHistory(), ls.CommunicationLedger()
    begun = time.perf_counter()
    quiet_trainer(spec.num_rounds, [history, ledger], 1 if task.patience else EVERY).fit(model, data)
    names = ("accuracy", "fl/loss", "fl/bit_entropy", "fl/bits_agreed", "fl/bit_disagreement")
    curves = {name: [row[name] for row in history.rows if name in row] for name in names}
    down, up = next(iter(ledger.bytes_per_client().values()))
    seconds = round(time.perf_counter() - begun, 1)
    assert isinstance(data.val, TensorDataset)
    sampled = list(sampled_accuracies(model, task.num_samples, *data.val.tensors)) if spec.compression else []
    return {**asdict(spec), **curves, "sampled": sampled, "down": down, "up": up, "seconds": seconds}


@torch.no_grad()
def sampled_accuracies(model: ls.FederatedModule, count: int, images: Tensor, labels: Tensor) -> Iterator[float]:
    """Yield the test accuracies of ``count`` sampled networks."""
    module = model.module
    for i in range(count):
        weights = model.state.network(torch.Generator().manual_seed(i))
        logits = torch.func.functional_call(module.net, {n.removeprefix("net."): w for n, w in weights.items()}, images)
        yield float((logits.argmax(1) == labels).float().mean())


def main() -> None:
    parser = argparse.ArgumentParser(description="Federated Zampling on MNIST.")
    parser.add_argument("plans", nargs="*", default=list(PLANS), help=f"which runs: {', '.join(PLANS)} (all)")
    parser.add_argument("--list", action="store_true", help="only list the missing runs")
    args = parser.parse_args()
    silence_lightning()
    warnings.filterwarnings("ignore", category=FutureWarning)
    torch.set_num_threads(1)
    restore(OUTPUT)
    left = (spec for plan in args.plans for spec in PLANS[plan]() if not spec.path.exists())
    if args.list:
        print(*left, sep="\n")
        return
    for spec in left:
        result = train_once(spec.path, partial(train, spec))
        if result is None:
            continue
        print(f"{spec.path.stem}: {result['accuracy'][-1]:.2%} ({result['seconds']:.0f} s)", flush=True)


if __name__ == "__main__":
    main()
