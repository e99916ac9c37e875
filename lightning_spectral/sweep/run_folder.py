"""The folder of a run: the config that it was started with, its checkpoint, its metrics, and whether it is finished."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from lightning_spectral.report.rounds_file import NAME

MISSING = "nothing"
MAX_LISTED = 3  # differences in a message


@dataclass(frozen=True)
class RunFolder:
    """What is where in a run's folder."""

    path: Path

    @property
    def config(self) -> Path:
        """All settings of the run; it is a config itself, for ``fit --config``."""
        return self.path / "config.yaml"

    @property
    def output(self) -> Path:
        """What the run printed, with the traceback if it failed."""
        return self.path / "output.txt"

    @property
    def checkpoint(self) -> Path:
        """The last round."""
        return self.path / "last.ckpt"

    @property
    def rounds(self) -> Path:
        """The record of the run, a line per round."""
        return self.path / NAME

    @property
    def finished(self) -> Path:
        """A file that exists once the run is finished."""
        return self.path / "finished.json"

    @property
    def is_finished(self) -> bool:
        """Whether there is nothing left to train."""
        return self.finished.is_file()

    def begin(self, config: str) -> None:
        """Keep the config."""
        self.path.mkdir(parents=True, exist_ok=True)
        self.config.write_text(config, encoding="utf-8")

    def finish(self, rounds: int, seconds: float) -> None:
        """Mark the run as finished, with how many rounds it has and how long the last part of it took."""
        part = self.finished.with_suffix(".part")  # renamed when it is whole
        part.write_text(json.dumps({"rounds": rounds, "seconds": round(seconds, 1)}) + "\n", encoding="utf-8")
        part.replace(self.finished)

    def differences(self, config: str) -> list[str]:
        """The settings in which the run that is already there differs from a config; none if there is no run."""
        if not self.config.is_file():
            return []
        there, now = (dict(_flat("", yaml.safe_load(text))) for text in (self.config.read_text("utf-8"), config))
        changed = [name for name in (*there, *(now.keys() - there.keys())) if there.get(name) != now.get(name)]
        listed = [f"{name} is {there.get(name, MISSING)} there, {now.get(name, MISSING)} now" for name in changed]
        more = [f"and {len(listed) - MAX_LISTED} more"] if len(listed) > MAX_LISTED else []
        return [*listed[:MAX_LISTED], *more]


def _flat(name: str, value: Any) -> Iterator[tuple[str, str]]:
    """Settings by their names on the command line, which have no ``init_args``."""
    inner = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else ()
    for key, below in inner:
        yield from _flat(name if key in ("init_args", "class_path") else f"{name}.{key}".lstrip("."), below)
    if not inner:
        yield name, str(value)
