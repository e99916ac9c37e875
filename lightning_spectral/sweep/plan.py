"""Which runs a sweep has, every combination of the varied settings with every seed, and what is in their folders."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import yaml
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_spectral.front_door import NAMES
from lightning_spectral.report.runs import NAME as RECORD

BRACKETS = {"{": "}", "[": "]", "(": ")"}
BETWEEN = ("init_args", "class_path")  # parts of a key that the command line does not need
# What is in a run's folder, beside its record and what it printed: all settings, as `fit --config` takes them; the last
# round; and a file that exists once the run is finished.
CONFIG, CHECKPOINT, FINISHED = "config.yaml", "last.ckpt", "finished"
MISSING = "nothing"
MAX_LISTED = 3  # differences in a message
LONGEST = 80  # letters of a varied setting in the name of a folder
SEED = "seed"
# The room whose classes a setting takes, by the last part of its key.
ROOMS = {
    "algorithm": "algorithms",
    "strategy": "sharding",
    "design": "designs",
    "partitioner": "partition",
    "participation": "participation",
}


class SweepError(ValueError):
    """A sweep cannot begin; the message says what is wrong and what to do."""


@dataclass(frozen=True)
class PlannedRun:
    """One run of a sweep."""

    choices: tuple[tuple[str, str], ...]  # short names of the varied settings, each with its value in few letters
    arguments: tuple[str, ...]  # that set them on the command line
    seed: int | None = None  # None: that of the config

    @property
    def settings(self) -> dict[str, Any]:
        """What distinguishes it from all other runs, by name."""
        return {**dict(self.choices), **({} if self.seed is None else {SEED: self.seed})}

    @property
    def name(self) -> str:
        """The settings, for readers."""
        return ", ".join(f"{name}={value}" for name, value in self.settings.items())

    @property
    def folder(self) -> Path:
        """Where it is kept, within the folder of the sweep."""
        parts = []
        for text in (f"{name}={value}" for name, value in self.choices):  # as every file system and shell takes it
            kept = re.sub(r"[^\w.=+-]+", "_", text).strip("_.")[:LONGEST]
            lost = kept != text  # letters, so that a digest has to keep names apart
            parts.append(f"{kept}-{sha256(text.encode()).hexdigest()[:6]}" if lost else kept)
        return Path(",".join(parts), *([] if self.seed is None else [f"{SEED}={self.seed}"]))


def planned_runs(varied: Sequence[str], seeds: Sequence[int]) -> list[PlannedRun]:
    """Every combination of varied settings, each written as ``key=value,value``, with every seed."""
    settings: dict[str, list[str]] = {}  # the values of each, by its key
    for text in varied:
        key, equals, listed = text.partition("=")
        key = key.strip().removeprefix("--")
        if not key or not equals:
            raise SweepError(f"`--vary {text}`: expected key=value,value, as in `data.partitioner.alpha=0.3,10`")
        if not (values := [_with_capitals(key, value) for value in split_values(listed)]):
            raise SweepError(f"`--vary {text}` names no value, so there is nothing to run; name some, or leave it out")
        if key in settings:
            raise SweepError(f"`{key}` is varied twice; put all its values into one `--vary`")
        if repeated := _repeated(values):
            raise SweepError(f"`--vary {key}` has {repeated} twice; leave one out")
        settings[key] = values
    if not settings and not seeds:
        raise SweepError("nothing is varied: name settings, as in `--vary data.partitioner.alpha=0.3,10`, or `--seeds`")
    if repeated := _repeated(seeds):
        raise SweepError(f"`--seeds` has {repeated} twice; leave one out")
    short = short_names(list(settings))
    runs = []
    for combination in itertools.product(*settings.values()):
        chosen = list(zip(settings, combination, strict=True))
        choices = tuple((short[key], in_few_letters(value)) for key, value in chosen)
        arguments = tuple(f"--{key}={value}" for key, value in chosen)
        runs += [PlannedRun(choices, arguments, seed) for seed in seeds or (None,)]
    return runs


def _with_capitals(key: str, value: str) -> str:
    """The class of the package that a value in lower case names or begins; other values as they are."""
    if not value.isalnum() or value != value.lower():
        return value
    names = NAMES.get(ROOMS.get(key.rpartition(".")[2], ""), ())
    meant = [name for name in names if name.lower() == value] or [n for n in names if n.lower().startswith(value)]
    if len(meant) > 1:
        raise SweepError(f"`--vary {key}={value}` may mean {' or '.join(meant)}; write more of the name")
    return meant[0] if meant else value


def _repeated(values: Sequence[Any]) -> str:
    return next((str(value) for value, times in Counter(values).items() if times > 1), "")


def split_values(text: str) -> Iterator[str]:
    """Split at commas, except at those within brackets or quotes."""
    value, missing = "", list[str]()
    for piece in text.split(","):
        value = f"{value},{piece}" if missing else piece
        bare = re.sub(r"'[^']*'|\"[^\"]*\"", "", value)
        missing = [closing for opening, closing in BRACKETS.items() if bare.count(opening) > bare.count(closing)]
        missing += [quote for quote in "\"'" if quote in bare]
        if value.strip() and not missing:
            yield value.strip()
    if missing:
        raise SweepError(f"{text!r} has no {missing[0]} to what it opens; in a shell, put it between quotes")


def short_names(keys: Sequence[str]) -> dict[str, str]:
    """The shortest ends of dotted keys that differ from each other."""
    parts = {key: [part for part in key.split(".") if part not in BETWEEN] or [key] for key in keys}
    ends = {key: [".".join(own[-number:]) for number in range(1, len(own) + 1)] for key, own in parts.items()}
    taken = Counter([SEED, *(end for own in ends.values() for end in own)])
    return {key: next((end for end in own if taken[end] == 1), own[-1]) for key, own in ends.items()}


def in_few_letters(text: str) -> str:
    """A value for readers: a class with arguments looks like a call of it."""

    def as_call(value: Any, otherwise: str) -> str:
        if not isinstance(value, Mapping) or "class_path" not in value:
            return otherwise
        inside = [f"{name}={as_call(inner, str(inner))}" for name, inner in (value.get("init_args") or {}).items()]
        return f"{str(value['class_path']).rpartition('.')[2]}({', '.join(inside)})"

    try:
        return as_call(yaml.safe_load(text), text)
    except yaml.YAMLError:
        return text


def begin(folder: Path, config: str) -> None:
    """Keep a run's config; refuse a folder with other settings, and remove the record of a run without checkpoint."""
    if changed := differences(folder, config):
        raise SweepError(
            f"{folder} has a run with other settings: {'; '.join(changed)}. Change them back, or remove that folder, "
            "or choose another, with `-o` if this is a sweep."
        )
    folder.mkdir(parents=True, exist_ok=True)
    if not _is_trained(folder):
        (folder / CONFIG).write_text(config, encoding="utf-8")
        (folder / RECORD).unlink(missing_ok=True)


def _is_trained(folder: Path) -> bool:
    return (folder / CHECKPOINT).is_file() or (folder / FINISHED).is_file()


def differences(folder: Path, config: str) -> list[str]:
    """The settings in which the run that is already there differs from a config; none if there is no run."""
    if not _is_trained(folder) or not (folder / CONFIG).is_file():
        return []
    there, now = (dict(_flat("", yaml.safe_load(text))) for text in ((folder / CONFIG).read_text("utf-8"), config))
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


class LastCheckpoint(ModelCheckpoint):
    """Keeps the last round; a class of its own, beside which a config may have any `ModelCheckpoint`."""
