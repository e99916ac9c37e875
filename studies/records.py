"""Runs of the studies as JSON files, and the copies kept in the repository.

The files, one per run, are in a folder of ``outputs/``, which is not in the repository. A report also keeps all runs of
a folder in ``docs/runs``, one line each. From there, `restore` writes the files that a fresh clone lacks, so nothing is
trained twice.
"""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

KEPT = Path("docs/runs")
TABLES = Path("docs/tables")  # those that are too long for a page
Run = dict[str, Any]


def read_runs(folder: Path, pattern: str = "*") -> list[Run]:
    """Return the runs of a folder whose file names match, sorted by file name."""
    return [json.loads(path.read_text()) for path in sorted(folder.glob(f"{pattern}.json"))]


def write_run(path: Path, result: Run) -> None:
    """Write the file of a run atomically, even if another process is writing it too."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(f".{os.getpid()}.part")
    partial.write_text(json.dumps(result))
    partial.replace(path)


@contextmanager
def claimed(path: Path) -> Iterator[bool]:
    """Yield whether this process is to train a run: it has no file yet, and no other process is training it.

    The claim lasts as long as the block, or as the process if that is killed. So several processes share the runs of a
    study, and those of a killed one are free again.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(path.with_suffix(".lock"))
    try:
        lock.acquire(timeout=0)
    except Timeout:
        yield False
        return
    try:
        yield not path.exists()
    finally:
        lock.release()
        if path.exists():  # nobody needs the lock any more
            Path(lock.lock_file).unlink(missing_ok=True)


def train_once(path: Path, train: Callable[[], Run]) -> Run | None:
    """Train a run and write its file; return ``None`` if it has one, or another process is training it."""
    with claimed(path) as ours:
        if not ours:
            return None
        write_run(path, result := train())
    return result


def kept_in(folder: Path) -> Path:
    """Return the file in which the runs of a folder are kept."""
    return KEPT / f"{folder.name}.jsonl"


def restore(folder: Path, kept: Path | None = None) -> None:
    """Write the files of the kept runs that a folder lacks.

    Args:
        folder: The folder of the runs.
        kept: The file in which they are kept; by default in ``docs/runs``.
    """
    kept = kept or kept_in(folder)
    for name, run in kept_runs(kept).items():
        if not (path := folder / f"{name}.json").exists():
            write_run(path, run)


def kept_runs(kept: Path) -> dict[str, Run]:
    """Return the kept runs by the names of their files; none if there is no such file."""
    lines = map(json.loads, kept.read_text().splitlines()) if kept.exists() else ()
    return {run.pop("file"): run for run in lines}


def keep(folder: Path, kept: Path | None = None, part: Callable[[Run], Run] = dict) -> None:
    """Keep all runs of a folder, in addition to those already kept.

    Args:
        folder: The folder of the runs.
        kept: The file in which they are kept; by default in ``docs/runs``.
        part: What to keep of a run; by default all of it.
    """
    kept = kept or kept_in(folder)
    runs = kept_runs(kept) | {path.stem: json.loads(path.read_text()) for path in folder.glob("*.json")}
    lines = [json.dumps({"file": name, **rounded(part(runs[name]))}) for name in sorted(runs)]
    kept.parent.mkdir(parents=True, exist_ok=True)
    kept.write_text("".join(f"{line}\n" for line in lines))


def write_csv(name: str, head: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Write a table to ``docs/tables``."""
    TABLES.mkdir(parents=True, exist_ok=True)
    with (TABLES / f"{name}.csv").open("w", newline="") as file:
        csv.writer(file).writerows([head, *rows])


def rounded(value: Any) -> Any:
    """Round fractions to six digits, more than any table shows; whole numbers, such as bytes, are unchanged."""
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [rounded(item) for item in value]
    return float(f"{value:.6g}") if isinstance(value, float) and not value.is_integer() else value
