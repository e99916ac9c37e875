"""A module's example input, and one forward pass of it, which shows the order of the layers."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import tree_map

from lightning_spectral.client.kept_state import trying
from lightning_spectral.functional.checks import shapes_of
from lightning_spectral.nn.layers.terms import join

Example = Any


def example_of(module: nn.Module) -> Example:
    """Lightning's ``example_input_array`` of a module, or ``None``."""
    return getattr(module, "example_input_array", None)


def as_input(module: nn.Module, example_input: Example) -> Example:
    """An example on the device of a module's parameters, and of their type, if these have only one.

    A Trainer moves the module and its batches to its device, and casts them (``precision="64-true"``), but not the
    ``example_input_array``.
    """
    devices = {parameter.device for parameter in module.parameters()}
    dtypes = {parameter.dtype for parameter in module.parameters() if parameter.is_floating_point()}
    device = devices.pop() if len(devices) == 1 else None
    dtype = dtypes.pop() if len(dtypes) == 1 else None

    def move(leaf: Any) -> Any:
        has_values = isinstance(leaf, (torch.Tensor, PackedSequence))
        if not has_values:  # a batch of a tokenizer or of graphs moves in place
            return copy.copy(leaf).to(device) if device is not None and hasattr(leaf, "to") else leaf
        is_cast = dtype is not None and leaf.data.is_floating_point()
        return leaf.to(device or leaf.data.device, dtype if is_cast else leaf.data.dtype)

    return tree_map(move, example_input, is_leaf=lambda part: isinstance(part, PackedSequence))


def execution_order(module: nn.Module, example_input: Example) -> tuple[str, ...]:
    """Names of the submodules in the order of their first call in one forward pass.

    The pass runs in evaluation mode, and leaves the module and the global random state as they were. An attention's
    ``out_proj`` counts as called with the attention, which reads its weight instead.
    """
    called: dict[str, None] = {}
    with trying(module):
        module.eval()
        for name, layer in module.named_modules():
            names = (name, join(name, "out_proj")) if isinstance(layer, nn.MultiheadAttention) else (name,)
            layer.register_forward_pre_hook(lambda *_, names=names: called.update(dict.fromkeys(names)))
        example = as_input(module, example_input)
        try:
            run_example(module, example)
        except NotImplementedError:  # of a part without `forward`: it says so
            raise
        except (RuntimeError, TypeError, IndexError) as error:  # of torch, or of a `forward` with other arguments
            shown = shapes_of(example) or type(example_input).__name__
            raise ValueError(
                f"{type(module).__name__} cannot run its example input, {shown}: {error}. Give `example_input`, or the "
                "module's `example_input_array`, as `forward` takes it: one batch, a tuple of its arguments, or a "
                "dictionary of them."
            ) from error
    return tuple(called)


def run_example(module: nn.Module, example_input: Example) -> Any:
    """Run one forward pass with gradients, so that no fused kernel bypasses a layer, and restore the random state."""
    with torch.random.fork_rng(), torch.enable_grad():
        try:
            if isinstance(example_input, Mapping):
                return module(**example_input)
            # a named tuple, such as a PackedSequence, is one input
            is_several = isinstance(example_input, tuple) and not hasattr(example_input, "_fields")
            return module(*example_input) if is_several else module(example_input)
        except NotImplementedError as error:
            if f"[{type(module).__name__}] is missing" not in str(error):
                raise
            raise ValueError(
                f"{type(module).__name__} has no `forward`, so no pass of `example_input` can be run; define one, or "
                "pass the part that does the work, such as `module.net`."
            ) from error
