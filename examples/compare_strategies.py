"""Which singular terms should a client get? Four strategies at two keep ratios, and FedAvg on the whole model.

All sharded runs use the papers' recipe, `SpectralSharding.published`.

    python examples/compare_strategies.py

trains the model of `quickstart.py` 27 times, two runs at a time, each for half as many rounds: about 8 minutes on two
CPU cores. It prints test accuracy after the last round, and writes `accuracy.csv` (every run and round) and
`accuracy.png` to `outputs/compare/`. Mean and standard deviation in per cent over three seeds, which also change the
split between clients:

    keep ratio  0.1           0.2
    TopN        91.7 ± 1.6    92.8 ± 0.9
    PriSM       87.3 ± 1.0    90.6 ± 0.6
    Unbiased    87.7 ± 0.1    91.1 ± 0.7
    Collective  89.1 ± 0.5    91.0 ± 1.0
    FedAvg      94.3 ± 0.3  (the whole model)
"""

from __future__ import annotations

import argparse
import csv
import warnings
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from statistics import mean, stdev

import lightning.pytorch as pl
import torch
from quickstart import deal_digits, federate, quiet_lightning

import lightning_spectral as ls
from lightning_spectral.report.printed import BASELINE, draw_seeds, legend_above, look, printed, round_axis

STRATEGIES = {"TopN": ls.TopN(), "PriSM": ls.PriSM(), "Unbiased": ls.Unbiased(), "Collective": ls.Collective()}
KEEP_RATIOS = (0.1, 0.2)  # share of singular terms each client holds, as in the homogeneous setups of the 2024 paper
NUM_ROUNDS = 50  # communication rounds of each run
SEEDS = (0, 1, 2)  # for the initial weights, the split, participation and terms
NUM_PROCESSES = 2  # runs at a time, one thread each
DENSE = ("FedAvg", 1.0)
LOOKS = {DENSE[0]: BASELINE} | {name: look(index) for index, name in enumerate(STRATEGIES)}

Setup = tuple[str, float]  # name of the strategy, keep ratio
Results = Mapping[Setup, Mapping[int, Sequence[float]]]  # for each setup and seed, test accuracy after each round


def setups() -> dict[Setup, ls.Algorithm]:
    """Return every strategy at every keep ratio, and FedAvg, which has none."""
    pairs = product(KEEP_RATIOS, STRATEGIES)
    sharded = {(name, r): ls.SpectralSharding.published(STRATEGIES[name], r) for r, name in pairs}
    return {**sharded, DENSE: ls.FedAvg()}


def train(algorithm: ls.Algorithm, seed: int, num_rounds: int) -> list[float]:
    """Train one run and return its test accuracy after each round."""
    quiet_lightning()
    # random weights without a spectral start: this example studies the sub-models of the papers' recipe
    warnings.filterwarnings("ignore", "Round 0: sub-models of keep ratio", ls.SpectralWarning)
    torch.set_num_threads(1)
    history = ls.RoundHistory()
    trainer = pl.Trainer(
        max_epochs=num_rounds,
        accelerator="cpu",
        logger=False,
        callbacks=[history],
        num_sanity_val_steps=0,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
    )
    trainer.fit(federate(algorithm, num_rounds, seed), deal_digits(seed))
    return history.column("accuracy")


def train_all(seeds: Sequence[int], num_rounds: int) -> Results:
    """Train every setup with every seed, and print a line as each run finishes."""
    results: dict[Setup, dict[int, Sequence[float]]] = defaultdict(dict)
    with ProcessPoolExecutor(NUM_PROCESSES, mp_context=get_context("spawn")) as pool:
        pairs = product(seeds, setups().items())
        runs = {pool.submit(train, algorithm, seed, num_rounds): (s, seed) for seed, (s, algorithm) in pairs}
        for count, run in enumerate(as_completed(runs), start=1):
            setup, seed = runs[run]
            results[setup][seed] = accuracies = run.result()
            name, r = setup
            print(f"{count:>2}/{len(runs)}  seed {seed}  {name:<10}  r = {r}  {accuracies[-1]:.1%}", flush=True)
    return results


def cell(accuracies: Sequence[float]) -> str:
    """Format the mean and standard deviation over seeds, in per cent."""
    spread = f" ± {stdev(accuracies):.1%}" if len(accuracies) > 1 else ""
    return f"{mean(accuracies):.1%}{spread}".replace("%", "")


def print_table(results: Results) -> None:
    """Print the accuracy after the last round."""
    final = {setup: cell([accuracy[-1] for accuracy in runs.values()]) for setup, runs in results.items()}
    print("\ntest accuracy in %, mean ± standard deviation over seeds\n")
    print(f"{'keep ratio':<12}" + "".join(f"{r:<14}" for r in KEEP_RATIOS))
    for name in STRATEGIES:
        print(f"{name:<12}" + "".join(f"{final[name, r]:<14}" for r in KEEP_RATIOS))
    print(f"{DENSE[0]:<12}{final[DENSE]}  (the whole model)")


def write_csv(results: Results, path: Path) -> None:
    """Write one line per run and round."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["strategy", "keep_ratio", "seed", "round", "accuracy"])
        for setup, runs in results.items():
            for seed, accuracies in sorted(runs.items()):
                writer.writerows([*setup, seed, t, f"{a:.4f}"] for t, a in enumerate(accuracies, start=1))


def plot(results: Results, path: Path) -> None:
    """Draw accuracy per round, mean and range over seeds, in one panel per keep ratio."""
    with printed(path, 9.0, 3.8) as figure:
        panels = figure.subplots(1, len(KEEP_RATIOS), sharey=True)
        for axes, r in zip(panels, KEEP_RATIOS, strict=True):
            for name, own in LOOKS.items():
                runs = list(results[DENSE if name == DENSE[0] else (name, r)].values())
                draw_seeds(axes, range(1, len(runs[0]) + 1), runs, own, name)
            axes.set_title(f"keep ratio {r}")
            round_axis(axes)
        panels[0].set_ylabel("test accuracy")
        legend_above(figure, len(LOOKS))


def main() -> None:
    parser = argparse.ArgumentParser(description="Accuracy of every sharding strategy on the quickstart's task.")
    parser.add_argument("--rounds", type=int, default=NUM_ROUNDS, help="communication rounds of a run (%(default)s)")
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS, help="seeds (%(default)s)")
    parser.add_argument("--output", type=Path, default=Path("outputs/compare"), help="folder (%(default)s)")
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    results = train_all(args.seeds, args.rounds)
    write_csv(results, args.output / "accuracy.csv")
    plot(results, args.output / "accuracy.png")
    print_table(results)


if __name__ == "__main__":
    main()
