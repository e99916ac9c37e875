"""The papers' experiments, one command each: their tables with the papers' numbers beside ours, and their figures.

    python examples/paper/run.py table1 --scale cpu
    python examples/paper/run.py --list

trains the missing runs, seed by seed, and writes a table in Markdown, a line per run in CSV and figures to
``outputs/paper/cpu``. ``--scale gpu`` uses the papers' sizes, ``--scale toy`` takes seconds. When started again, the
command skips finished runs and continues an interrupted one. Runs shared by several tables are trained once, and
several processes at a time share the work.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
import yaml
from costs import Costs
from evidence import Store
from figures import draw, drawable
from grid import SCALES, Grid, read_grid
from quiet import silence_lightning
from records import keep, restore
from settings import Settings
from sources import MissingDataError
from tables import markdown, write_csv

import lightning_spectral as ls

SEEDS = (0, 1, 2)
GRIDS = Path(__file__).parent / "grids"
REPORTED = Path("docs/paper")  # in a clone
Experiment = Grid | Costs


def names() -> list[str]:
    """Return the names of all experiments."""
    return sorted(path.stem for path in GRIDS.glob("*.yaml"))


def read(name: str, scale: str) -> Experiment:
    """Read an experiment at a scale."""
    text = yaml.safe_load((GRIDS / f"{name}.yaml").read_text())
    return Costs.read(name, text, scale) if "costs" in text else read_grid(name, text, scale)


def todo(experiments: Sequence[Experiment], store: Store, seeds: Sequence[int]) -> Iterator[Settings]:
    """Yield the runs that are not done yet, seed by seed."""
    for seed in seeds:
        for one in experiments:
            yield from (run for run in one.runs(seed) if not store.path(run).exists())


def train(experiments: Sequence[Experiment], store: Store, seeds: Sequence[int], accelerator: str) -> None:
    """Train the missing runs one after another; skip those without data and print the reason."""
    skipped = set()
    for run in todo(experiments, store, seeds):
        try:
            done = store.train(run, accelerator)
        except MissingDataError as missing:
            if str(missing) not in skipped:
                print(f"skipped: {run.data}: {missing}", flush=True)
            skipped.add(str(missing))
            continue
        if done is None:
            continue
        result = done["error"] or f"{done['final']['val_accuracy']:.1%}"
        print(f"{run.key}: {result} ({done['seconds']:.0f} s)", flush=True)


def report(experiment: Experiment, store: Store, seeds: Sequence[int], folder: Path) -> None:
    """Write the results so far."""
    folder.mkdir(parents=True, exist_ok=True)
    page = folder / f"{experiment.name}.md"
    if isinstance(experiment, Costs):
        page.write_text(experiment.markdown())
        return
    page.write_text(markdown(experiment, store, seeds))
    write_csv(experiment, store, seeds, folder / f"{experiment.name}.csv")
    draw(experiment, store, seeds, folder)


def quiet_lightning() -> None:
    """Silence its messages about every run, and the warning that Lightning 2.6 triggers in torch 2.13."""
    silence_lightning()
    warnings.filterwarnings("ignore", message=".*LeafSpec", category=FutureWarning)


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description="The papers' experiments.")
    parser.add_argument("experiments", nargs="*", metavar="experiment", help=f"any of: {', '.join(names())}")
    parser.add_argument("--scale", choices=SCALES, default="cpu", help="the papers' sizes, or smaller (%(default)s)")
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS), help="seeds (0 1 2)")
    parser.add_argument("--output", type=Path, default=Path("outputs/paper"), help="folder (%(default)s)")
    parser.add_argument(
        "--report", type=Path, help="train nothing; write the tables, figures and finished runs to this folder"
    )
    parser.add_argument("--accelerator", default="auto", help="the Trainer's accelerator (%(default)s)")
    parser.add_argument("--list", action="store_true", help="only list the experiments, and how many runs are left")
    args = parser.parse_args(arguments)
    if unknown := sorted(set(args.experiments) - set(names())):
        parser.error(f"unknown experiment {', '.join(unknown)}; choose from {', '.join(names())}")
    if not args.experiments and not args.list:
        parser.error(f"name one or more experiments: {', '.join(names())}")
    if min(args.seeds) < 0 or len(set(args.seeds)) < len(args.seeds):
        given = " ".join(map(str, args.seeds))
        parser.error(f"--seeds must be different and not negative, got {given}; name each once, such as --seeds 0 1 2")
    return args


def main(arguments: Sequence[str] | None = None) -> None:
    args = parsed(arguments)
    store, kept = Store(args.output / args.scale / "runs"), f"runs_{args.scale}.jsonl"
    restore(store.folder, REPORTED / kept)
    experiments = [read(name, args.scale) for name in args.experiments or names()]
    if args.list:
        for one in experiments:
            left = len({run.key for run in todo([one], store, args.seeds)})
            print(f"{one.name:<16}{left:>4} runs left   {one.title}")
        return
    quiet_lightning()
    folder = args.report or args.output / args.scale
    for seeds in [[]] if args.report else [[seed] for seed in args.seeds]:
        train(experiments, store, seeds, args.accelerator)
        for one in experiments:
            report(one, store, args.seeds, folder)
    if args.report:
        keep(store.folder, args.report / kept, drawable)
    print(f"tables and figures: {folder}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    ls.plugin.tune_allocator()
    main()
