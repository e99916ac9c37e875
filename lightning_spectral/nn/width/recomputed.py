"""Refuses layers that run again in the backward pass, when they differ from what they were in the forward pass."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle


class RecomputationWatch:
    """Raises an error from a backward pass that runs layers again, as activation checkpointing does.

    It has hooks only between `begin` and `end`, around a backward pass, in which layers do not normally run. So steps
    that are not watched cost nothing; in a watched step, each layer costs the registration of a hook.

    Args:
        module: The module that has the layers.
        names: Names of the layers.
    """

    def __init__(self, module: nn.Module, names: Collection[str]) -> None:
        self._layers = [module.get_submodule(name) for name in sorted(names)]
        self._handles: list[RemovableHandle] = []

    def begin(self) -> None:
        """Start watching, until `end`."""
        self.end()
        self._handles = [layer.register_forward_pre_hook(_refuse) for layer in self._layers]

    def end(self) -> None:
        """Stop watching."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


def _refuse(layer: nn.Module, inputs: object) -> None:
    if torch._C._current_graph_task_id() != -1:  # the user's own code may run layers in any hook
        raise RuntimeError(
            f"A {type(layer).__name__} runs again in the backward pass, as activation checkpointing makes it do, when "
            "it is no longer as narrow as this step was: leave out `torch.utils.checkpoint`, or `step_widths`."
        )
