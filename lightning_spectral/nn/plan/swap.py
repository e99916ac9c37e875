"""Swap the affine layers of a module for sharded ones."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from torch import nn

from lightning_spectral.functional.factors import check_keep_ratio, num_terms_for
from lightning_spectral.nn.layers.terms import SingularTerms
from lightning_spectral.nn.plan.layer_types import ShardedType
from lightning_spectral.nn.plan.planner import plan_layers
from lightning_spectral.nn.plan.report import LayerReport
from lightning_spectral.nn.plan.trace import Example

_log = logging.getLogger(__name__)

ModuleT = TypeVar("ModuleT", bound=nn.Module)
Make = Callable[[ShardedType, Any, Sequence[int]], nn.Module]


def replace_layers(
    module: ModuleT,
    keep_ratio: float,
    example_input: Example = None,
    *,
    exclude: Sequence[str] = (),
    split: Mapping[str, int] | None = None,
    keep_first_and_last_dense: bool = True,
    term_granularity: int = 1,
) -> ModuleT:
    """A copy of ``module`` whose affine layers hold the ceil(r N) largest terms of their singular value decomposition.

    One line per swapped layer goes to the package's logger at level INFO.

    Args:
        module: Any module; it is not changed.
        keep_ratio: Share r of the singular terms to hold, in ``(0, 1]``.
        example_input: As in `validate`.
        exclude: As in `validate`.
        split: As in `validate`.
        keep_first_and_last_dense: As in `validate`.
        term_granularity: Round the number of terms up to a multiple of this, as far as there are terms.

    Returns:
        The copy, of the same class.

    Raises:
        ValueError: If ``keep_ratio`` is out of range, or with every problem that `validate` shows.

    Example:
        >>> mlp = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 2))
        >>> replace_layers(mlp, keep_ratio=0.25)[1]
        SpectralShardedLinear(in_features=16, out_features=16, num_terms=4, bias=True)
    """
    check_keep_ratio(keep_ratio)
    report = plan_layers(
        module,
        example_input,
        exclude=exclude,
        split=split,
        keep_first_and_last_dense=keep_first_and_last_dense,
    ).check()
    sharded = copy.deepcopy(module)
    swap_layers(sharded, report, lambda kind, dense, n: kind.from_dense(dense, n), keep_ratio, term_granularity)
    return sharded


def swap_layers(
    module: nn.Module, report: LayerReport, make: Make, keep_ratio: float, term_granularity: int = 1
) -> None:
    """Replace the layers that are to be sharded in place, wherever they are registered.

    Args:
        module: The module to change.
        report: What is to be sharded.
        make: From (sharded class, dense layer, numbers of terms of its blocks) to the new layer.
        keep_ratio: Share of the singular terms that the new layers hold.
        term_granularity: Numbers of terms are rounded up to a multiple of it.
    """
    swaps: dict[nn.Module, nn.Module] = {}
    for name, treatment in report.sharded.items():
        assert treatment.sharded is not None
        dense = module.get_submodule(name)
        num_terms = [num_terms_for(block.num_singular, keep_ratio, term_granularity) for block in treatment.blocks]
        swaps[dense] = make(treatment.sharded, dense, num_terms).train(dense.training)
        _move_hooks(dense, swaps[dense])
        _log.info("%s: %s -> %s", name, type(dense).__name__, swaps[dense])
    for path, layer in list(module.named_modules(remove_duplicate=False)):
        if layer in swaps:
            parent, _, child = path.rpartition(".")
            setattr(module.get_submodule(parent), child, swaps[layer])
    _leave_fast_paths(module)


def _move_hooks(dense: nn.Module, sharded: nn.Module) -> None:
    """A layer's forward and backward hooks go on watching the layer in its place."""
    for hooks in [
        name for name in vars(sharded) if name.endswith("hooks") and ("forward" in name or "backward" in name)
    ]:
        getattr(sharded, hooks).update(vars(dense).get(hooks, {}))


def _leave_fast_paths(module: nn.Module) -> None:
    """Torch's encoder packs padded sequences into nested tensors for a kernel that sharded layers do not use."""
    for layer in module.modules():
        if isinstance(layer, nn.TransformerEncoder):
            layer.use_nested_tensor = False


def sharded_layers(module: nn.Module) -> dict[str, SingularTerms]:
    """Whatever holds singular terms in a module, by dotted name: sharded layers, or blocks within them."""
    return {name: layer for name, layer in module.named_modules() if isinstance(layer, SingularTerms)}
