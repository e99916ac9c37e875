"""What clients must not pass on to each other: the attributes that a sub-model keeps, and its metrics."""

from __future__ import annotations

import sys
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, TypeGuard

import numpy as np
from torch import Tensor, nn

from lightning_spectral.protocol.attribute_paths import all_parts

if TYPE_CHECKING:
    from torchmetrics import Metric


# A download sets the first two; which parts a module has is fixed when it is built.
LOADED = ("_parameters", "_buffers", "_modules")
MAPPINGS = (dict, OrderedDict, defaultdict)
SEQUENCES = (list, deque, set)


class KeptAttributes:
    """The attributes of a module and its parts as they were when this was made.

    Attributes that were bound to something else are bound to the old value again, new ones are removed, and lists,
    dictionaries, sets, deques, arrays and tensors get back what they held. Objects of other classes are left as they
    are.

    Args:
        module: A sub-model, as it is before its first client.

    Example:
        >>> line = nn.Linear(1, 1)
        >>> line.steps, line.seen = 0, []
        >>> kept = KeptAttributes(line)
        >>> line.steps, line.last = 3, 0.5
        >>> line.seen.append(0.5)
        >>> kept.restore()
        >>> line.steps, line.seen, hasattr(line, "last")
        (0, [], False)
    """

    def __init__(self, module: nn.Module) -> None:
        parts = list(module.modules())
        loaded = {id(tensor) for tensor in (*module.parameters(), *module.buffers())}
        self._attributes = [(vars(part), _own(part)) for part in parts]
        values = (value for _, own in self._attributes for value in own.values())
        self._refill = list(_refills(values, seen=loaded))

    def restore(self) -> None:
        """Put everything back."""
        for now, before in self._attributes:
            for name in [name for name in now if name not in before and name not in LOADED]:
                del now[name]
            now.update(before)
        for refill in self._refill:
            refill()


def _own(part: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in vars(part).items() if name not in LOADED}


def _refills(values: Iterable[Any], seen: set[int]) -> Iterator[Callable[[], object]]:
    """For each container, array and tensor that can be reached from some values, a function that puts its content back.

    Args:
        values: Where to look.
        seen: Ids of the objects that need no refill; those found are added.
    """
    for value in values:
        if id(value) in seen:
            continue
        seen.add(id(value))
        if type(value) in MAPPINGS:
            yield partial(_refill_mapping, value, dict(value)) if value else value.clear  # most are empty, for hooks
            yield from _refills(value.values(), seen)
        elif type(value) in SEQUENCES:
            yield partial(_refill_sequence, value, list(value)) if value else value.clear
            yield from _refills(value, seen)
        elif type(value) is tuple:
            yield from _refills(value, seen)
        elif isinstance(value, Tensor) and _is_writable(value):
            yield partial(value.copy_, value.clone())
        elif isinstance(value, np.ndarray) and value.flags.writeable:
            yield partial(np.copyto, value, value.copy())


def _refill_mapping(mapping: dict[Any, Any], content: dict[Any, Any]) -> None:
    mapping.clear()
    mapping.update(content)


def _refill_sequence(sequence: Any, content: list[Any]) -> None:
    sequence.clear()
    (sequence.update if isinstance(sequence, set) else sequence.extend)(content)


def _is_writable(tensor: Tensor) -> bool:
    """Whether a local step can write a tensor in place, other than through an optimizer."""
    is_expanded = any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))
    return not (tensor.requires_grad or tensor.is_inference() or is_expanded)


def is_metric(value: object) -> TypeGuard[Metric]:
    """Whether a value is a metric of ``torchmetrics``, which a device need not have: until it is imported, none is."""
    torchmetrics = sys.modules.get("torchmetrics")
    return torchmetrics is not None and isinstance(value, torchmetrics.Metric)


def metrics_of(module: nn.Module) -> list[Metric]:
    """The metrics that a module keeps: parts of it, and those in lists, dictionaries and attributes of plain objects.

    Example:
        >>> from torchmetrics import MeanMetric
        >>> module = nn.Module()
        >>> module.one, module.more = MeanMetric(), {"train": [MeanMetric()]}
        >>> len(metrics_of(module))
        2
    """
    return [part for _, part in all_parts({"": module}) if is_metric(part)]


def isolate_metrics(module: nn.Module) -> Callable[[], None]:
    """Keep a module's ``torchmetrics`` from syncing across processes, which train other clients or see the same data.

    Returns:
        A function that restores the metrics' own synchronisation.
    """
    metrics = metrics_of(module)
    own = [metric.distributed_available_fn for metric in metrics]

    def restore() -> None:
        for metric, is_available in zip(metrics, own, strict=True):
            metric.distributed_available_fn = is_available

    for metric in metrics:
        metric.distributed_available_fn = _never
    return restore


def _never() -> bool:
    return False
