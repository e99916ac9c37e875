"""Swap the affine layers of a module for sharded ones."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from torch import nn

from lightning_spectral.functional.factors import check_keep_ratio, num_terms_for
from lightning_spectral.nn.sharded import SpectralShardedLayer
from lightning_spectral.nn.treatment import SHARDED_LAYERS, plan_layers

_log = logging.getLogger(__name__)

ModuleT = TypeVar("ModuleT", bound=nn.Module)


def replace_layers(
    module: ModuleT,
    keep_ratio: float,
    *,
    exclude: Sequence[str] = (),
    keep_first_and_last_dense: bool = True,
) -> ModuleT:
    """A copy of ``module`` whose affine layers hold the ceil(r N) largest terms of their singular value decomposition.

    One line per swapped layer goes to the package's logger at level INFO.

    Args:
        module: Any module; it is not changed.
        keep_ratio: Share r of the singular terms to hold, in ``(0, 1]``.
        exclude: Shell-style patterns of dotted layer names that stay dense.
        keep_first_and_last_dense: Keep the first and the last affine layer dense.

    Returns:
        The copy, of the same class.

    Raises:
        ValueError: If ``keep_ratio`` is out of range, or as `plan_layers`.

    Example:
        >>> mlp = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 2))
        >>> replace_layers(mlp, keep_ratio=0.25)[1]
        SpectralShardedLinear(in_features=16, out_features=16, num_terms=4, bias=True)
    """
    check_keep_ratio(keep_ratio)
    report = plan_layers(module, exclude=exclude, keep_first_and_last_dense=keep_first_and_last_dense)
    sharded = copy.deepcopy(module)
    swap_layers(sharded, report.sharded_names, lambda dense, kind, n: kind.from_dense(dense, n), keep_ratio)
    return sharded


def swap_layers(
    module: nn.Module,
    names: Sequence[str],
    make: Callable[[Any, Any, int], SpectralShardedLayer],
    keep_ratio: float,
) -> None:
    """Replace the named layers of ``module`` in place, wherever they are registered.

    Args:
        module: The module to change.
        names: Dotted names of dense layers whose type is in `SHARDED_LAYERS`.
        make: From (dense layer, sharded class, number of terms) to the new layer.
        keep_ratio: Share of the singular terms that the new layers hold.
    """
    swaps: dict[nn.Module, SpectralShardedLayer] = {}
    for name in names:
        dense = module.get_submodule(name)
        num_terms = num_terms_for(min(dense_weight(dense).flatten(1).shape), keep_ratio)
        swaps[dense] = make(dense, SHARDED_LAYERS[type(dense)], num_terms).train(dense.training)
        _move_hooks(dense, swaps[dense])
        _log.info("%s: %s -> %s", name, type(dense).__name__, swaps[dense])
    for path, layer in list(module.named_modules(remove_duplicate=False)):
        if layer in swaps:
            parent, _, child = path.rpartition(".")
            setattr(module.get_submodule(parent), child, swaps[layer])


def _move_hooks(dense: nn.Module, sharded: nn.Module) -> None:
    """A layer's forward and backward hooks go on watching the layer in its place."""
    for hooks in [
        name for name in vars(sharded) if name.endswith("hooks") and ("forward" in name or "backward" in name)
    ]:
        getattr(sharded, hooks).update(vars(dense).get(hooks, {}))


def dense_weight(layer: nn.Module) -> nn.Parameter:
    """The weight of a dense affine layer."""
    weight = layer.weight
    assert isinstance(weight, nn.Parameter)
    return weight


def sharded_layers(module: nn.Module) -> dict[str, SpectralShardedLayer]:
    """The sharded layers of a module by dotted name."""
    return {name: layer for name, layer in module.named_modules() if isinstance(layer, SpectralShardedLayer)}
