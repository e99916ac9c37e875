"""Where something is kept within a module: paths through attributes, lists and dictionaries."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from types import FunctionType, ModuleType
from typing import Any

from torch import Tensor, nn

LEAVES = (str, bytes, int, float, complex, type, FunctionType, ModuleType, Tensor)
OF_MODULES = ("_parameters", "_buffers", "_modules")  # dictionaries whose entries are read as attributes
BACK = ("_trainer", "_fabric")  # of a LightningModule: they lead to everything


def parts_of(whole: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """The direct parts of an object, each with its path: entries of containers, and attributes.

    Example:
        >>> layer = nn.Linear(2, 2)
        >>> layer.cache = {"seen": [1]}
        >>> dict(parts_of(layer, "net.0"))["net.0.cache"]
        {'seen': [1]}
        >>> list(parts_of(layer.cache, "net.0.cache"))
        [("net.0.cache['seen']", [1])]
    """
    if isinstance(whole, LEAVES):
        return
    if isinstance(whole, dict):
        yield from ((f"{path}[{key!r}]", part) for key, part in whole.items())
    elif isinstance(whole, list | tuple):
        yield from ((f"{path}[{index}]", part) for index, part in enumerate(whole))
    elif isinstance(whole, set | frozenset):
        yield from ((f"an element of {path}", part) for part in whole)
    for name, part in _attributes(whole):  # of a container, too, if its class has any
        yield (f"{path}.{name}" if path else name), part


def all_parts(roots: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Some objects and their parts, the parts of these and so on, each once with the shortest path to it."""
    seen: set[int] = set()
    rest = deque(roots.items())
    while rest:
        path, whole = rest.popleft()
        if id(whole) not in seen:
            seen.add(id(whole))
            yield path, whole
            rest.extend(parts_of(whole, path))


def path_to(wanted: Any, roots: Mapping[str, Any]) -> str | None:
    """The shortest path to an object from some that may keep it, by name; ``None`` if none of them does.

    Example:
        >>> layers = [nn.Linear(2, 2), nn.Linear(2, 2)]
        >>> path_to(layers[1].bias, {"LAYERS": layers})
        'LAYERS[1].bias'
    """
    return next((path for path, part in all_parts(roots) if part is wanted), None)


def _attributes(whole: Any) -> Iterator[tuple[str, Any]]:
    own = getattr(whole, "__dict__", {})
    registered = OF_MODULES if isinstance(whole, nn.Module) else ()
    for name in registered:
        yield from own.get(name, {}).items()
    yield from ((name, part) for name, part in own.items() if name not in (*registered, *BACK))
