"""Memory of the tensors that are alive, counted operation by operation."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the memory of all tensors that operations make inside the block, for as long as something holds them.

    Tensors that share memory count once. What an operation allocates and frees itself is not seen, nor is what existed
    before. Works on any device.

    Attributes:
        now: Bytes that are alive.
        most: The most that were alive at once.

    Example:
        >>> with LiveBytes() as live:
        ...     x = torch.ones(4)
        ...     y = x[:2] + 1  # the view is no memory of its own
        ...     del x
        >>> live.now, live.most
        (8, 24)
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.most = 0
        self._alive: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {storage._cdata for storage in _storages((args, kwargs))}
        for storage in _storages(result):
            if storage._cdata not in given and storage._cdata not in self._alive:
                self._add(storage)
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()

        def free(_: object) -> None:
            del self._alive[key]
            self.now -= size

        self._alive[key] = weakref.ref(storage, free)  # torch keeps the object for as long as the memory
        self.now += size
        self.most = max(self.most, self.now)


def _storages(tree: Any) -> Iterator[torch.UntypedStorage]:
    for leaf in tree_leaves(tree):
        if isinstance(leaf, Tensor) and leaf.layout is torch.strided:
            yield leaf.untyped_storage()
