"""Finds the settings in which runs differ, and describes them in few words."""

from __future__ import annotations

import ast
import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, TypeAlias

from lightning_spectral.report.names import ALGORITHM, BASELINE, REPETITION, SWEEP
from lightning_spectral.report.texts import printable, shortened

Settings: TypeAlias = Mapping[str, str]
ABSENT = "—"
STRATEGY = ("strategy", "0")  # where a class has its strategy: by name, or first in a ``repr``
LONGEST = 40  # letters of a value in a label
# Far beyond the settings of ordinary runs.
MAX_SETTINGS = 10_000
MAX_DEPTH = 50
LONGEST_NAME = 200  # letters
LONGEST_CALL = 10_000  # letters


def flat_settings(config: Mapping[str, Any]) -> dict[str, str]:
    """All settings as ``outer/inner``, each with its value as text.

    Objects that are written as their ``repr`` are taken apart too, so that runs can differ in one argument.

    Example:
        >>> flat_settings({"seed": 1, "federation": {"algorithm": "Sharding(TopN(), keep_ratio=0.2)"}})
        {'seed': '1', 'federation/algorithm': 'Sharding', 'federation/algorithm/0': 'TopN',
         'federation/algorithm/keep_ratio': '0.2'}
    """
    found = dict(islice(_flat("", config), MAX_SETTINGS + 1))
    if len(found) > MAX_SETTINGS:
        raise ValueError(f"there are more than {MAX_SETTINGS}")
    return {printable(name): printable(value) for name, value in found.items()}


def _flat(name: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping):
        if name.count("/") > MAX_DEPTH:
            raise ValueError("they are nested too deeply")
        if name and isinstance(value.get("name"), str):  # a choice: its class, and its arguments
            yield name, value["name"]
        for key, inner in value.items():
            if not (name and key == "name"):
                yield from _flat(_joined(name, key), inner)
    else:
        yield from (_parts_of_call(name, value) if isinstance(value, str) else None) or [(name, _text(value))]


def _joined(name: str, key: Any) -> str:
    own = shortened(_text(key), LONGEST_NAME)
    return f"{name}/{own}" if name else own


def _text(value: Any) -> str:
    try:
        return str(value)
    except RecursionError:
        raise ValueError("they are nested too deeply") from None


def _parts_of_call(name: str, text: str) -> list[tuple[str, str]] | None:
    """A class and its arguments; ``None`` if the text is not a call, or is too long for one."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of Python about what the text, as a program, would do
            node = ast.parse(text, mode="eval").body if len(text) <= LONGEST_CALL else None
        return [*_flat_node(name, node)] if isinstance(node, ast.Call) else None
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # the last two: nested too deeply
        return None


def _flat_node(name: str, node: ast.expr) -> Iterator[tuple[str, str]]:
    if not isinstance(node, ast.Call):
        yield name, ast.unparse(node)
        return
    yield name, ast.unparse(node.func)
    for index, argument in enumerate(node.args):
        yield from _flat_node(f"{name}/{index}", argument)
    for keyword in node.keywords:
        yield from _flat_node(f"{name}/{keyword.arg}", keyword.value)


def differing(all_settings: Sequence[Settings]) -> list[str]:
    """The settings in which experiments differ, in order, apart from those of repetitions such as seeds.

    Arguments are compared only among runs with the same class around them: what a class has, and another has not or has
    with another value, is not a difference of its own.

    Example:
        >>> a = {"algorithm": "FedAvg", "seed": "0"}
        >>> b = {"algorithm": "Sharding", "algorithm/keep_ratio": "0.2", "seed": "1"}
        >>> differing([a, b]), differing([a, b, {**b, "algorithm/keep_ratio": "0.1"}])
        (['algorithm'], ['algorithm', 'algorithm/keep_ratio'])
    """
    found: list[str] = []
    for name in _names(all_settings):
        around = [outer for outer in found if name.startswith(f"{outer}/")]
        options: dict[tuple[str, ...], set[str]] = defaultdict(set)
        for settings in all_settings:
            options[tuple(settings.get(outer, ABSENT) for outer in around)].add(settings.get(name, ABSENT))
        if any(len(alike) > 1 for alike in options.values()) and not REPETITION & set(name.split("/")):
            found.append(name)
    return found


def of_a_sweep(all_settings: Sequence[Settings]) -> list[Settings]:
    """Of runs that are all of a sweep, only what it varied, which is all that can differ; otherwise none.

    Example:
        >>> of_a_sweep([{"sweep/alpha": "0.3", "data/partitioner/alpha": "0.3"}]), of_a_sweep([{"seed": "0"}])
        ([{'sweep/alpha': '0.3'}], [])
    """
    found = [{name: value for name, value in one.items() if name.startswith(SWEEP)} for one in all_settings]
    return [*found] if all(found) else []


def is_baseline(settings: Settings) -> bool:
    """Whether all models of a run are trained by FedAvg.

    Example:
        >>> is_baseline({"federation/algorithm": "FedAvg"}), is_baseline({"federation/algorithm": "LoRA"})
        (True, False)
        >>> is_baseline({"federation/a/algorithm": "FedAvg", "federation/b/algorithm": "LoRA"}), is_baseline({})
        (False, False)
    """
    own = {name: value for name, value in settings.items() if not name.startswith(SWEEP)}
    found = {value for name, value in own.items() if name.split("/")[-1] == ALGORITHM}
    return found == {BASELINE}


def _names(all_settings: Iterable[Settings]) -> list[str]:
    """All names, each outer one before those inside it."""
    return sorted({name for settings in all_settings for name in settings}, key=lambda name: name.split("/"))


def label(settings: Settings, names: Sequence[str]) -> str:
    """A label that distinguishes a run: its values of some settings. A class is left out if its strategy is shown.

    Example:
        >>> label({"a": "Sharding", "a/strategy": "TopN", "a/keep_ratio": "0.2"}, ["a", "a/strategy", "a/keep_ratio"])
        'TopN, keep_ratio=0.2'
        >>> label({"a": "FedAvg"}, ["a", "a/strategy", "a/keep_ratio"])
        'FedAvg'
    """
    shown = [name for name in names if name in settings]
    outer = {one for one in shown if any(f"{one}/{inner}" in shown for inner in STRATEGY)}
    parts = [_part(name, settings[name], shown) for name in shown if name not in outer]
    return ", ".join(sorted(parts, key=lambda part: "=" in part))


def _part(name: str, value: str, shown: Sequence[str]) -> str:
    around, _, own = name.rpartition("/")
    if _is_class(value) and (own in STRATEGY or around not in shown):
        return value
    return f"{own}={shortened(value, LONGEST)}"


def _is_class(value: str) -> bool:
    return value.isidentifier() and value[0].isupper() and value not in ("True", "False", "None")
