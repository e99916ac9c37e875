"""The state of a module, kept and put back: what a client changes on it, neither the server nor another client sees."""

from __future__ import annotations

import argparse
import hashlib
import pickle
import random
import sys
from collections import Counter, OrderedDict, UserDict, UserList, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, cached_property, partial
from itertools import chain, islice
from operator import is_
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_spectral.protocol.exchange import named_state
from lightning_spectral.protocol.rng import derived_seed

LEAVES = (str, bytes, int, float, complex, type, FunctionType, ModuleType, Tensor)
OF_MODULES = ("_parameters", "_buffers", "_modules")  # dictionaries whose entries are read as attributes
BACK = ("_trainer", "_fabric")  # of a LightningModule: they lead to everything
_KEPT_BY_TORCH = frozenset({*vars(nn.Module()), *BACK, "_compiled_call_impl", "log", "log_dict", "optimizers"})


def parts_of(whole: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """The direct parts of an object, each with its path: entries of containers, and attributes."""
    if isinstance(whole, LEAVES):
        return
    if isinstance(whole, dict):
        yield from ((f"{path}[{key!r}]", part) for key, part in whole.items())
    elif isinstance(whole, list | tuple):
        yield from ((f"{path}[{index}]", part) for index, part in enumerate(whole))
    elif isinstance(whole, set | frozenset):
        yield from ((f"an element of {path}", part) for part in whole)
    own = getattr(whole, "__dict__", {})  # of a container, too, if its class has any
    registered = OF_MODULES if isinstance(whole, nn.Module) else ()
    attributes = [entry for name in registered for entry in own.get(name, {}).items()]
    attributes += [(name, part) for name, part in own.items() if name not in (*registered, *BACK)]
    yield from ((f"{path}.{name}" if path else name, part) for name, part in attributes)


def all_parts(
    roots: Mapping[str, Any], parts: Callable[[Any, str], Iterator[tuple[str, Any]]] = parts_of
) -> Iterator[tuple[str, Any]]:
    """Some objects and their parts, the parts of these and so on, each once with the shortest path to it."""
    seen: set[int] = set()
    rest = deque(roots.items())
    while rest:
        path, whole = rest.popleft()
        if id(whole) not in seen:
            seen.add(id(whole))
            yield path, whole
            rest.extend(parts(whole, path))


def path_to(wanted: Any, roots: Mapping[str, Any]) -> str | None:
    """The shortest path to an object from some that may keep it, by name; ``None`` if none of them does.

    Example:
        >>> layers = [nn.Linear(2, 2), nn.Linear(2, 2)]
        >>> path_to(layers[1].bias, {"LAYERS": layers})
        'LAYERS[1].bias'
    """
    return next((path for path, part in all_parts(roots) if part is wanted), None)


# What holds nothing that could change, or is not the module's alone
PLAIN = frozenset({type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, slice})
SHARED = (type, FunctionType, BuiltinFunctionType, MethodType, ModuleType, partial, torch._C.ScriptObject)
HOLDERS = (UserDict, UserList, SimpleNamespace, argparse.Namespace, Optimizer)  # of the standard library, and of torch
GENERATORS: dict[Any, tuple[Callable[[Any], Any], Callable[[Any, Any], Any], Callable[[Any, int], Any]]] = {
    # by class: how to get the state, to set it, and to seed, by methods of the object, which a subclass may override
    random.Random: (lambda g: g.getstate(), lambda g, state: g.setstate(state), lambda g, seed: g.seed(seed)),
    torch.Generator: (lambda g: g.get_state(), lambda g, old: g.set_state(old), lambda g, seed: g.manual_seed(seed)),
    np.random.RandomState: (lambda g: g.get_state(), lambda g, old: g.set_state(old), lambda g, n: g.seed(n % 2**32)),
    np.random.Generator: (
        lambda g: g.bit_generator.state,
        lambda g, state: setattr(g.bit_generator, "state", state),
        lambda g, seed: setattr(g.bit_generator, "state", type(g.bit_generator)(seed).state),
    ),
}
# Whose classes are left alone: `__main__` is the user's
LIBRARIES = frozenset({*sys.stdlib_module_names, "torch", "numpy", "lightning", "lightning_spectral", "pandas"})
INSTALLED = ("site-packages", "dist-packages")
MAPPINGS = (dict, OrderedDict, defaultdict, Counter)
HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")  # of a tensor, on its gradient
LARGE = 10_000  # containers with more entries, such as vocabularies, are put back, but not the content of their entries
LARGE_BYTES = 2**22  # tensors and arrays with more, such as a data set, are not copied for every client

Restore = Callable[[], object]
Keep = Callable[[], Restore]


class KeptState:
    """All that a module keeps besides the values of its parameters and buffers, as it was when this was made.

    `restore` puts it back: the classes of the module's parts, their attributes, the content of containers, arrays and
    data frames, the attributes of objects of the user's own classes, the state of generators, unregistered tensors, and
    which parameters need a gradient. Gradients are dropped. Objects stay the same, so references stay valid.

    Args:
        module: A module.
        others: Further objects, such as its optimizers.
        without: Another state, which keeps all that it has found.

    Example:
        >>> line = nn.Linear(1, 1)
        >>> line.steps, line.seen = 0, []
        >>> kept = KeptState(line)
        >>> line.steps, line.last = 3, 0.5
        >>> line.seen.append(0.5)
        >>> kept.restore()
        >>> line.steps, line.seen, hasattr(line, "last")
        (0, [], False)
    """

    def __init__(self, module: nn.Module, *others: Any, without: KeptState | None = None) -> None:
        self._module = module
        self._package = package_of(module)
        self.tensors = list(named_state(module).values())
        self.classes: list[tuple[Any, type]] = []  # of what has attributes
        self._contents: list[tuple[Any, Any]] = []  # of containers, and of the dictionaries of attributes
        self._empty: list[Any] = []  # most are: a dozen for the hooks of each part
        self._slots: list[tuple[Any, dict[str, Any]]] = []
        self._values: list[Keep] = []
        self.generators: list[Any] = []
        self.too_large: list[Any] = []  # to be kept
        self._seen: set[int] = {id(tensor) for tensor in self.tensors}
        self._seen |= set() if without is None else without._seen
        seen, rest = self._seen, [module, *module.modules(), *others]
        while rest:
            value = rest.pop()
            if type(value) not in PLAIN and id(value) not in seen:
                seen.add(id(value))
                rest.extend(self._parts_kept(value))
        self._keep_values()

    def renewed(self) -> bool:
        """Keep the state as it is now, if it has the same objects in the same places; that takes less time.

        If it has not, another one has to be made.
        """
        if any(self._empty) or any(type(part) is not kind for part, kind in self.classes):
            return False
        contents = chain(self._contents, ((dict(_slots_of(value)), before) for value, before in self._slots))
        if not all(_same_content(now, before) for now, before in contents):
            return False
        self._keep_values()
        return True

    def _keep_values(self) -> None:
        self._restores = [keep() for keep in self._values]
        self.needed_gradients = [(tensor, tensor.requires_grad) for tensor in self.tensors]
        self._gradient_hooks = [(tensor, when, hooks_of(tensor, when)) for tensor in self.tensors for when in HOOKS]

    def not_kept(self) -> tuple[str, ...]:
        """Paths of what is too large to be kept."""
        if not self.too_large:
            return ()
        large = {id(array) for array in self.too_large}
        return tuple(path for path, part in all_parts({"": self._module}) if id(part) in large)

    def mappings(self) -> Iterator[tuple[Any, dict[Any, Any]]]:
        """The dictionaries, also of attributes, each with what it held."""
        contents = [*self._contents, *((container, {}) for container in self._empty)]
        return ((container, before) for container, before in contents if isinstance(container, dict))

    def restore(self) -> None:
        """Put everything back."""
        for part, kind in self.classes:
            if type(part) is not kind:
                part.__class__ = kind
        for container in self._empty:
            if container:
                container.clear()
        for container, content in self._contents:
            if not _same_content(container, content):
                _refill(container, content)
        for value, slots in self._slots:
            for name in dict(_slots_of(value)).keys() - slots.keys():
                object.__delattr__(value, name)
            for name, held in slots.items():
                object.__setattr__(value, name, held)
        for restore in self._restores:
            restore()
        for tensor, when, hooks in self._gradient_hooks:
            if hooks_of(tensor, when) != hooks:
                setattr(tensor, when, hooks if hooks is None else OrderedDict(hooks))
        for tensor, needs_gradient in self.needed_gradients:
            if tensor.grad is not None:
                tensor.grad = None
            if tensor.requires_grad is not needs_gradient:
                tensor.requires_grad_(needs_gradient)

    def exchange(self, new: Callable[[Any], Any]) -> None:
        """Replace everything found in attributes, lists and dictionaries by ``new(part)``, until `restore`.

        Also of keys, such as the parameters that an optimizer has a state of. Objects are not made anew: a tuple stays.
        """
        for container, content in self._contents:
            if isinstance(container, dict):
                _refill(container, {new(key): new(value) for key, value in content.items()})
            elif isinstance(container, list | deque):
                _refill(container, list(map(new, content)))

    def seed(self, seed: int, ids: Iterable[int | str]) -> None:
        """Seed the generators that were found, each by its name."""
        if not self.generators:
            return
        for name, generator in zip(self._names_of_generators, self.generators, strict=True):
            _access_to(generator)[2](generator, derived_seed(seed, "generator", *ids, name))

    @cached_property
    def _names_of_generators(self) -> list[str | int]:
        """Their paths; the place among all of them for one that no path leads to."""
        named = {id(part): path for path, part in all_parts({"": self._module})}
        return [named.get(id(generator), index) for index, generator in enumerate(self.generators)]

    def _parts_kept(self, value: Any) -> Iterator[Any]:
        """Keep an object, and yield its parts, which are to be kept as well."""
        if isinstance(value, dict | list | set | deque | bytearray):
            if type(value) not in MAPPINGS and getattr(value, "__dict__", None) is not None:  # of a subclass
                yield from self._attributes_kept(value)
            if not value:
                self._empty.append(value)
                return
            self._contents.append((value, dict(value) if isinstance(value, dict) else value.copy()))
            if len(value) <= LARGE and not isinstance(value, bytearray):
                yield from value.values() if isinstance(value, dict) else value
        elif isinstance(value, tuple | frozenset):
            yield from value
        elif isinstance(value, Tensor):
            if _is_writable(value):
                self._keep_values_of(
                    value, lambda t: partial(_refill_tensor, t, t.data, t.detach().clone(), t.grad, t.requires_grad)
                )
        elif isinstance(value, nn.Module):
            yield from self._attributes_kept(value)
        elif isinstance(value, (*SHARED, random.SystemRandom)):  # which has no state
            return
        elif isinstance(value, np.ndarray):
            if value.flags.writeable:
                self._keep_values_of(value, lambda array: partial(np.copyto, array, array.copy()))
        elif isinstance(value, tuple(GENERATORS)):
            self.generators.append(value)
            get, put, _ = _access_to(value)
            self._values.append(lambda: partial(put, value, get(value)))
        elif package_of(value) == "pandas" and hasattr(value, "_mgr"):
            self._values.append(lambda: partial(vars(value).update, vars(value.copy())))
        elif is_users(value, self._package):
            if hasattr(value, "__dict__"):
                yield from self._attributes_kept(value)
            if any(hasattr(base, "__slots__") for base in type(value).__mro__[:-1]):
                slots = dict(_slots_of(value))
                self._slots.append((value, slots))
                yield from slots.values()

    def _attributes_kept(self, holder: Any) -> Iterator[Any]:
        before = vars(holder).copy()
        self.classes.append((holder, type(holder)))
        self._contents.append((vars(holder), before))
        return (value for name, value in before.items() if name not in BACK)

    def _keep_values_of(self, array: Any, keep: Callable[[Any], Restore]) -> None:
        if array.nbytes > LARGE_BYTES:
            self.too_large.append(array)
        else:
            self._values.append(partial(keep, array))


@contextmanager
def trying(module: nn.Module, device: torch.device | str | None = None) -> Iterator[None]:
    """Put back, after the block, whatever a module changes in a pass, in its mode or in its layers.

    Within the block it is on ``device``, if that is given, and buffers have other memory. New parameters may replace
    old ones, but those that stay must not change their values.

    Example:
        >>> norm = nn.BatchNorm1d(2)
        >>> with trying(norm):
        ...     _ = norm(torch.ones(3, 2))
        >>> int(norm.num_batches_tracked), norm.running_mean.tolist()
        (0, [0.0, 0.0])
    """
    kept = KeptState(module)
    before = [(tensor, tensor.data) for tensor in kept.tensors]
    try:
        for tensor, data in before:
            moved = data if device is None else data.to(device)
            tensor.data = moved.clone() if moved is data and not isinstance(tensor, nn.Parameter) else moved
        yield
    finally:
        for tensor, data in before:
            tensor.data = data
        kept.restore()


def is_users(value: Any, package: str) -> bool:
    """Whether an object is of a class of the user's own, whose package is given, or only holds values for others.

    Objects of other packages are left alone: they may write files, or count what was sent.
    """
    own = package_of(value)
    return isinstance(value, HOLDERS) or (own not in LIBRARIES and (own == package or not _is_installed(own)))


@cache
def _is_installed(package: str) -> bool:
    """Whether a package is among those that were installed, and not a file or folder of the user's own."""
    found = sys.modules.get(package)
    places = [getattr(found, "__file__", None) or "", *getattr(found, "__path__", ())]
    return any(part in INSTALLED for place in places for part in Path(place).parts)


def package_of(value: Any) -> str:
    """The package in which the class of an object is."""
    return type(value).__module__.partition(".")[0]


def changed_attributes(module: nn.Module, without: Collection[str] = ()) -> Callable[[], tuple[str, ...]]:
    """Return a function that names what has changed on a module since now, besides its parameters and buffers.

    Comparing takes long, and is meant for a few turns. What torch and Lightning keep for themselves does not count, nor
    do tensors that a pass computes, metrics, objects of libraries, and attributes ``without`` which it is asked. Of new
    attributes only those count that are flags, whole numbers or texts: the others are most likely to be made anew.
    """
    before = dict(_compared(module, without))

    def changed() -> tuple[str, ...]:
        now = dict(_compared(module, without))
        both = ((name, before[name], now[name]) for name in now.keys() & before.keys())
        names = {name for name, was, value in both if was is not None and value is not None and was != value}
        names |= before.keys() - now.keys()
        names |= {name for name in now.keys() - before.keys() if isinstance(now[name], Plain) and now[name].lasts}
        return tuple(sorted(names))

    return changed


class Plain(NamedTuple):
    """A value that holds no others, to be compared."""

    text: str
    lasts: bool  # whether it may well be meant to last, if it is new


def _compared(module: nn.Module, without: Collection[str]) -> Iterator[tuple[str, Any]]:
    """Attributes of a module and its parts that torch and Lightning do not keep for themselves; none of metrics."""
    package, torchmetrics = package_of(module), sys.modules.get("torchmetrics")
    kept = [getattr(torchmetrics, kind, ()) for kind in ("Metric", "MetricCollection")]
    for path, part in module.named_modules():
        for own, value in () if isinstance(part, (*kept, torch.jit.ScriptModule)) else vars(part).items():
            name = f"{path}.{own}" if path else own
            if not (own in _KEPT_BY_TORCH or own.startswith(("_forward", "_backward")) or name in without):
                yield name, _comparable(value, 6, package)


def _comparable(value: Any, depth: int, package: str) -> Any:
    """A value to compare with a later one; ``None`` for what is not compared."""
    kind = type(value)
    if kind in PLAIN:
        return None if value is None else Plain(repr(value), kind in (bool, int, str))  # NaN does not equal itself
    if depth == 0 or isinstance(value, (*SHARED, *GENERATORS, nn.Module, nn.Parameter)):  # such as weights of RNNs
        return None
    if isinstance(value, Tensor):
        if value.grad_fn is not None or value.is_meta or value.layout != torch.strided or not value.numel():
            return None
        return value.shape, _digest(value.detach().cpu())
    if isinstance(value, np.ndarray):
        if value.dtype.hasobject:
            return _comparable(value.ravel().tolist(), depth - 1, package)
        return (value.shape, _digest(value)) if value.size else None
    if package_of(value) == "pandas" and hasattr(value, "_mgr"):
        return hashlib.blake2b(pickle.dumps(value), digest_size=16).hexdigest()
    if isinstance(value, bytearray):
        return bytes(value)
    if isinstance(value, set | frozenset):
        return len(value), sorted(map(str, value))[:LARGE]
    entries: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, dict):
        entries = islice(value.items(), LARGE)
    elif isinstance(value, list | tuple | deque):
        entries = enumerate(islice(value, LARGE))
    elif is_users(value, package) and not isinstance(value, Optimizer):
        entries = (*getattr(value, "__dict__", {}).items(), *_slots_of(value))
    else:
        return None
    frozen = ((str(key), _comparable(entry, depth - 1, package)) for key, entry in entries)
    return [(key, entry) for key, entry in frozen if entry is not None]


def _digest(array: Any) -> str:
    """A digest of the bytes of a dense tensor on the CPU, or of an array."""
    if isinstance(array, Tensor):
        array = array.contiguous().view(-1).view(torch.uint8).numpy()
    return hashlib.blake2b(np.ascontiguousarray(array).data, digest_size=16).hexdigest()


def _same_content(now: Any, before: Any) -> bool:
    """Whether a container has the same objects as before in the same order, and in a dictionary the same keys."""
    if isinstance(now, dict):
        same = len(now) == len(before) and all(map(is_, now.values(), before.values()))
        return same and all(map(is_, now, before))
    if isinstance(now, set | bytearray):
        return bool(now == before)
    return len(now) == len(before) and all(map(is_, now, before))


def _refill(container: Any, content: Any) -> None:
    """Give a container its content back, by the methods of its base: a subclass may do other things as well."""
    if isinstance(container, list | bytearray):
        container[:] = content
        return
    base: Any = next(kind for kind in (OrderedDict, dict, set, deque) if isinstance(container, kind))
    base.clear(container)
    (base.extend if base is deque else base.update)(container, content)


@torch.no_grad()
def _refill_tensor(tensor: Tensor, data: Tensor, value: Tensor, gradient: Tensor | None, needs_gradient: bool) -> None:
    tensor.grad = None
    tensor.data = data
    tensor.detach().copy_(value)
    tensor.grad = gradient
    if tensor.requires_grad is not needs_gradient:
        tensor.requires_grad_(needs_gradient)


def hooks_of(tensor: Tensor, when: str) -> dict[int, Any] | None:
    """The hooks of a tensor in one of its attributes `HOOKS`; ``None`` if there are none."""
    return dict(hooks) if (hooks := getattr(tensor, when, None)) else None


def _is_writable(tensor: Tensor) -> bool:
    """Whether a local step can write a tensor in place."""
    if not tensor.is_leaf or tensor.layout != torch.strided or tensor.is_inference() or tensor.is_meta:
        return False
    return not any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))


def _access_to(generator: Any) -> Any:
    return next(access for kind, access in GENERATORS.items() if isinstance(generator, kind))


def _slots_of(value: Any) -> Iterator[tuple[str, Any]]:
    """The slots of an object that have a value, by the names that they have outside of its class."""
    for base in type(value).__mro__:
        slots = vars(base).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            own = f"_{base.__name__.lstrip('_')}{name}" if name.startswith("__") and not name.endswith("__") else name
            if own not in ("__dict__", "__weakref__") and hasattr(value, own):
                yield own, getattr(value, own)
