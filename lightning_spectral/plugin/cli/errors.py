"""Mistakes on the command line, each reported in one line: what is wrong, where, and what may have been meant."""

from __future__ import annotations

import difflib
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, NoReturn

import jsonargparse
import lightning
import torch
from lightning.pytorch import callbacks, loggers
from lightning.pytorch.cli import LightningArgumentParser

# Lines of jsonargparse's messages that only say how it has arrived at the others.
NOT_A_CAUSE = re.compile(
    r"$|Subtypes: |Errors:$|Given value type: |Does not validate against|Problem with given class_path"
    r"|Expected a path but|Expected a <class 'NoneType'>|Option 'mod(el|ule)s\b"
)
UNKNOWN_KEY = re.compile(
    r"Option '([^']+)' is not accepted$|does not accept option '([^']+)'|unrecognized .*: --([^ =]+)"
)
UNKNOWN_CLASS = re.compile(r"Expected a dot import path string: (\S+)")
WRONG_TYPE = re.compile(r"Expected an? (?:<class ')?(?:[a-z_]+\.)*(.*?)(?:'>)?(?:\. Got value: (.*))?$")

OTHER_COMMANDS = ("sweep", "report", "doctor", "network")  # which are not LightningCLI's
PACKAGE = sys.modules[__name__.partition(".")[0]]
OWN, LIGHTNING, JSONARGPARSE = (
    os.path.dirname(str(package.__file__)) + os.sep for package in (PACKAGE, lightning, jsonargparse)
)


class OneLineParser(LightningArgumentParser):
    """LightningCLI's parser, which ends the process with one line in place of all options and a tree of types."""

    _config_file: object = None

    def parse_path(self, cfg_path: Any, *args: Any, **options: Any) -> Any:
        self._config_file = cfg_path
        return super().parse_path(cfg_path, *args, **options)

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None, **options: Any) -> Any:  # type: ignore[override]
        """Parse arguments; jsonargparse hands on a null within a class as the text None."""
        given = None if args is None else [re.sub("=None$", "=null", text) for text in args]
        return super().parse_args(given, namespace, **options)

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """End the process with status 2; within a larger value, raise an error with the nearest key."""
        if found := UNKNOWN_KEY.search(message):
            message += _nearest(next(filter(None, found.groups())), _keys(self))
        if message.startswith(("Problems parsing config", "Unexpected config")):
            message = f"{self._config_file}: {' '.join(message.split())}"
        if not self.exit_on_error:
            super().error(message, ex)
        _end(one_line(message))


@contextmanager
def errors_in_one_line() -> Iterator[None]:
    """Report an error in one line if it was raised on purpose, by this package or Lightning; others have a traceback.

    As for jsonargparse, ``JSONARGPARSE_DEBUG`` in the environment shows the traceback of all errors.
    """
    try:
        yield
    except Exception as error:
        message = explained(error)
        if message is None or "JSONARGPARSE_DEBUG" in os.environ:
            raise
        _end(message)


def explained(error: Exception) -> str | None:
    """An error in one line if it was raised on purpose; ``None`` if only its traceback can explain it."""
    if not _is_on_purpose(error):
        return None
    if _raised_in(error, JSONARGPARSE):
        return one_line(str(error))
    listed = re.sub(r"\n *- ", "; ", str(error).replace(":\n  - ", ": "))  # as in errors of this package
    return " ".join(listed.split())


def one_line(message: str) -> str:
    r"""The cause in a message of jsonargparse: what it says at the deepest level, after the key that it is about.

    Example:
        >>> one_line("Parser key \"model\":\n  Errors:\n    - Parser key \"seed\":\n        Expected a <class 'int'>")
        'model.seed: expected int'
    """
    keys: list[tuple[int, str]] = []
    causes: list[tuple[int, str, str]] = []
    values: dict[int, str] = {}  # by the number of causes above
    for line in message.splitlines():
        depth = len(line) - len(text := re.sub("^ *(- )?", "", line))
        if key := re.match(r'Parser key "(.+?)":\s*(.*)', text):
            keys = [*((level, name) for level, name in keys if level < depth), (depth, key[1])]
            text = key[2]
        if value := re.match("Given value: (?:NestedArg.* val='(.*)'|(.*))", text):
            values.setdefault(len(causes), value[1] or value[2])
        elif not NOT_A_CAUSE.match(text):
            causes.append((depth, ".".join(name for level, name in keys if level <= depth), text))
    if not causes:
        return " ".join(message.split())
    depth, where, _ = max(causes, key=lambda cause: cause[0])
    same = [number for number, cause in enumerate(causes, 1) if cause[:2] == (depth, where)]
    value_below = next((value for number, value in values.items() if number >= same[-1]), "")
    return (f"{where}: " if where else "") + _explained([causes[number - 1][2] for number in same], value_below)


def _explained(same: list[str], value: str) -> str:
    """Causes at the same place in words, with what may have been meant."""
    if found := UNKNOWN_CLASS.search("\n".join(same)):
        return f"there is no class {found[1]}{_nearest(found[1], _class_names())}"
    for pattern, in_words in MISTAKES.items():
        if found := pattern.search(same[0]):
            return in_words(found)
    if types := [kind for text in same if (kind := WRONG_TYPE.match(text))]:
        got = types[0][2] or value
        return f"expected {' or '.join(dict.fromkeys(kind[1] for kind in types))}" + (f", got {got}" if got else "")
    return same[0]


def _no_attribute(found: re.Match[str]) -> str:
    return found.string + _nearest(found[2], dir(sys.modules.get(found[1])))


def _no_return_type(found: re.Match[str]) -> str:
    own = found[1].rpartition(".")[2]
    return f"{found[1]} is no {found[2]}; if it is a function, say what it returns: `def {own}(...) -> {found[2]}`"


def _no_command(found: re.Match[str]) -> str:
    commands = [*re.findall(r"\w+", found[2]), *OTHER_COMMANDS]
    meant = _nearest(found[1], commands) or f"; choose from {', '.join(commands)}"
    return f"there is no command {found[1]!r}{meant}"


MISTAKES: Mapping[re.Pattern[str], Callable[[re.Match[str]], str]] = MappingProxyType(
    {
        re.compile(r"module '([^']+)' has no attribute '([^']+)'"): _no_attribute,
        re.compile(r"Import path (\S+) does not correspond to a subclass of (\S+)"): _no_return_type,
        re.compile(r"argument subcommand: invalid choice: '([^']*)' \(choose from (.*)\)"): _no_command,
    }
)


def _nearest(name: str, names: Iterable[str]) -> str:
    """What may have been meant by a name, of which any part between dots can be wrong."""
    first, _, rest = name.partition(".")
    inner: dict[str, list[str]] = {}
    for known, _, below in (one.partition(".") for one in names):
        inner.setdefault(known, []).append(below)
    if first in inner:
        return _nearest(rest, inner[first]) if rest else ""
    close = difflib.get_close_matches(first, inner, 1)
    return f"; did you mean {close[0]!r}?" if close else ""


def _keys(parser: Any) -> set[str]:
    found = set()
    for action in parser._actions:  # there is no public way to ask
        found.add(action.dest)
        if isinstance(action.choices, Mapping):
            found |= {key for subcommand in action.choices.values() for key in _keys(subcommand)}
    return found


def _class_names() -> list[str]:
    packages = [module for name, module in sys.modules.items() if name.startswith(f"{PACKAGE.__name__}.")]
    offered = [package for package in packages if not package.__name__.startswith(f"{PACKAGE.__name__}.network")]
    ours = [getattr(package, name) for package in offered for name in getattr(package, "__all__", ())]
    others = [value for place in (callbacks, loggers, torch.optim) for value in vars(place).values()]
    return [value.__name__ for value in (*ours, *others) if isinstance(value, type)]


def _is_on_purpose(error: BaseException) -> bool:
    """Whether an error, or its cause if it is one of jsonargparse, is a ``raise`` in a package that reads arguments."""
    while _raised_in(error, JSONARGPARSE) and error.__cause__ is not None:
        error = error.__cause__
    if isinstance(error, RuntimeError) and _raised_in(error, OWN):
        return False  # a round or a client failed
    line = traceback.extract_tb(error.__traceback__)[-1].line or ""
    return line.startswith("raise ") and any(_raised_in(error, folder) for folder in (OWN, LIGHTNING, JSONARGPARSE))


def _raised_in(error: BaseException, folder: str) -> bool:
    return traceback.extract_tb(error.__traceback__)[-1].filename.startswith(folder)


def _end(line: str) -> NoReturn:
    print(f"error: {line}", file=sys.stderr)
    sys.exit(2)
