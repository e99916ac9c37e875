"""Runs of the studies, one JSON file each, and those that the repository keeps.

The files are in a folder of ``outputs/``, which is not in the repository. A report also keeps all runs of a folder in
``docs/runs``, a line each. From there `restore` gives a fresh clone the files it lacks: nothing is trained twice.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

KEPT = Path("docs/runs")


def read_runs(folder: Path, pattern: str = "*") -> list[dict[str, Any]]:
    """The runs of a folder whose file names match, in the order of these."""
    return [json.loads(path.read_text()) for path in sorted(folder.glob(f"{pattern}.json"))]


def write_run(path: Path, result: dict[str, Any]) -> None:
    """Write the file of a run as a whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".part")
    partial.write_text(json.dumps(result))
    partial.replace(path)


def kept_in(folder: Path) -> Path:
    """The file in which the runs of a folder are kept."""
    return KEPT / f"{folder.name}.jsonl"


def restore(folder: Path, kept: Path | None = None) -> None:
    """Write the files of those kept runs that a folder lacks.

    Args:
        folder: Where the runs are.
        kept: Where they are kept; by default in ``docs/runs``.
    """
    kept = kept or kept_in(folder)
    for line in kept.read_text().splitlines() if kept.exists() else ():
        run = json.loads(line)
        path = folder / f"{run.pop('file')}.json"
        if not path.exists():
            write_run(path, run)


def keep(folder: Path, kept: Path | None = None) -> None:
    """Keep all runs of a folder, beside those that are kept; arguments as in `restore`."""
    kept = kept or kept_in(folder)
    restore(folder, kept)
    kept.parent.mkdir(parents=True, exist_ok=True)
    paths = sorted(folder.glob("*.json"))
    lines = [json.dumps({"file": path.stem, **rounded(json.loads(path.read_text()))}) for path in paths]
    kept.write_text("".join(f"{line}\n" for line in lines))


def rounded(value: Any) -> Any:
    """The same with fractions to six digits, more than any table shows; whole numbers, such as bytes, stay."""
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [rounded(item) for item in value]
    return float(f"{value:.6g}") if isinstance(value, float) and not value.is_integer() else value
