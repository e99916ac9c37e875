"""The changes of named tensors, computed in blocks that fit the cache, without a second copy of the model."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

Tensors = Mapping[str, Tensor]


class Piece(NamedTuple):
    """A run of one tensor's values."""

    name: str
    idx: int  # among the pieces of that tensor
    before: Tensor  # its values before training, any shape
    start: int  # where it begins in the flat vector
    stop: int


class Block(NamedTuple):
    """Neighbouring pieces that are processed together."""

    pieces: tuple[Piece, ...]
    where: slice  # their part of the flat vector
    change: Tensor  # buffer for their change, float64; all blocks share it
    runs: tuple[Tensor, ...]  # for each piece, its part of the buffer, in its shape


class ChangeBlocks:
    """Named tensors as one flat vector, cut into blocks: large tensors into several, small ones several to a block.

    Args:
        before: The tensors before training, read again for every client.
        kinds: A key for each name; tensors with different keys never share a block.

    Attributes:
        ranges: For each name, its part of the flat vector.
        size: Length of the flat vector.
    """

    def __init__(self, before: Tensors, kinds: Mapping[str, Hashable]) -> None:
        self.ranges: dict[str, slice] = {}
        self.size = 0
        self._before = dict(before)
        self._groups: list[list[Piece]] = []
        for kind in dict.fromkeys(kinds.values()):
            self._groups += _group([piece for name in before if kinds[name] == kind for piece in self._append(name)])

    def changes(self, after: Tensors, in_float64: Collection[str] = ()) -> Iterator[tuple[Block, Tensor]]:
        """Yield each block with ``after - before``, as a float64 vector that the next block overwrites.

        Of each kind, either all tensors are given or none. The change of the names in ``in_float64`` is formed in
        float64, not in the tensors' own type.
        """
        for block, trained in self._cut(after):
            pairs = [
                (own, piece.before, piece.name in in_float64) for own, piece in zip(trained, block.pieces, strict=True)
            ]
            put_differences(pairs, block.runs)
            yield block, block.change

    def given(self, changes: Tensors) -> Iterator[tuple[Block, Tensor]]:
        """Yield each block with changes that are already computed, in the same way."""
        for block, own in self._cut(changes):
            torch._foreach_copy_(list(block.runs), own)
            yield block, block.change

    def _cut(self, tensors: Tensors) -> Iterator[tuple[Block, list[Tensor]]]:
        """Yield each block of which tensors are given, with its pieces of them."""
        cut = {name: split(tensor, like=self._before[name]) for name, tensor in tensors.items()}
        for block in self._blocks if cut else ():
            if block.pieces[0].name in cut:
                yield block, [cut[piece.name][piece.idx] for piece in block.pieces]

    @cached_property
    def _blocks(self) -> list[Block]:
        """The blocks with their shared buffer, which is not needed where clients only ever send parts."""
        device = next((tensor.device for tensor in self._before.values()), None)
        longest = max((group[-1].stop - group[0].start for group in self._groups), default=0)
        scratch = torch.empty(longest, dtype=torch.float64, device=device)
        return [_block(group, scratch) for group in self._groups]

    def _append(self, name: str) -> Iterator[Piece]:
        start = self.size
        for idx, piece in enumerate(split(self._before[name], like=self._before[name])):
            yield Piece(name, idx, piece, self.size, self.size + piece.numel())
            self.size += piece.numel()
        self.ranges[name] = slice(start, self.size)


def put_differences(pairs: Sequence[tuple[Tensor, Tensor, bool]], out: Sequence[Tensor]) -> None:
    """Write ``after - before`` into float64 tensors; each pair says whether to subtract in float64."""
    after = [tensor.double() if in_float64 else tensor for tensor, _, in_float64 in pairs]
    before = [tensor.double() if in_float64 else tensor for _, tensor, in_float64 in pairs]
    torch._foreach_copy_(list(out), torch._foreach_sub(after, before))


def split(tensor: Tensor, like: Tensor) -> tuple[Tensor, ...]:
    """Split a tensor into pieces of about a block's size, where the memory layout of ``like`` allows it without a copy.

    A contiguous tensor is cut anywhere, any other between the slices of its first dimension.
    """
    if like.numel() <= block_size(like):
        return (tensor,) if like.numel() else ()
    if like.is_contiguous():
        return torch.split(tensor.reshape(-1), block_size(like))
    return torch.split(tensor, rows_in_a_block(like))


def rows_in_a_block(tensor: Tensor) -> int:
    """Number of slices of the first dimension that make a block, at least one."""
    return max(1, block_size(tensor) * len(tensor) // max(tensor.numel(), 1))


def block_size(tensor: Tensor) -> int:
    """Number of values processed at a time: on a CPU what fits its cache, elsewhere enough to keep the device busy."""
    return 2**16 if tensor.device.type == "cpu" else 2**22


def _group(pieces: Sequence[Piece]) -> Iterator[list[Piece]]:
    """Yield runs of pieces that together have at most a block's size, or consist of a single larger piece."""
    group: list[Piece] = []
    for piece in pieces:
        if group and piece.stop - group[0].start > block_size(piece.before):
            yield group
            group = []
        group.append(piece)
    if group:
        yield group


def _block(group: Sequence[Piece], scratch: Tensor) -> Block:
    start, stop = group[0].start, group[-1].stop
    runs = tuple(scratch[piece.start - start : piece.stop - start].view(piece.before.shape) for piece in group)
    return Block(tuple(group), slice(start, stop), scratch[: stop - start], runs)
