"""Constructor arguments that cannot be changed later, because other parts of the object were built from them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any


class FixedArguments:
    """A base class that refuses new values for arguments that would be ignored, wholly or in part."""

    _fixed: frozenset[str] = frozenset()

    def _fix(self, names: Iterable[str]) -> None:
        """Refuse new values for these arguments from now on."""
        self._fixed = self._fixed.union(names)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self._fixed:
            kind = type(self).__name__
            raise AttributeError(
                f"`{name}` cannot be changed in a {kind} that is already built from it; make a new one: "
                f"{kind}(..., {name}=...)."
            )
        super().__setattr__(name, value)


def arguments_of(init: Callable[..., None]) -> list[str]:
    """Names of the arguments of an ``__init__``.

    Example:
        >>> arguments_of(lambda self, module, *, seed=0: None)
        ['module', 'seed']
    """
    return list(inspect.signature(init).parameters)[1:]
