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
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import fedlrt
import lightning.pytorch as pl
import torch
from plans import OUTPUT, PLANS, Spec, missing, results
from quiet import quiet_trainer, silence_lightning
from records import restore, train_once
from setups import (
    ESTIMATED,
    LARGE,
    OWN_ROUNDS,
    SERVERS,
    algorithm_of,
    hooks_of,
    of_all,
)
from tasks import CLIENTS_PER_ROUND, LOCAL_EPOCHS, Classifier, deal, second_half

import lightning_spectral as ls

EVERY = 5  # rounds between two evaluations


def train(spec: Spec) -> dict[str, Any]:
    """Train a run. Return validation and test accuracy and the bytes of a client's turn, or the error that ended it."""
    torch.manual_seed(spec.seed)
    module, data = Classifier(spec.net, spec.lr, spec.num_rounds), deal(spec.data, spec.split, spec.seed)
    data = second_half(data, spec.seed) if spec.setup.startswith(LARGE) else data
    begun = time.perf_counter()
    if spec.setup in OWN_ROUNDS:
        curves, turn, error = fedlrt.train(module, data, float(spec.keep_ratio), spec.seed, EVERY)
        return record(spec, curves, {} if error else {str(spec.keep_ratio): turn}, error, begun)

    def federation() -> ls.FederatedModule:
        network, keep_ratio = of_all(spec.setup, spec.keep_ratio, module)
        return ls.FederatedModule(
            network,
            algorithm=algorithm_of(spec.setup, keep_ratio, network),
            local_hooks=hooks_of(spec.setup, network, spec.num_rounds),
            clients_per_round=CLIENTS_PER_ROUND,
            local_epochs=LOCAL_EPOCHS,
            server_optimizer=SERVERS[spec.server],
            seed=spec.seed,
        )

    averages = [ls.plugin.callbacks.BatchNormEstimation(EVERY)] if spec.setup.startswith(ESTIMATED) else []
    return record(spec, *fitted(federation, data, spec.num_rounds, averages), begun)


def fitted(
    federation: Callable[[], ls.FederatedModule],
    data: ls.FederatedDataModule,
    num_rounds: int,
    callbacks: Sequence[pl.Callback] = (),
) -> tuple[dict[str, Any], dict[str, float], str]:
    """Fit a federation. Return its curves and the bytes of a client's turn, and the error that ended it, if any."""
    history, ledger, error = ls.RoundHistory(), ls.CommunicationLedger(), ""
    try:
        quiet_trainer(num_rounds, [history, ledger, *callbacks], EVERY).fit(federation(), data)
    except (ls.errors.RoundError, ls.ClientError, ValueError) as failure:  # a diverged run is a result
        error = str(failure).splitlines()[0]
    curves = {name: [row[name] for row in history.rows if name in row] for name in ("val", "test", "fl/loss")}
    turns = {} if error else {str(ratio): sum(both) for ratio, both in ledger.bytes_per_client().items()}
    return curves, turns, error


def record(spec: Spec, curves: dict[str, Any], turns: dict[str, float], error: str, begun: float) -> dict[str, Any]:
    """Return what is kept of a run that was begun at a time."""
    seconds = round(time.perf_counter() - begun, 1)
    return {**asdict(spec), **curves, "bytes_per_turn": turns, "error": error, "seconds": seconds}


def todo(plans: Sequence[str]) -> Iterator[Spec]:
    """Yield the runs of some plans that have no result; later ones depend on the results of earlier ones."""
    for plan in plans:
        yield from missing(plan)


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
    parser.add_argument("--list", action="store_true", help="only list the missing runs")
    args = parser.parse_args()
    silence_lightning()
    warnings.filterwarnings("ignore")  # some of these runs are expected to fail
    torch.set_num_threads(1)
    OUTPUT.mkdir(parents=True, exist_ok=True)
    restore(OUTPUT)
    if args.list:
        listed = list(dict.fromkeys(todo(args.plans)))
        print(*listed, f"{len(listed)} runs come next, {len(results())} done", sep="\n")
        return
    train_missing(todo(args.plans))


if __name__ == "__main__":
    main()
