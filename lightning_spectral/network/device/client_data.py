"""One client's own data, on its device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from lightning_spectral.arguments import Number, Whole, check_fields, flag
from lightning_spectral.client.batches import BatchSource, Collate, examples_per_epoch
from lightning_spectral.client.batches import ClientData as ClientBatches
from lightning_spectral.network.messages import Holding
from lightning_spectral.protocol.records import Download

SMALLEST_EVALUATION_BATCH = 256  # as at the server


@dataclass(frozen=True, eq=False)
class ClientData:
    """The data of one client for one model, which never leaves its device.

    Args:
        train: Any map-style data set, of this client's examples alone.
        batch_size: Examples per local step.
        val: Examples on which it does not train, for `ClientEvaluation`; ``None`` for none.
        keep_ratio: What the device can hold, one of the algorithm's; ``None`` to leave that to the algorithm.
        budget_bytes: Instead, how many bytes the device may get and send in a round, without frozen parameters, which
            it gets once: it is given the largest sub-model of the algorithm that fits. See `largest_that_fits`.
        drop_last: Whether a local epoch omits its last batch if that is smaller, unless it is the only one.
        labels: Class of each example, for hooks that need the client's classes; ``None`` if they are not known.
        collate_fn: Merges examples into a batch; ``None`` for PyTorch's default.
        num_workers: Worker processes for data that is not in memory.

    Raises:
        TypeError: If an argument has the wrong type, or the data set has no length.
        ValueError: If a number is out of range, or the device states both a keep ratio and a budget.

    Example:
        >>> from torch.utils.data import TensorDataset
        >>> ClientData(TensorDataset(torch.ones(50, 3)), batch_size=8, drop_last=True).holding()
        Holding(num_examples=50, examples_per_epoch=48, keep_ratio=None, num_held_out=0, budget_bytes=None)
    """

    train: Any
    batch_size: int = 32
    val: Any = None
    keep_ratio: float | None = None
    budget_bytes: float | None = None
    drop_last: bool = False
    labels: Tensor | Sequence[int] | None = field(default=None, repr=False)
    collate_fn: Collate | None = None
    num_workers: int = 0

    def __post_init__(self) -> None:
        if not (hasattr(self.train, "__getitem__") and hasattr(self.train, "__len__")):
            raise TypeError(
                f"`train` must be a map-style data set, with `__len__` and `__getitem__`, got {self.train!r}."
            )
        check_fields(self, batch_size=Whole(at_least=1), num_workers=Whole(at_least=0))
        check_fields(self, keep_ratio=Number(above=0, at_most=1, optional=True))
        check_fields(self, budget_bytes=Number(above=0, optional=True))
        if self.keep_ratio is not None and self.budget_bytes is not None:
            raise ValueError(
                f"`keep_ratio={self.keep_ratio}` and `budget_bytes={self.budget_bytes:,}` both say what the device can "
                "hold; leave one out."
            )
        flag("drop_last", self.drop_last)

    def holding(self) -> Holding:
        """What the server is told of it."""
        size, held_out = len(self.train), 0 if self.val is None else len(self.val)
        per_epoch = examples_per_epoch(size, self.batch_size, self.drop_last)
        return Holding(size, per_epoch, self.keep_ratio, held_out, self.budget_bytes)

    def batches(self, download: Download) -> ClientBatches:
        """The examples of one round, in an order that depends on the run's seed, the round and the client."""
        indices = torch.arange(len(self.train))
        order = download.seed, download.ids, self.drop_last
        labels = None if self.labels is None else self._classes
        return ClientBatches(self._source, indices, self.batch_size, *order, labels=labels)

    def held_out_batches(self) -> Iterator[Any]:
        """The held-out examples in order."""
        index_batches = torch.split(torch.arange(len(self.val)), max(self.batch_size, SMALLEST_EVALUATION_BATCH))
        return BatchSource(self.val, self.collate_fn).batches(index_batches)

    def _classes(self) -> Tensor:
        return torch.as_tensor(self.labels)

    @cached_property
    def _source(self) -> BatchSource:
        return BatchSource(self.train, self.collate_fn, self.num_workers)
