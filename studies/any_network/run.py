"""Trains the missing runs of the study, one after another.

    python studies/any_network/run.py
    python studies/any_network/report.py

A run is one file in ``outputs/any_network``. When started again, the command continues where it stopped; runs stored by
the report count as done. Several processes at a time share the work. ``--list`` prints the missing runs.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from plans import OUTPUT, PLANS, Spec, best_rates, results
from quiet import quiet_trainer, silence_lightning
from records import restore, train_once
from setups import SETUPS
from tasks import CLIENTS_PER_ROUND, LOCAL_EPOCHS, NETS, Classifier, deal

import lightning_spectral as ls

EVERY = 5  # rounds between two evaluations


def train(spec: Spec) -> dict[str, Any]:
    """Train a run. Return validation and test accuracy and the bytes of a client's turn, or the error that ended it."""
    torch.manual_seed(spec.seed)
    module, data = Classifier(NETS[spec.net](), spec.lr, spec.num_rounds), deal(spec.data, spec.split, spec.seed)
    watched: list[tuple[ls.RoundHistory, ls.CommunicationLedger]] = []
    error, begun = "", time.perf_counter()
    try:
        for algorithm, first_round, end in fits(spec, module):
            module.first_round = first_round
            model = ls.FederatedModule(
                module,
                algorithm=algorithm,
                clients_per_round=CLIENTS_PER_ROUND,
                local_epochs=LOCAL_EPOCHS,
                server_optimizer=SETUPS[spec.setup].server_optimizer,
                seed=spec.seed + first_round,  # otherwise a second fit would draw the same clients as the first
            )
            watched.append((ls.RoundHistory(), ls.CommunicationLedger()))
            estimation = [ls.plugin.callbacks.BatchNormEstimation(EVERY)] if SETUPS[spec.setup].estimated else []
            quiet_trainer(end - first_round, [*watched[-1], *estimation], EVERY).fit(model, data)
    except (ls.errors.RoundError, ls.ClientError, ValueError) as failure:  # a diverged run is a result
        error = str(failure).splitlines()[0]
    rows = [row for history, _ in watched for row in history.rows]
    curves = {name: [row[name] for row in rows if name in row] for name in ("val", "test", "fl/loss")}
    turns = {str(ratio): sum(both) for _, ledger in watched for ratio, both in ledger.bytes_per_client().items()}
    seconds = round(time.perf_counter() - begun, 1)
    return {**asdict(spec), **curves, "bytes_per_turn": {} if error else turns, "error": error, "seconds": seconds}


def fits(spec: Spec, module: pl.LightningModule) -> Iterator[tuple[ls.Algorithm, int, int]]:
    """Yield each algorithm, its first round and the round after its last; two where the first rounds are dense."""
    setup = SETUPS[spec.setup]
    if setup.dense_rounds:
        yield ls.FedAvg(), 0, setup.dense_rounds
    yield setup.algorithm(spec.keep_ratio, module), setup.dense_rounds, spec.num_rounds


def todo(plans: Sequence[str]) -> Iterator[Spec]:
    """Yield the runs of some plans that have no result, in order; later ones may depend on earlier results."""
    for plan in plans:
        yield from (spec for spec in PLANS[plan](best_rates()) if not spec.path.exists())


def train_missing(specs: Iterable[Spec]) -> None:
    """Train the runs that no other process has claimed or finished."""
    for spec in specs:
        result = train_once(spec.path, partial(train, spec))
        if result is None:
            continue
        last = f"{result['test'][-1]:.1%}" if result["test"] else "-"
        print(f"{spec.path.stem}: {last} {result['error']} ({result['seconds']:.0f} s)", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the missing runs of the study.")
    parser.add_argument("--plans", nargs="+", choices=PLANS, default=list(PLANS), help="which runs (all)")
    parser.add_argument(
        "--setups", nargs="+", choices=SETUPS, default=list(SETUPS), metavar="SETUP", help="only some setups (all)"
    )
    parser.add_argument("--list", action="store_true", help="only list the missing runs")
    args = parser.parse_args()
    silence_lightning()
    warnings.filterwarnings("ignore")  # some of these runs are expected to fail
    torch.set_num_threads(1)
    OUTPUT.mkdir(parents=True, exist_ok=True)
    restore(OUTPUT)
    left = (spec for spec in todo(args.plans) if spec.setup in args.setups)
    if args.list:
        print(*(listed := list(dict.fromkeys(left))), f"{len(listed)} runs left, {len(results())} done", sep="\n")
        return
    train_missing(left)


if __name__ == "__main__":
    main()
