"""What a sweep says at its end: a table with a row for each combination, and a report."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from lightning_spectral.errors import ReportError
from lightning_spectral.extras import from_extra
from lightning_spectral.report.compared import groups_table, in_order
from lightning_spectral.report.groups import group_runs
from lightning_spectral.report.measures import choose_metric, with_metric
from lightning_spectral.report.runs import Table, read_runs


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
