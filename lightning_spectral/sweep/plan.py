"""Which runs a sweep has: every combination of the varied settings with every seed."""

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

from lightning_spectral.front_door import NAMES

BRACKETS = {"{": "}", "[": "]", "(": ")"}
BETWEEN = ("init_args", "class_path")  # parts of a key that the command line does not need
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
    """Every combination of varied settings, each written as ``key=value,value``, with every seed.

    Example:
        >>> runs = planned_runs(["model.algorithm=FedAvg", "data.partitioner.init_args.alpha=0.3,10"], [0])
        >>> [run.name for run in runs]
        ['algorithm=FedAvg, alpha=0.3, seed=0', 'algorithm=FedAvg, alpha=10, seed=0']
        >>> print(runs[1].folder)
        algorithm=FedAvg,alpha=10/seed=0
    """
    settings: dict[str, list[str]] = {}  # the values of each, by its key
    for text in varied:
        key, equals, listed = text.partition("=")
        key = key.strip().removeprefix("--")
        if not key or not equals:
            raise SweepError(f"`--vary {text}`: expected key=value,value, as in `data.partitioner.alpha=0.3,10`")
        values = [_with_capitals(key, value) for value in split_values(listed)]
        if not values:
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
    """Split at commas, except at those within brackets or quotes.

    Example:
        >>> list(split_values("0.1, {0.2: 0.6, 0.4: 0.4}, 'a, b'"))
        ['0.1', '{0.2: 0.6, 0.4: 0.4}', "'a, b'"]
    """
    closing: list[str] = []
    quote, start = "", 0
    for position, letter in enumerate(f"{text},"):  # the last value ends at a comma too
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "\"'":
            quote = letter
        elif letter in BRACKETS:
            closing.append(BRACKETS[letter])
        elif closing and letter == closing[-1]:
            closing.pop()
        elif letter == "," and not closing:
            yield from filter(None, [text[start:position].strip()])
            start = position + 1
    if closing or quote:
        raise SweepError(f"{text!r} has no {quote or closing[-1]} to what it opens; in a shell, put it between quotes")


def short_names(keys: Sequence[str]) -> dict[str, str]:
    """The shortest ends of dotted keys that differ from each other.

    Example:
        >>> short_names(["model.models.a.lr", "model.models.b.lr", "data.partitioner.init_args.alpha", "data.seed"])
        {'model.models.a.lr': 'a.lr', 'model.models.b.lr': 'b.lr', 'data.partitioner.init_args.alpha': 'alpha',
         'data.seed': 'data.seed'}
    """
    parts = {key: [part for part in key.split(".") if part not in BETWEEN] or [key] for key in keys}
    lengths = dict.fromkeys(keys, 1)
    while True:
        names = {key: ".".join(parts[key][-lengths[key] :]) for key in keys}
        taken = Counter([*names.values(), SEED, SEED])
        longer = [key for key in keys if taken[names[key]] > 1 and lengths[key] < len(parts[key])]
        if not longer:
            return names
        for key in longer:
            lengths[key] += 1


def in_few_letters(text: str) -> str:
    """A value for readers: a class with arguments looks like a call of it.

    Example:
        >>> in_few_letters("{class_path: my.Sharding, init_args: {keep_ratio: {0.2: 0.6, 0.4: 0.4}, strategy: TopN}}")
        'Sharding(keep_ratio={0.2: 0.6, 0.4: 0.4}, strategy=TopN)'
    """
    try:
        return _as_call(yaml.safe_load(text), text)
    except yaml.YAMLError:
        return text


def _as_call(value: Any, otherwise: str) -> str:
    if not isinstance(value, Mapping) or "class_path" not in value:
        return otherwise
    arguments = [f"{name}={_as_call(inner, str(inner))}" for name, inner in (value.get("init_args") or {}).items()]
    return f"{str(value['class_path']).rpartition('.')[2]}({', '.join(arguments)})"
