"""Mistakes on the command line, each reported in one line: what is wrong, and where."""

from __future__ import annotations

import difflib
import os
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import jsonargparse
import lightning
from lightning.pytorch.cli import LightningArgumentParser

# How lines of jsonargparse's messages begin that only say what it has tried.
TRIED = (
    *("Subtypes: ", "Errors:", "Given value", "Does not validate", "Problem with given class_path"),
    *("Expected a path but", "Expected a <class 'NoneType'>", "Option 'models.", "Option 'modules."),
)
TYPE = "Expected a "  # a line for each that would do

OWN = str(Path(__file__).parents[2]) + os.sep
LIGHTNING, JSONARGPARSE = (os.path.dirname(str(package.__file__)) + os.sep for package in (lightning, jsonargparse))


class OneLineParser(LightningArgumentParser):
    """LightningCLI's parser, which ends the process with one line in place of all options and a tree of types."""

    _config_file: object = None

    def parse_path(self, cfg_path: Any, *args: Any, **options: Any) -> Any:
        self._config_file = cfg_path
        return super().parse_path(cfg_path, *args, **options)

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None, **options: Any) -> Any:  # type: ignore[override]
        """Parse arguments; jsonargparse hands on a null within a class as the text None."""
        given = args and [f"{text[:-4]}null" if text.endswith("=None") else text for text in args]
        return super().parse_args(given, namespace, **options)

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """End the process with status 2; within a larger value, raise an error with the nearest key."""
        for before, after in (("ption '", "'"), ("unrecognized arguments: --", "=")):
            if before in message:
                message += _nearest(message.partition(before)[2].partition(after)[0], _keys(self))
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
    return " ".join(str(error).replace(":\n  - ", ": ").replace("\n  - ", "; ").split())


def one_line(message: str) -> str:
    r"""The innermost line of a message of jsonargparse, after the key that it is about.

    Example:
        >>> one_line("Parser key \"model\":\n  Errors:\n    - Parser key \"seed\":\n        Expected a <class 'int'>")
        "model.seed: Expected a <class 'int'>"
    """
    lines = [(len(line) - len(text), text) for line in message.splitlines() if (text := line.lstrip(" -"))]
    causes = [number for number, (_, text) in enumerate(lines) if not text.startswith(TRIED)]
    if not causes:
        return " ".join(message.split())
    first = max(causes, key=lambda number: lines[number][0])
    depth, said = lines[first]
    if said.startswith(TYPE):
        said = "; ".join(text for above, text in lines if above == depth and text.startswith(TYPE))
    keys = []
    for above, text in reversed(lines[:first]):
        if above < depth:
            depth = above
            keys += text.split('"')[1:2] if text.startswith("Parser key") else []
    return ": ".join(filter(None, (".".join(reversed(keys)), said)))


def _nearest(key: str, known: Sequence[str]) -> str:
    """What may have been meant by a key, of which any part between dots can be wrong."""
    for place, part in enumerate(key.split(".")):
        before = key.split(".")[:place]
        names = {one.split(".")[place] for one in known if one.split(".")[:place] == before and one.count(".") >= place}
        if part not in names:
            close = difflib.get_close_matches(part, names, 1)
            return f"; did you mean {close[0]!r}?" if close else ""
    return ""


def _keys(parser: Any) -> list[str]:
    found = []
    for action in parser._actions:  # there is no public way to ask
        found.append(action.dest)
        if isinstance(action.choices, Mapping):
            found += [key for subcommand in action.choices.values() for key in _keys(subcommand)]
    return found


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
