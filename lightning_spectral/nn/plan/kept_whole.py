"""Weights that stay whole for what they are: factors of low rank, such as those of LoRA, and constants."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor, nn

from lightning_spectral.nn.layers.blocks import WeightBlock

ZERO, ONE = "zero: it has no singular terms", "constant: its rank of 1 would never grow"
LOW_RANK = "low-rank factor"
Shapes = Mapping[str, tuple[int, int]]


def missing_rank(layer: nn.Module, blocks: Iterable[WeightBlock]) -> str | None:
    """The reason to keep a layer whole because of its present weight; ``None`` if a matrix has terms to choose from.

    A term of size zero has no gradient, so the rank of a sharded matrix never grows. Zeros would stay zeros, and a
    constant matrix would stay of rank one. Other weights of low rank, such as truncated ones, are low on purpose.
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


def low_rank_factors(module: nn.Module, trained: Shapes, frozen: Shapes) -> frozenset[str]:
    """Names of the layers that are a factor of a low-rank update B A of another layer's weight W.

    They are cheap because they have few terms: a client that held some of these would save next to nothing. Also, B is
    zero at first, so it has no terms at all. A layer is a factor if

    - a part of its dotted name begins with ``lora``, in upper or lower case, as in PEFT (``lora_A.default``); or
    - it is one of a pair B (c_out, r), A (r, c_in) of trained layers in the same module as a frozen W (c_out, c_in),
      with r < min(c_out, c_in). A ``ModuleDict`` or ``ModuleList`` between a layer and that module does not count.

    ``trained`` and ``frozen`` have the shapes of the weights of affine layers, as matrices, by name.

    Example:
        >>> adapted = nn.ModuleDict({"base": nn.Linear(8, 6), "down": nn.Linear(8, 2), "up": nn.Linear(2, 6)})
        >>> shapes = {"down": (2, 8), "up": (6, 2)}
        >>> sorted(low_rank_factors(adapted, shapes, {"base": (6, 8)})), low_rank_factors(adapted, shapes, {})
        (['down', 'up'], frozenset())
    """
    named = {name for name in trained if any(part.lower().startswith("lora") for part in name.split("."))}
    return frozenset(named.union(*_pairs(module, trained, frozen)))


def _pairs(module: nn.Module, trained: Shapes, frozen: Shapes) -> Iterator[tuple[str, str]]:
    beside: dict[str, list[str]] = defaultdict(list)
    for name in trained:
        beside[_owner(module, name)].append(name)
    for base, (rows, columns) in frozen.items():
        siblings = beside[_owner(module, base)]
        for down in siblings:
            rank = trained[down][0]
            if trained[down] == (rank, columns) and rank < min(rows, columns):
                yield from ((down, up) for up in siblings if trained[up] == (rows, rank))


def _owner(module: nn.Module, name: str) -> str:
    """Path of the module that a layer belongs to, skipping dictionaries and lists in between."""
    path = name.rpartition(".")[0]
    while path and isinstance(module.get_submodule(path), nn.ModuleDict | nn.ModuleList):
        path = path.rpartition(".")[0]
    return path
