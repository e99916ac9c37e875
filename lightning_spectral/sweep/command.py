"""``python -m lightning_spectral sweep``: many runs from one config, and what they have to say in comparison."""

from __future__ import annotations

import fcntl
import os
import sys
from argparse import ArgumentParser, ArgumentTypeError, RawDescriptionHelpFormatter
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from lightning_spectral.errors import ReportError
from lightning_spectral.extras import from_extra
from lightning_spectral.report.compared import groups_table, in_order
from lightning_spectral.report.groups import group_runs
from lightning_spectral.report.measures import choose_metric, with_metric
from lightning_spectral.report.runs import Table, read_runs
from lightning_spectral.report.texts import printable
from lightning_spectral.sweep.plan import PlannedRun, SweepError, planned_runs
from lightning_spectral.sweep.run_folder import RunFolder
from lightning_spectral.sweep.workers import Worker, train_all, workers

DESCRIPTION = """\
Train one config with every combination of some settings and with several seeds, and compare them:

  sweep --config run.yaml --vary model.algorithm=spectral,fedavg --vary data.partitioner.alpha=0.3,10 \\
        --seeds 0,1,2 --jobs 2

Each run has a folder, with its config, its metrics, its last checkpoint and what it printed. The same command goes on
where it was interrupted, and repeats nothing. Further options are passed to every run, such as --trainer.max_epochs=20.
"""
INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command with some arguments, by default those of this process.

    Returns:
        0; 1 if a run failed; 2 if the sweep cannot begin; 130 if it was interrupted. Standard error says what is wrong.
    """
    options, given = _parser().parse_known_args(argv)
    configs = [text for path in options.config for text in ("--config", path)]
    folder = options.output or Path("sweeps") / Path(options.config[-1]).stem
    try:
        runs = planned_runs(options.vary, options.seeds)
        to_train = sum(not RunFolder(folder / run.folder).is_finished for run in runs)
        with alone_in(folder), workers(max(1, min(options.jobs, to_train)), (*configs, *given)) as pool:
            return _sweep(runs, folder, pool, options.target)
    except SweepError as error:
        _complain(str(error))
        return 2
    except KeyboardInterrupt:
        _complain("interrupted; the same command goes on where this one stopped")
        return INTERRUPTED


def _sweep(runs: Sequence[PlannedRun], folder: Path, pool: list[Worker], target: float | None) -> int:
    able = _checked(runs, folder, pool)
    places = {run: folder / run.folder for run in able}
    waiting = [(run, path) for run, path in places.items() if not RunFolder(path).is_finished]
    before = len(able) - len(waiting)
    if before:
        print(f"{before} of {len(runs)} runs are finished already")
    failed = set()
    for number, (run, failure) in enumerate(train_all(pool, waiting), start=before + 1):
        if failure:
            failed.add(run)
            _complain(f"{run.name}: {failure} (see {RunFolder(places[run]).output})")
        else:
            print(f"[{number}/{len(able)}] {run.name}", flush=True)
    finished = [path for run, path in places.items() if run not in failed]
    written = compare(finished, folder / "report.html", target)
    return int(bool(failed) or len(able) < len(runs) or not written)


def _checked(runs: Sequence[PlannedRun], folder: Path, pool: Sequence[Worker]) -> list[PlannedRun]:
    """The runs that can be trained, each with its config in its folder; each mistake is told once."""
    mistakes: dict[str, list[PlannedRun]] = defaultdict(list)
    configs: dict[PlannedRun, str] = {}
    for run, found in zip(runs, pool[0].check(runs), strict=True):
        if mistake := found.mistake or _other_settings(RunFolder(folder / run.folder), found.config):
            mistakes[mistake].append(run)
        else:
            configs[run] = found.config
    for mistake, of in mistakes.items():
        _complain(mistake if len(of) == len(runs) else f"{'; '.join(run.name for run in of)}: {mistake}")
    if not configs:
        raise SweepError("no run can be trained")
    for run, config in configs.items():
        if not RunFolder(folder / run.folder).is_finished:
            RunFolder(folder / run.folder).begin(config)
    return list(configs)


def _other_settings(folder: RunFolder, config: str) -> str:
    changed = folder.differences(config)
    return (
        f"{folder.path} has a run with other settings: {'; '.join(changed)}. Change them back, or remove that folder, "
        "or choose another for this sweep with `-o`."
        if changed
        else ""
    )


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Keep other sweeps out of a folder, which would train the same runs."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = os.open(folder / ".lock", os.O_CREAT | os.O_RDWR)
    except OSError as error:
        raise SweepError(f"{folder} cannot be written: {error.strerror}. Choose another with `-o`.") from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError:
        raise SweepError(f"another sweep is at work in {folder}; wait for it, or choose another with `-o`") from None
    finally:
        os.close(file)


def compare(finished: Sequence[Path], page: Path, target: float | None) -> bool:
    """Print a table of finished runs, by their folders, and write the report; ``False`` if that is impossible."""
    if not finished:
        return False
    try:
        print("\n".join(["", *aligned(table(finished)), ""]))
        with from_extra("report"):
            from lightning_spectral.report.page import write_report
        (written, *_) = write_report(finished, page, target=target)
    except (ModuleNotFoundError, ReportError) as error:
        print(f"error: {error}", file=sys.stderr)
        return False
    print(f"wrote {written}")
    return True


def table(finished: Sequence[Path]) -> Table:
    """A row for each combination: its last evaluation, mean and deviation over seeds, rounds and megabytes."""
    runs, _ = with_metric(read_runs(finished)[0], None)
    metric = choose_metric(runs, None)
    return groups_table(in_order(group_runs(runs)[0], metric), metric)


def aligned(shown: Table) -> Iterator[str]:
    r"""The lines of a table, the first column on the left.

    Example:
        >>> print("\n".join(aligned(Table(("group", "runs"), (("FedAvg", 3), ("LoRA", 12))))))
        group   runs
        FedAvg     3
        LoRA      12
    """
    cells = [tuple(map(str, row)) for row in (shown.columns, *shown.rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for first, *others in cells:
        right = (text.rjust(width) for text, width in zip(others, widths[1:], strict=True))
        yield "  ".join([first.ljust(widths[0]), *right]).rstrip()


def _complain(text: str) -> None:
    print(f"error: {printable(text)}", file=sys.stderr, flush=True)


def _seeds(text: str) -> list[int]:
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        raise ArgumentTypeError(f"expected whole numbers such as 0,1,2, got {text!r}") from None
    if min(found) < 0:
        raise ArgumentTypeError(f"seeds must be at least 0, got {min(found)}")
    return found


def _jobs(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ArgumentTypeError(f"expected a number of at least 1, got {text!r}")
    return int(text)


def _parser() -> ArgumentParser:
    parser = ArgumentParser(
        "python -m lightning_spectral sweep",
        description=DESCRIPTION,
        formatter_class=RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("-c", "--config", action="append", required=True, help="the config of the runs, as for fit")
    add(
        "--vary",
        action="append",
        default=[],
        metavar="KEY=VALUE,VALUE",
        help="a setting and its values; commas within brackets or quotes belong to a value",
    )
    add("--seeds", type=_seeds, default=[], metavar="0,1,2", help="repeat each combination with these seeds")
    add("--jobs", type=_jobs, default=1, metavar="N", help="how many runs at a time (default: %(default)s)")
    add("-o", "--output", type=Path, metavar="FOLDER", help="where runs are kept (default: sweeps/NAME_OF_THE_CONFIG)")
    add("--target", type=float, metavar="VALUE", help="also report the cost of reaching this value of the metric")
    return parser
