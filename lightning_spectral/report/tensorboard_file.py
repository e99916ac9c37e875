"""Reads TensorBoard event files with TensorBoard's own reader, including the records of `RoundDashboard`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from lightning_spectral.report.files import LOG_MEGABYTES, check_file, not_installed, real_path, unreadable
from lightning_spectral.report.hparams import read_hparams
from lightning_spectral.report.media import LoggedHistogram, LoggedTable, as_histogram, as_table
from lightning_spectral.report.names import OVER_BYTES, ROUND, SPECTRUM, TABLES
from lightning_spectral.report.runs import LoggedRun, as_cell, build_run

TEXT = "/text_summary"  # which SummaryWriter appends to the name of a text
MAX_ENTRIES = 1_000_000  # of a number, a histogram or a text
LAST_OF_ROW = "epoch"  # Lightning writes the numbers of a row one by one, and this one at the end


def read_tensorboard(path: Path) -> LoggedRun:
    """Read one event file, up to its last whole record, and the settings in the ``hparams.yaml`` next to it.

    All event files of a folder are parts of one run. Their numbers have float32 precision.
    """
    check_file(path, LOG_MEGABYTES)
    name = "/".join(path.parent.parts[-2:])
    run = build_run(name, path, read_hparams(path.parent), _entries(_events(path)))
    return run.identified(str(real_path(path.parent)))


def _events(path: Path) -> Iterable[Any]:
    try:
        from google.protobuf.message import DecodeError
        from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
    except ModuleNotFoundError as missing:
        raise not_installed(path, "TensorBoard") from missing
    try:
        yield from EventFileLoader(str(path)).Load()
    except DecodeError as error:
        raise unreadable(path, error) from error


def _entries(events: Iterable[Any]) -> Iterator[dict[str, Any]]:
    """Entries that were logged together: reassembled rows of numbers, and each table or histogram on its own."""
    row: dict[str, float] = {}
    row_step = 0
    for event in events:
        for value in event.summary.value:
            kind = value.metadata.plugin_data.plugin_name
            if kind == "scalars" and not value.tag.startswith(OVER_BYTES):  # whose step is a number of bytes
                if row and (event.step != row_step or LAST_OF_ROW in row):
                    yield row
                    row = {}
                row[value.tag], row_step = float(_array(value)), event.step
            elif (media := _media(kind, value)) is not None:
                yield {ROUND: event.step, value.tag.removesuffix(TEXT): media}
    yield row


def _array(value: Any) -> Any:
    from tensorboard.util.tensor_util import make_ndarray

    if math.prod(dim.size for dim in value.tensor.tensor_shape.dim) > MAX_ENTRIES:  # one number can fill any shape
        raise ValueError(f"`{value.tag}` has more than {MAX_ENTRIES} entries")
    return make_ndarray(value.tensor)


def _media(kind: str, value: Any) -> LoggedHistogram | LoggedTable | None:
    """A spectrum or a table of `RoundDashboard`; ``None`` for anything else."""
    if kind == "histograms" and SPECTRUM in value.tag:
        left, right, counts = _array(value).T.tolist()
        return as_histogram([*left[:1], *right], counts)
    is_table = kind == "text" and TABLES in value.tag and value.tag.endswith(TEXT)
    return _table(_array(value).item(0).decode()) if is_table else None


def _table(text: str) -> LoggedTable | None:
    r"""Parse a table in Markdown; ``None`` if the text is not a table.

    Example:
        >>> _table("| client | loss |\n| --- | --- |\n| 3 | 0.5 |\n| 4 |  |")
        LoggedTable(columns=('client', 'loss'), rows=((3, 0.5), (4, '')))
    """
    lines = [tuple(cell.strip() for cell in line.strip("|").split("|")) for line in text.splitlines()]
    if len(lines) < 2 or set(lines[1]) != {"---"}:
        return None
    return as_table(lines[0], [tuple(map(as_cell, line)) for line in lines[2:]])
