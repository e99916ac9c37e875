"""Swap the affine layers of a module for sharded ones."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from torch import nn

from lightning_spectral.functional.spectra import KEEP_RATIO
from lightning_spectral.nn.layers.sharded import ShardedLayer
from lightning_spectral.nn.plan.layer_types import ShardedType
from lightning_spectral.nn.plan.module_plan import LayerChoices, ModulePlan
from lightning_spectral.nn.plan.planner import plan_of
from lightning_spectral.nn.trace import Example
from lightning_spectral.protocol.exchange import copy_module

_log = logging.getLogger(__name__)

ModuleT = TypeVar("ModuleT", bound=nn.Module)


def replace_layers(
    module: ModuleT,
    keep_ratio: float,
    example_input: Example = None,
    layers: LayerChoices | ModulePlan = LayerChoices(),
) -> ModuleT:
    """A copy of ``module`` whose affine layers hold the ceil(r N) largest terms of their singular value decomposition.

    Each swapped layer is logged in one line by the package's logger, at level INFO.

    Args:
        module: Any module; it is not changed.
        keep_ratio: Share r of the singular terms to hold, in ``(0, 1]``.
        example_input: As in `validate`.
        layers: As in `validate`.

    Example:
        >>> mlp = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 2))
        >>> replace_layers(mlp, keep_ratio=0.25)[1]
        SpectralShardedLinear(in_features=16, out_features=16, num_terms=4, bias=True)
    """
    keep_ratio = KEEP_RATIO("keep_ratio", keep_ratio)
    plan = plan_of(module, layers, example_input)
    copied: ModuleT = copy_module(module)
    swap_layers(copied, plan, lambda sharded, dense, num_terms: sharded.from_dense(dense, num_terms), keep_ratio)
    return copied


def swap_layers(
    module: nn.Module,
    plan: ModulePlan,
    make: Callable[[ShardedType, Any, Sequence[int]], ShardedLayer],
    keep_ratio: float,
) -> None:
    """Turn the layers to be sharded into sharded ones, in place.

    ``make`` makes the new layer from the sharded class, the dense layer and the numbers of terms of its blocks.
    """
    for name, layer in plan.sharded.items():
        assert layer.sharded is not None
        dense = module.get_submodule(name)
        sharded = make(layer.sharded, dense, [block.num_terms(keep_ratio) for block in layer.blocks])
        sharded.dense_name = name  # so that it can refuse writes to the weights that it stands for
        sharded.dense_weights = frozenset(block.parameter.removeprefix(f"{name}.") for block in layer.blocks)
        held_rows, bias = layer.blocks[0].held_rows, getattr(dense, "bias", None)
        if held_rows is not None:
            if dense._backward_hooks or dense._backward_pre_hooks:
                raise ValueError(
                    f"The layer {name!r} has a hook on its backward pass, which needs all outputs, and clients hold "
                    "only some of them; name it in `exclude`, or leave `output_ratio` out."
                )
            sharded.keep_outputs(held_rows, with_bias=bias is not None and bias.requires_grad)
        sharded.train(dense.training)
        _log.info("%s: %s -> %s", name, type(dense).__name__, sharded)
        _become(dense, sharded)
    for part in module.modules():
        if isinstance(part, nn.TransformerEncoder):  # nested tensors go to a kernel that reads dense weights
            part.use_nested_tensor = False


def _become(dense: nn.Module, sharded: nn.Module) -> None:
    """Turn a layer into its replacement, so that lists and functions that refer to the layer follow as well.

    Attributes that the user has given the layer stay, and hooks that are added to it later act on the replacement.
    """
    kind = type(sharded)
    for name, hooks in vars(sharded).items():
        if name.endswith("hooks") and ("forward" in name or "backward" in name):
            own = vars(dense).get(name, {})
            own.update(hooks)
            vars(sharded)[name] = own
    vars(sharded)["_is_full_backward_hook"] = dense._is_full_backward_hook
    for name in [name for name in vars(dense) if hasattr(kind, name) and not hasattr(nn.Module, name)]:
        delattr(dense, name)  # it would hide what the class says
    dense.__class__ = kind
    vars(dense).update(vars(sharded))
