"""``python -m lightning_spectral report``: turns runs on the disk into a page that needs no account and no network."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, ArgumentTypeError, RawDescriptionHelpFormatter
from collections.abc import Sequence
from pathlib import Path

from lightning_spectral.errors import ReportError, from_extra
from lightning_spectral.report.texts import printable

DESCRIPTION = """\
Write one HTML page on federated runs: an evaluation metric against megabytes and rounds, clients, coverage, spectra,
and where the time went. It reads what runs left on the disk:

  lightning_logs/version_0/rounds.jsonl   what RoundHistory, RoundDashboard, `fit` and `sweep` write, a line per round
  a folder                                all such files in it

Runs whose settings differ only in their seeds form one group, drawn as a mean with a band; or name the groups, as in
`report fedavg=runs/a ours=runs/b`.
Of a run that was resumed in another folder, the last file counts.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command with some arguments, by default those of this process.

    Returns:
        0, or 1 if no report could be made; the reason is then on standard error.
    """
    arguments = vars(_parser().parse_args(argv))
    try:
        with from_extra("report"):
            from lightning_spectral.report.page import write_report
        written = write_report(**arguments)
    except (ModuleNotFoundError, ReportError) as error:
        return _failed(str(error))
    print("\n".join(printable(f"wrote {path}") for path in written))
    return 0


def _failed(reason: str) -> int:
    print("\n".join(map(printable, f"error: {reason}".split("\n"))), file=sys.stderr)
    return 1


def _path(text: str) -> Path:
    if not text:  # as from a variable of the shell that is not set; `Path` would take it for the current folder
        raise ArgumentTypeError("the path is empty")
    return Path(text)


def _parser() -> ArgumentParser:
    parser = ArgumentParser(
        "python -m lightning_spectral report", description=DESCRIPTION, formatter_class=RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add(
        "runs",
        nargs="+",
        type=_path,
        metavar="[LABEL=]RUN",
        help="a run or a folder of runs; those with a label are one group",
    )
    add("-o", "--output", type=_path, default=Path("report.html"), help="the page to write (default: %(default)s)")
    add("--metric", help="evaluation metric (default: an accuracy or the like that all runs have, otherwise a loss)")
    add("--target", type=float, metavar="VALUE", help="also report the cost of reaching this value of the metric")
    add("--mode", choices=("min", "max"), help="whether lower or higher is better (default: by its name)")
    add("--group-by", nargs="+", default=(), metavar="SETTING", help="settings that define the groups, e.g. keep_ratio")
    add("--png", type=_path, metavar="FOLDER", help="also write each figure there as a PNG file")
    add("--title", help="title of the page")
    return parser
