"""The check of arguments with one entry per example."""

from collections.abc import Iterable, Mapping
from typing import Any


def check_one_per_example(argument: str, entries: Any) -> None:
    """Raise ``TypeError`` for entries without an order: a mapping would be read as its keys, a string as its letters.

    Example:
        >>> check_one_per_example("keys", "user")
        Traceback (most recent call last):
        TypeError: `keys` must list one entry per example, got 'user'; if it is a column, write keys=table['user'].
    """
    if isinstance(entries, str):
        remedy = f"; if it is a column, write {argument}=table[{entries!r}]"
        raise TypeError(f"`{argument}` must list one entry per example, got {entries!r}{remedy}.")
    if isinstance(entries, Mapping | set | frozenset | type) or not isinstance(entries, Iterable):
        shown = f"a {type(entries).__name__}" if isinstance(entries, Mapping | set | frozenset) else repr(entries)
        raise TypeError(f"`{argument}` must list one entry per example, in the order of the data set, got {shown}.")
