"""The ``torchmetrics`` of a module: every client begins with empty ones, and they belong to it alone."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeGuard

from torch import nn

from lightning_spectral.protocol.attribute_paths import all_parts

if TYPE_CHECKING:
    from torchmetrics import Metric


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


def isolate_metrics(metrics: Sequence[Metric]) -> Callable[[], None]:
    """Keep ``torchmetrics`` from syncing across processes, which train other clients or see the same data.

    Returns:
        A function that restores the metrics' own synchronisation.
    """
    own = [metric.distributed_available_fn for metric in metrics]

    def restore() -> None:
        for metric, is_available in zip(metrics, own, strict=True):
            metric.distributed_available_fn = is_available

    for metric in metrics:
        metric.distributed_available_fn = _never
    return restore


def _never() -> bool:
    return False
