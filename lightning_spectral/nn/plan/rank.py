"""Finds weights whose entries are all the same, zero or another constant, which stay whole for lack of rank."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from lightning_spectral.nn.layers.blocks import WeightBlock

ZERO, ONE = "zero: it has no singular terms", "constant: its rank of 1 would never grow"


def missing_rank(layer: nn.Module, blocks: Iterable[WeightBlock]) -> str | None:
    """The reason to keep a layer whole because of its present weight; ``None`` if a matrix has terms to choose from.

    A term of size zero has no gradient, so the rank of a sharded matrix never grows. Zeros would stay zeros, and a
    constant matrix would stay of rank one. Other weights of low rank, such as truncated ones, are low on purpose.

    Args:
        layer: A dense layer.
        blocks: The matrices that make up its weights.

    Example:
        >>> layer, blocks = nn.Linear(8, 4), [WeightBlock("", "weight", rows=(0, 4), shape=(4, 8))]
        >>> missing_rank(layer, blocks) is None
        True
        >>> _ = nn.init.zeros_(layer.weight)
        >>> missing_rank(layer, blocks)
        'its weight is zero: it has no singular terms'
    """
    blocks = list(blocks)
    for block in blocks:
        rank = _constant_rank(block.matrix(layer.get_parameter(block.parameter).detach()))
        if rank is not None and rank < min(2, block.num_singular):
            return f"{'its weight' if len(blocks) == 1 else 'a part of its weight'} is {ONE if rank else ZERO}"
    return None


def is_missing_rank(reason: str) -> bool:
    """Whether a reason to keep a layer whole is one that `missing_rank` gives."""
    return reason.endswith((ZERO, ONE))


def _constant_rank(matrix: Tensor) -> int | None:
    """The rank of a matrix whose entries are all the same, 0 or 1; ``None`` for any other."""
    if not matrix.numel():
        return None
    first = matrix[0, 0]
    is_constant = bool((matrix == first).all()) and bool(torch.isfinite(first))
    return int(bool(first)) if is_constant else None
