"""Rules for arguments: each is called with an argument's name and value, and returns the value or says what is wrong.

NumPy numbers become Python numbers, because the ``repr`` of a choice is its identity in checkpoints.
"""

from __future__ import annotations

import math
from argparse import ArgumentTypeError
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from numbers import Integral, Real
from typing import Any, ClassVar, TypeVar

Rule = Callable[[str, Any], Any]
T = TypeVar("T")
MOST_NAMES = 20  # that a message lists


@dataclass(frozen=True)
class Number:
    """A number in a range. Integers stay integers; a ``bool`` is not a number, and NaN is in no range.

    Infinity is rejected if ``finite``, and ``None`` accepted if ``optional``. The ``hint`` at the end of messages says
    what the number means, or what to do instead.

    Example:
        >>> share = Number(above=0, at_most=1, hint="it is a share")
        >>> share("keep_ratio", 0.5)
        0.5
        >>> share("keep_ratio", 1.5)
        Traceback (most recent call last):
        ValueError: `keep_ratio` must be in (0, 1], got 1.5; it is a share.
        >>> share("keep_ratio", "0.5")
        Traceback (most recent call last):
        TypeError: `keep_ratio` must be a number, got '0.5'; write 0.5.
    """

    kind: ClassVar[str] = "a number"
    numeric: ClassVar[Any] = Real

    above: float | None = None
    at_least: float | None = None
    below: float | None = None
    at_most: float | None = None
    finite: bool = True
    optional: bool = False
    hint: str = ""

    def __call__(self, argument: str, value: Any) -> Any:
        """Return the value as a plain number."""
        if value is None and self.optional:
            return None
        or_none, hint = ", or None" if self.optional else "", f"; {self.hint}" if self.hint else ""
        if isinstance(value, bool) or not isinstance(value, self.numeric):
            got = repr(value) if "\n" not in repr(value) else f"a {type(value).__name__}"  # a message is one line
            raise TypeError(f"`{argument}` must be {self.kind}{or_none}, got {got}{self._instead(value) or hint}.")
        number = int(value) if isinstance(value, Integral) else float(value)
        if (
            number != number  # NaN
            or (self.finite and abs(number) == math.inf)
            or (self.above is not None and number <= self.above)
            or (self.at_least is not None and number < self.at_least)
            or (self.below is not None and number >= self.below)
            or (self.at_most is not None and number > self.at_most)
        ):
            raise ValueError(f"`{argument}` must be {self._range()}{or_none}, got {value!r}{hint}.")
        return number

    def _range(self) -> str:
        low = self.above if self.at_least is None else self.at_least
        high = self.below if self.at_most is None else self.at_most
        if low is not None and high is not None:
            left, right = "(" if self.at_least is None else "[", ")" if self.at_most is None else "]"
            return f"in {left}{low:.9g}, {high:.9g}{right}"
        bounds = {"above": self.above, "at least": self.at_least, "below": self.below, "at most": self.at_most}
        given = {name: bound for name, bound in bounds.items() if bound is not None}
        words = ["positive" if self.above == 0 else f"{name} {bound:.9g}" for name, bound in given.items()]
        return " and ".join(words + ["finite"] * (self.finite and self.numeric is Real))

    def _instead(self, value: Any) -> str:
        """What to write instead of a number in another form, such as a string, a tensor or a whole float."""
        try:
            number = float(value)
        except (TypeError, ValueError):
            return ""
        if not (number.is_integer() or (math.isfinite(number) and self.numeric is Real)):
            return ""
        plain = int(number) if number.is_integer() else number
        try:
            self("", plain)
        except ValueError:  # which would be refused as well
            return ""
        return f"; write {plain}"


@dataclass(frozen=True)
class Whole(Number):
    """A whole number in a range; a float is rejected, even without decimals.

    Example:
        >>> Whole(at_least=1)("batch_size", 8.0)
        Traceback (most recent call last):
        TypeError: `batch_size` must be a whole number, got 8.0; write 8.
    """

    kind: ClassVar[str] = "a whole number"
    numeric: ClassVar[Any] = Integral


@dataclass(frozen=True)
class OneOf:
    """One of several strings, or ``None`` if that is among the choices; `typing.get_args` lists those of a ``Literal``.

    Example:
        >>> OneOf(("group", "joint", "best"))("cohort", "all")
        Traceback (most recent call last):
        ValueError: `cohort` must be 'group', 'joint' or 'best', got 'all'.
    """

    choices: tuple[str | None, ...]

    def __call__(self, argument: str, value: Any) -> Any:
        """Return the value; raise ``ValueError`` if it is not one of the choices."""
        if not isinstance(value, str | None) or value not in self.choices:
            *others, last = map(repr, self.choices)
            raise ValueError(f"`{argument}` must be {', '.join(others)} or {last}, got {value!r}.")
        return value


def flag(argument: str, value: Any) -> bool:
    """Return the value; raise ``TypeError`` unless it is a ``bool``, since a string or a number is easily misread.

    Example:
        >>> flag("normalize", "no")
        Traceback (most recent call last):
        TypeError: `normalize` must be True or False, got 'no'.
    """
    if not isinstance(value, bool):
        raise TypeError(f"`{argument}` must be True or False, got {value!r}.")
    return value


def each(argument: str, values: Any, rule: Rule) -> list[Any]:
    """Check every entry of a list of values to try; return them in the order given, plain.

    A mapping stands for its keys, since keep ratios are also given with shares of clients.

    Example:
        >>> each("keep_ratios", 0.5, Number(above=0))
        Traceback (most recent call last):
        TypeError: `keep_ratios` must be a sequence of numbers, got 0.5; write keep_ratios=[0.5].
    """
    if isinstance(values, str | bytes) or not isinstance(values, Iterable):
        remedy = f"; write {argument}=[{values!r}]" if isinstance(values, Real) else ""
        raise TypeError(f"`{argument}` must be a sequence of numbers, got {values!r}{remedy}.")
    if not (plain := [rule(argument, value) for value in values]):
        raise ValueError(f"`{argument}` must name at least one number, got none.")
    return plain


def as_patterns(argument: str, patterns: object) -> tuple[str, ...]:
    """Patterns as a tuple: a list of the same patterns is the same choice, and YAML has only lists."""
    if isinstance(patterns, Sequence) and not isinstance(patterns, str) and all(isinstance(p, str) for p in patterns):
        return tuple(patterns)
    remedy = f"{argument}=({patterns!r},)" if isinstance(patterns, str) else f"strings: {argument}=('head', '*.proj')"
    raise ValueError(f"`{argument}` must be a sequence of patterns, got {patterns!r}; write {remedy}.")


def matches_any(name: str, patterns: Iterable[str]) -> bool:
    """Whether a name matches one of the patterns, as file names do on the command line; case-sensitive.

    Example:
        >>> matches_any("net.0.bias", ["head.*", "*.bias"])
        True
    """
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def first_match(name: str, by_pattern: Mapping[str, T]) -> T | None:
    """The value of the first pattern that matches a name, if there is one.

    Example:
        >>> first_match("net.1.low", {"*.low": "min", "net.*": "server"})
        'min'
    """
    return next((value for pattern, value in by_pattern.items() if fnmatchcase(name, pattern)), None)


def check_matches(argument: str, patterns: Iterable[str], names: Iterable[str], what: str) -> None:
    """Raise ``ValueError`` if a pattern of an argument matches no name: it would be silently ignored.

    ``what`` is what the names are of, in the singular.

    Example:
        >>> check_matches("exclude", ["*.mean"], ["norm.running_mean", "norm.running_var"], "buffer")
        Traceback (most recent call last):
        ValueError: `exclude` pattern '*.mean' matches no buffer; known names: norm.running_mean, norm.running_var.
    """
    for problem in unmatched(argument, patterns, names, what):
        raise ValueError(problem)


def first_of(names: Sequence[str], most: int) -> str:
    """The first names, and the number of the remaining ones.

    Example:
        >>> first_of(["a", "b"], 3), first_of(["a", "b", "c", "d", "e"], 3)
        ('a, b', 'a, b, c and 2 more')
    """
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")


def unmatched(argument: str, patterns: Iterable[str], names: Iterable[str], what: str) -> Iterator[str]:
    """One sentence for each pattern that matches no name; the arguments are those of `check_matches`."""
    names = list(names)
    shown = first_of(names, MOST_NAMES)
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            yield f"`{argument}` pattern {pattern!r} matches no {what}; known names: {shown or 'none'}."


def check_fields(choice: object, **rules: Rule) -> None:
    """Check fields of a frozen dataclass by their rules, in ``__post_init__``, and put plain numbers in their place."""
    for name, rule in rules.items():
        object.__setattr__(choice, name, rule(name, getattr(choice, name)))


def at_least_one(text: str) -> int:
    """A whole number of at least 1 on a command line; a ``type`` for `argparse`."""
    if not text.isdecimal() or int(text) < 1:
        raise ArgumentTypeError(f"it must be a whole number of at least 1, got {text!r}")
    return int(text)
