"""The papers' experiments, one command each: their tables with the papers' numbers beside ours, and their figures.

    python examples/paper/run.py table1 --rows Collective TopN --tasks Fashion-MNIST --seeds 7 --fresh
    python examples/paper/run.py mine.yaml --minutes 10
    python examples/paper/run.py --list

trains the missing runs, seed by seed, and writes a table in Markdown, a line per run in CSV and figures to
``outputs/paper/cpu``. ``--scale gpu`` uses the papers' sizes, ``--scale toy`` takes seconds. When started again, the
command skips finished runs and continues an interrupted one. Runs shared by several tables are trained once, and
several processes at a time share the work. Runs that are stored in this repository are trained only with ``--fresh``.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean, stdev

import torch
import yaml
from costs import Costs
from evidence import Evidence, Stopped, Store
from figures import draw, drawable
from grid import SCALES, Grid, plain, read_grid
from quiet import silence_lightning
from records import keep, kept_runs
from settings import Settings
from sources import MissingDataError, missing
from tables import METRICS, markdown, write_csv

import lightning_spectral as ls

SEEDS = (0, 1, 2)
GRIDS = Path(__file__).parent / "grids"
REPORTED = Path(__file__).parents[2] / "docs/paper"
Experiment = Grid | Costs


def names() -> list[str]:
    """Return the names of all experiments."""
    return sorted(path.stem for path in GRIDS.glob("*.yaml"))


def read(name: str, scale: str) -> Experiment:
    """Read an experiment of this folder, or one's own file, beside which its classes are found, at a scale."""
    path = Path(name) if name.endswith(".yaml") else GRIDS / f"{name}.yaml"
    if path.parent != GRIDS and str(path.parent.resolve()) not in sys.path:
        sys.path.append(str(path.parent.resolve()))
    name, text = path.stem, yaml.safe_load(path.read_text())
    return Costs.read(name, text, scale) if "costs" in text else read_grid(name, text, scale)


def todo(experiments: Sequence[Experiment], store: Store, seeds: Sequence[int]) -> Iterator[Settings]:
    """Yield the runs that are not done yet, seed by seed."""
    for seed in seeds:
        for one in experiments:
            yield from (run for run in one.runs(seed) if not store.has(run))


def train(
    experiments: Sequence[Experiment], store: Store, seeds: Sequence[int], accelerator: str, end: float = math.inf
) -> bool:
    """Train the missing runs one after another, and return whether all ended before the time was over.

    Those without data are skipped, with the reason.
    """
    skipped = set()
    for run in todo(experiments, store, seeds):
        try:
            done = store.train(run, accelerator, end)
        except Stopped as stopped:
            print(f"stopped; the same command continues: {stopped}", flush=True)
            return False
        except MissingDataError as missing:
            if str(missing) not in skipped:
                print(f"skipped: {run.data}: {missing}", flush=True)
            skipped.add(str(missing))
            continue
        if done is None:
            continue
        result = done["error"] or f"{done['final']['val_accuracy']:.1%}"
        print(f"{run.key}: {result} ({done['seconds']:.0f} s){beside(run, done, store)}", flush=True)
    return True


def beside(run: Settings, done: Evidence, store: Store) -> str:
    """Return what is stored of a run that was trained anew, and of the same run with other seeds, as text."""
    accuracy = METRICS["accuracy"]
    found = {seed: store.kept.get(replace(run, seed=seed).key) for seed in SEEDS}
    stored = {seed: value for seed, one in found.items() if one and (value := accuracy.of(one)) is not None}
    parts, new = [], accuracy.of(done)
    if run.seed in stored:
        parts.append(f"stored with this seed: {stored[run.seed]:.2f} %")
    if len(stored) > 1:
        centre, deviation = mean(stored.values()), stdev(stored.values())
        parts.append(f"stored with seeds {', '.join(map(str, stored))}: {centre:.2f} ± {deviation:.2f} %")
        if new is not None and deviation:
            parts.append(
                f"{abs(new - centre) / deviation:.1f} standard deviations {'above' if new > centre else 'below'}"
            )
    return "".join(f"; {part}" for part in parts)


def listed(one: Experiment, store: Store, seeds: Sequence[int]) -> Iterator[str]:
    """Yield lines: what is stored, what is to be trained and for how long, and what data are missing."""
    runs = [run for seed in seeds for run in one.runs(seed)]
    left = list({run.key: run for run in todo([one], store, seeds)}.values())
    here = sum(store.path(run).exists() for run in runs)
    seconds = [each and each * run.num_rounds for run in left for each in [store.seconds_per_round(run)]]
    known, unknown = sum(filter(None, seconds)) / 3600, seconds.count(None)
    hours = ", ".join(
        filter(None, (f"about {known:.1f} hours" * bool(known), f"{unknown} of unknown time" * bool(unknown)))
    )
    of_left = f"{len(left)} to train" + (f" ({hours})" if hours else "")
    yield f"{one.name:<16}{len(runs) - here - len(left):>4} stored {here:>4} trained here  {of_left:<44} {one.title}"
    yield from (f"    skipped: {data}: {why}" for data in sorted({run.data for run in left}) if (why := missing(data)))


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
    add = parser.add_argument
    which = f"any of {', '.join(names())}; or a file of your own, such as mine.yaml"
    add("experiments", nargs="*", metavar="experiment", help=which)
    add("--scale", choices=SCALES, default="cpu", help="the papers' sizes, or smaller (%(default)s)")
    add("--rows", nargs="+", default=[], metavar="ROW", help="only these rows, such as Collective TopN")
    add("--tasks", nargs="+", default=[], metavar="TASK", help="only these tasks, such as Fashion-MNIST")
    ratios = "only these keep ratios, such as 0.1; mixed and whole are others"
    add("--keep-ratios", nargs="+", default=[], metavar="RATIO", help=ratios)
    add("--seeds", type=int, nargs="+", default=list(SEEDS), help="seeds (0 1 2)")
    add("--fresh", action="store_true", help="also train runs that are stored, and print both results")
    add(
        "--minutes",
        type=float,
        default=math.inf,
        help="stop after a round, before so many minutes of training are over",
    )
    add("--output", type=Path, default=Path("outputs/paper"), help="folder (%(default)s)")
    add("--report", type=Path, help="train nothing; write the tables, figures and finished runs to this folder")
    add("--accelerator", default="auto", help="the Trainer's accelerator (%(default)s)")
    add("--list", action="store_true", help="only list what is stored, what is to be trained, and how long that takes")
    args = parser.parse_args(arguments)
    unknown = [name for name in args.experiments if name not in names() and not Path(name).is_file()]
    if unknown:
        parser.error(f"unknown experiment {', '.join(unknown)}; choose from {', '.join(names())}, or name a YAML file")
    if not args.experiments and not args.list:
        parser.error(f"name one or more experiments: {', '.join(names())}")
    if min(args.seeds) < 0 or len(set(args.seeds)) < len(args.seeds):
        given = " ".join(map(str, args.seeds))
        parser.error(f"--seeds must be different and not negative, got {given}; name each once, such as --seeds 0 1 2")
    try:
        args.experiments = chosen(args)
    except ValueError as error:
        parser.error(str(error))
    return args


def chosen(args: argparse.Namespace) -> list[Experiment]:
    """Return the experiments, with only the rows, tasks and keep ratios that are asked for.

    Raises:
        ValueError: If a file is wrong, or none of the experiments has one of the names.
    """
    experiments = [read(name, args.scale) for name in args.experiments or names()]
    asked = {"--rows": args.rows, "--tasks": args.tasks, "--keep-ratios": args.keep_ratios}
    cells = [cell.names for one in experiments if isinstance(one, Grid) for cell in one.cells]
    columns = list(zip(*cells, strict=True)) or [()] * len(asked)  # a figure has none of them
    for (option, wanted), there in zip(asked.items(), map(dict.fromkeys, columns), strict=True):
        if lost := [name for name in wanted if plain(name) not in map(plain, there)]:
            raise ValueError(f"{option}: there is no {', '.join(lost)}; there are {', '.join(there)}")
    return [one.choose(*asked.values()) if isinstance(one, Grid) else one for one in experiments]


def main(arguments: Sequence[str] | None = None) -> None:
    end, args = time.monotonic(), parsed(arguments)
    end += 60 * args.minutes
    name, folder = f"runs_{args.scale}.jsonl", args.report or args.output / args.scale
    kept = {key: run | {"stored": not args.report} for key, run in kept_runs(REPORTED / name).items()}
    store = Store(args.output / args.scale / "runs", kept, args.fresh)
    if args.list:
        print(f"Scale {args.scale}, seeds {' '.join(map(str, args.seeds))}; stored runs are in {REPORTED / name}.")
        print(*(line for one in args.experiments for line in listed(one, store, args.seeds)), sep="\n")
        return
    quiet_lightning()
    for seeds in [[]] if args.report else [[seed] for seed in args.seeds]:
        in_time = train(args.experiments, store, seeds, args.accelerator, end)
        for one in args.experiments:
            report(one, store, args.seeds, folder)
        if not in_time:
            break
    if args.report:
        keep(store.folder, args.report / name, drawable)
    print(f"tables and figures: {folder}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    ls.plugin.tune_allocator()
    main()
