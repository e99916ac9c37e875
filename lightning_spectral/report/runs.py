"""A run as a report sees it: one row of numbers per round, and the tables and histograms that were logged with it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from lightning_spectral.errors import ReportError
from lightning_spectral.report.media import LoggedHistogram, LoggedTable, Media
from lightning_spectral.report.names import BOOKKEEPING, BYTES, ROUND
from lightning_spectral.report.settings import flat_settings
from lightning_spectral.report.texts import printable, shortened

NOT_ENDED = "the file ends before the run does: it was killed, or is still running"
LARGEST = 3.4028235e38  # of float32; a metric beyond it has diverged, and its square would not be a number
MAX_ROUND = 10**9
MAX_NUMBERS = 50_000_000  # metrics times rounds
MAX_NAME = 200  # letters of a run's name


@dataclass(frozen=True)
class LoggedRun:
    """One run."""

    name: str  # given by its author, or that of its folder
    path: Path  # of the file that it was read from
    config: Mapping[str, Any]
    rows: tuple[Mapping[str, float], ...]  # the numbers of each round, ascending by `fl/round`
    media: Mapping[str, Mapping[int, Media]] = field(default_factory=dict)  # by name, then by round
    from_clients: frozenset[str] = frozenset()  # metrics logged with the round itself, while clients trained
    notes: tuple[str, ...] = ()  # remarks on the file, for readers of the report
    identity: str = ""  # something that only files of this run have, such as its wandb id
    label: str = ""  # of its group, if whoever asks for the report named it

    @cached_property
    def names(self) -> set[str]:
        """All metrics that the run has in some round."""
        return {name for row in self.rows for name in row}

    def noting(self, *notes: str) -> LoggedRun:
        """The same run with further notes."""
        return replace(self, notes=(*self.notes, *notes))

    def identified(self, identity: str) -> LoggedRun:
        """The same run with its identity."""
        return replace(self, identity=identity)


def build_run(name: str, path: Path, config: Mapping[str, Any], logged: Iterable[Mapping[str, Any]]) -> LoggedRun:
    """Arrange what was logged, in order, in one row per round.

    An entry was written together: numbers, or `Media`; anything else is ignored. Entries without a round belong to that
    of their epoch, or otherwise to the round before them; those of an epoch after the last round, such as
    `Trainer.test`'s, belong to the last round.
    """
    rows: dict[int, dict[str, float]] = {}
    media: dict[str, dict[int, Media]] = {}
    from_clients: set[str] = set()
    round_idx, trained = 0, -1
    for entry in without_prefix([_with_printable_names(entry) for entry in logged]):
        numbers = {key: number for key, value in entry.items() if (number := as_number(value)) is not None}
        round_idx = _round_of(path, numbers, round_idx)
        trained = max(trained, round_idx if ROUND in numbers else -1)
        kept = {key: value for key, value in numbers.items() if key not in BOOKKEEPING and not key.startswith("_")}
        if kept:
            rows.setdefault(round_idx, {}).update({**kept, ROUND: float(round_idx)})
        if any(key.endswith(BYTES[0]) for key in kept):
            from_clients |= kept.keys()
        for key, value in entry.items():
            if isinstance(value, LoggedTable | LoggedHistogram):
                media.setdefault(key, {})[round_idx] = value
    if not any(row.keys() - {ROUND} for row in rows.values()):
        raise ReportError(f"{path} has no logged round. Train at least one, or leave this run out.")
    ordered = _ending_with(rows, trained)
    run = LoggedRun(
        shortened(printable(name), MAX_NAME), path, config, ordered, media, frozenset(from_clients), gaps(ordered)
    )
    _check_size(run)
    return run


def _ending_with(rows: Mapping[int, dict[str, float]], last: int) -> tuple[dict[str, float], ...]:
    """The rows in order; what comes after the last round is part of it. A run that trained no round keeps its rows."""
    after = [rows[index] for index in sorted(rows) if 0 <= last < index]
    found = [rows[index] for index in sorted(rows)]
    found = found[: len(found) - len(after)]
    for row in after:
        found[-1] = {**row, **found[-1]}
    return tuple(found)


def _with_printable_names(entry: Mapping[str, Any]) -> Mapping[str, Any]:
    return entry if all(map(str.isprintable, entry)) else {printable(name): value for name, value in entry.items()}


def _check_size(run: LoggedRun) -> None:
    if len(run.names) * len(run.rows) > MAX_NUMBERS:
        raise ReportError(
            f"{run.path} has {len(run.names)} metrics in {len(run.rows)} rounds; a report reads at most {MAX_NUMBERS} "
            "numbers. Leave this run out."
        )
    try:
        flat_settings(run.config)
    except ValueError as error:
        raise ReportError(f"{run.path} has settings that cannot be read: {error}. Leave this run out.") from error


def without_prefix(logged: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """Entries without what a logger's ``prefix`` put before all names.

    Example:
        >>> without_prefix([{"x-fl/round": 0, "x-acc": 0.5, "step": 0}])
        [{'fl/round': 0, 'acc': 0.5, 'step': 0}]
    """
    prefixes = {name.removesuffix(ROUND) for entry in logged for name in entry if name.endswith(f"-{ROUND}")}
    if len(prefixes) != 1:
        return logged
    (prefix,) = prefixes
    return [{name.removeprefix(prefix): value for name, value in entry.items()} for entry in logged]


def as_number(value: Any) -> float | None:
    """A logged value, as loggers write it, as a number; ``None`` if it is not a number.

    Example:
        >>> as_number("0.5"), as_number("NaN"), as_number(True), as_number("")
        (0.5, nan, None, None)
    """
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = float(value)
    except ValueError:
        return None
    except OverflowError:  # an integer of more than 308 digits; texts and floats never overflow
        number = math.inf if int(value) > 0 else -math.inf
    return math.copysign(math.inf, number) if abs(number) > LARGEST else number


def as_cell(text: str) -> str | float:
    """A cell of a table: a number, without decimals if it is whole; any other text, even an empty one, as it is."""
    number = as_number(text)
    if number is None:
        return text
    return int(number) if number.is_integer() else number


def _round_of(path: Path, numbers: Mapping[str, float], before: int) -> int:
    known = [name for name in (ROUND, "epoch") if math.isfinite(numbers.get(name, math.nan))]
    if not known:
        return before
    found = numbers[known[0]]
    if not 0 <= found <= MAX_ROUND or (known[0] == ROUND and not found.is_integer()):
        raise ReportError(f"{path} has a round {found:g}; rounds are numbered 0, 1, 2, ... Leave this run out.")
    return int(found)


def gaps(rows: Sequence[Mapping[str, float]]) -> tuple[str, ...]:
    """Remarks for readers on the rounds that are missing in some rows, which ascend."""
    first = rows[0][ROUND]
    return (f"starts at round {first:g}: what earlier rounds sent is not counted",) if first > 0 else ()
