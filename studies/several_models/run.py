"""Trains the missing runs, one after another: three or five models, 120 clients, 12 active processors.

    python studies/several_models/run.py
    python studies/several_models/run.py --federation five
    python studies/several_models/report.py

A run is one file in ``outputs/several_models``, or in ``outputs/several_models_five`` for five models. When started
again, the command continues where it stopped.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from federations import FEDERATIONS, Federation
from quiet import quiet_trainer, silence_lightning
from records import restore, train_once
from setups import SETUPS
from tasks import LOCAL_EPOCHS, PROCESSORS

import lightning_spectral as ls

NUM_ROUNDS, EVERY, SEEDS = 100, 5, 3
KEPT = ("fl/step_size", "fl/step_size_variance", "fl/active_processors", "fl/bytes_measuring", "fl/store_bytes")


def path_of(federation: Federation, setup: str, seed: int) -> Path:
    """Return the path of the result of a run."""
    return federation.output / f"{''.join(c if c.isalnum() or c in '*.' else '-' for c in setup)}_{seed}.json"


def train(federation: Federation, name: str, seed: int, num_rounds: int = NUM_ROUNDS) -> dict[str, Any]:
    """Train one run. Return each model's accuracy over the rounds, its sampler's metrics, and all bytes."""
    torch.manual_seed(seed)
    setup = SETUPS[name]
    models = {
        model: ls.FederatedModule(
            federation.module(model), algorithm=setup.algorithm(), local_epochs=LOCAL_EPOCHS, seed=seed
        )
        for model in federation.models
    }
    several = ls.MultiModelModule(models, participation=setup.sampler, processors=PROCESSORS, seed=seed)
    history, ledger = ls.RoundHistory(), ls.CommunicationLedger()
    error, begun = "", time.perf_counter()
    try:
        quiet_trainer(num_rounds, [history, ledger], EVERY).fit(several, federation.deal(seed))
    except (ls.errors.RoundError, ls.ClientError) as failure:  # a diverged run is a result
        error = str(failure).splitlines()[0]
    curves = {
        model: {column: history.column(f"{model}/{column}") for column in ("accuracy", *KEPT)}
        for model in federation.models
    }
    seconds = round(time.perf_counter() - begun, 1)
    return {"setup": name, "seed": seed, **curves, "bytes": ledger.total_bytes, "error": error, "seconds": seconds}


def todo(federation: Federation, setups: list[str], seeds: int) -> Iterator[tuple[str, int]]:
    """Yield the runs that have no result, seed by seed."""
    for seed, name in product(range(seeds), setups):
        if not path_of(federation, name, seed).exists():
            yield name, seed


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the missing runs of the study of several models.")
    parser.add_argument("--federation", choices=FEDERATIONS, default="three", help="three models (default), or five")
    parser.add_argument("--setups", nargs="+", choices=SETUPS, default=list(SETUPS), help="only some setups (all)")
    parser.add_argument("--seeds", type=int, default=SEEDS, help=f"number of seeds ({SEEDS})")
    args = parser.parse_args()
    silence_lightning()
    warnings.filterwarnings("ignore")  # some of these runs are expected to fail
    torch.set_num_threads(1)
    federation = FEDERATIONS[args.federation]
    restore(federation.output)
    for name, seed in todo(federation, args.setups, args.seeds):
        result = train_once(path_of(federation, name, seed), partial(train, federation, name, seed))
        if result is None:
            continue
        last = [result[model]["accuracy"][-1:] for model in federation.models]
        accuracies = ", ".join(f"{values[0]:.1%}" if values else "-" for values in last)
        print(f"{name}, seed {seed}: {accuracies} {result['error']} ({result['seconds']:.0f} s)", flush=True)


if __name__ == "__main__":
    main()
