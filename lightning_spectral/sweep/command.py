"""``python -m lightning_spectral sweep``: many runs from one config, and how they compare."""

from __future__ import annotations

import fcntl
import json
import signal
import sys
import time
from argparse import ArgumentParser, ArgumentTypeError, Namespace, RawDescriptionHelpFormatter
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from subprocess import PIPE, STDOUT, Popen

import yaml

from lightning_spectral.arguments import at_least_one
from lightning_spectral.errors import ReportError
from lightning_spectral.report.compared import group_runs, groups_table, in_order, on_repetitions
from lightning_spectral.report.measures import choose_metric, lower_is_better
from lightning_spectral.report.page import write_report
from lightning_spectral.report.runs import NAME as RECORD
from lightning_spectral.report.runs import OUTPUT, printable, read_runs
from lightning_spectral.sweep.plan import FINISHED, PlannedRun, SweepError, begin, planned_runs
from lightning_spectral.sweep.run import COMPARED, FEDERATED, resolved
from lightning_spectral.tables import as_text

DESCRIPTION = """\
Train one config with every combination of some settings and with several seeds, and compare them:

  sweep --config run.yaml --vary model.algorithm=spectral,fedavg --vary data.partitioner.alpha=0.3,10 \\
        --seeds 0,1,2 --jobs 2

Each run has a folder, with its config, its metrics, its last checkpoint and what it printed. The same command continues
where it was interrupted, and repeats nothing. Further options are passed to every run, such as --trainer.max_epochs=20.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command with some arguments, by default those of this process.

    Returns:
        0; 1 if a run failed; 2 if the sweep cannot begin; 130 if it was interrupted. Standard error says what is wrong.
    """
    name, layout = "python -m lightning_spectral sweep", RawDescriptionHelpFormatter
    parser = ArgumentParser(name, description=DESCRIPTION, formatter_class=layout, allow_abbrev=False)
    add = parser.add_argument
    add("-c", "--config", action="append", required=True, help="the config of the runs, as for fit")
    varied = "a setting and its values; commas within brackets or quotes belong to a value"
    add("--vary", action="append", default=[], metavar="KEY=VALUE,VALUE", help=varied)
    add("--seeds", type=_seeds, default=[], metavar="0,1,2", help="repeat each combination with these seeds")
    add("--jobs", type=at_least_one, default=1, metavar="N", help="how many runs at a time (default: %(default)s)")
    add("-o", "--output", type=Path, metavar="FOLDER", help="where runs are kept (default: sweeps/NAME_OF_THE_CONFIG)")
    ends = "compare each run with a model of each client's data alone, and with one of all data"
    add("--ends", action="store_true", help=ends)
    add("--target", type=float, metavar="VALUE", help="also report the cost of reaching this value of the metric")
    options, given = parser.parse_known_args(argv)
    configs = [text for path in options.config for text in ("--config", path)]
    folder = options.output or Path("sweeps") / Path(options.config[-1]).stem
    try:
        runs = planned_runs(options.vary, options.seeds)
        with alone_in(folder):
            return _sweep(runs, folder, [*configs, *given], options)
    except SweepError as error:
        _complain(str(error))
        return 2
    except KeyboardInterrupt:
        _complain("interrupted; run the same command again to continue")
        return 130


def _sweep(runs: Sequence[PlannedRun], folder: Path, given: Sequence[str], options: Namespace) -> int:
    mistakes: dict[str, list[PlannedRun]] = defaultdict(list)
    able = {}
    for run in runs:
        try:
            config = resolved(given, run)
            if options.ends:
                data = yaml.safe_load(config).get("data") or {}
                if not data.get("init_args", data).get("client_val_fraction"):
                    raise SweepError("`--ends` compares clients of one model; add --data.client_val_fraction=0.2")
            begin(folder / run.folder, config)
            able[run] = folder / run.folder
        except SweepError as error:
            mistakes[str(error)].append(run)
    for mistake, of in mistakes.items():  # each is reported once
        _complain(mistake if len(of) == len(runs) else f"{'; '.join(run.name for run in of)}: {mistake}")
    if not able:
        raise SweepError("no run can be trained")
    done = COMPARED if options.ends else FINISHED
    waiting = {run: place for run, place in able.items() if not (place / done).is_file()}
    if before := len(able) - len(waiting):
        print(f"{before} of {len(runs)} runs are finished already")
    if waiting:
        print(f"training {len(waiting)} runs; what each prints is in its folder, in {OUTPUT}", flush=True)
    begun = time.monotonic()
    for number, (run, failure) in enumerate(_train_all(waiting, options.jobs, options.ends), start=1):
        if failure:
            _complain(f"{run.name}: {failure} (see {able[run] / OUTPUT})")
        else:
            left = (time.monotonic() - begun) / number * (len(waiting) - number)
            print(f"[{before + number}/{len(able)}] {run.name}, {left / 60:.1f} min left", flush=True)
    record = Path(FEDERATED, RECORD) if options.ends else Path(RECORD)
    finished = [place / record for place in able.values() if (place / done).is_file()]
    if finished:
        try:
            metric, read, _ = choose_metric(read_runs(finished)[0])
            groups = in_order(group_runs(read)[0], metric)
            table = groups_table(groups, metric, lower_is_better(metric))
            shown = as_text([[tuple(map(str, row)) for row in (table.columns, *table.rows)]])
            print("", shown, "", *filter(None, [on_repetitions(groups, metric)]), sep="\n")
            print(f"wrote {write_report(finished, folder / 'report.html', target=options.target)[0]}")
        except (ModuleNotFoundError, ReportError) as error:
            _complain(str(error))
            return 1
    return int(len(finished) < len(runs))


def _train_all(places: Mapping[PlannedRun, Path], jobs: int, ends: bool) -> Iterator[tuple[PlannedRun, str]]:
    """Train runs, each in a process; yield each with why it failed, empty if it did not, as soon as it ends."""
    waiting, working = deque(places), dict[PlannedRun, Popen[bytes]]()
    try:
        while waiting or working:
            while waiting and len(working) < jobs:
                run = waiting.popleft()
                command = [sys.executable, "-m", "lightning_spectral.sweep.run", str(places[run])]
                command += [json.dumps(run.settings), *["ends"] * ends]
                with (places[run] / OUTPUT).open("ab") as output:
                    # a session of its own: Ctrl-C reaches the sweep alone
                    working[run] = Popen(command, stdin=PIPE, stdout=output, stderr=STDOUT, start_new_session=True)
            for run, process in list(working.items()):
                if process.poll() is not None:
                    process.communicate()
                    del working[run]
                    yield run, _failure(process.returncode, places[run])
            time.sleep(0.05)
    finally:
        for process in working.values():
            process.communicate()  # closes the pipe, which ends it


def _failure(status: int, place: Path) -> str:
    if status == 0:
        return ""
    if status == -signal.SIGKILL:
        return "its process was killed; if memory ran out, use fewer jobs"
    lines = (place / OUTPUT).read_text(errors="replace").split("\n")
    last = next((line for line in reversed(lines) if line.strip()), "")
    return last.removeprefix("error: ") if status in (1, 2) and last else f"its process ended with status {status}"


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Keep other sweeps out of a folder, which would train the same runs."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / ".lock").open("w")
    except OSError as error:
        raise SweepError(f"{folder} cannot be written: {error.strerror}. Choose another with `-o`.") from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # however this process ends, the lock ends with it
        except BlockingIOError:
            message = f"another sweep is at work in {folder}; wait for it, or choose another with `-o`"
            raise SweepError(message) from None
        yield


def _complain(text: str) -> None:
    print(f"error: {printable(text)}", file=sys.stderr, flush=True)


def _seeds(text: str) -> list[int]:
    parts = text.replace(" ", "").split(",")
    if not all(map(str.isdecimal, parts)):
        raise ArgumentTypeError(f"expected whole numbers of at least 0 such as 0,1,2, got {text!r}")
    return list(map(int, parts))
