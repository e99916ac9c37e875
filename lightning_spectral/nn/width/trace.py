"""The labels of a network's channels, found in one forward pass."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_spectral.nn.plan.trace import Example, run_example
from lightning_spectral.nn.width.rules import pieces, rule_for
from lightning_spectral.nn.width.shape_rules import Axes, Call, Pass, Rule, fixed, tensors_of, unknown
from lightning_spectral.nn.width.units import Splits, Units


@dataclass
class Found:
    """What a pass shows about the channels of a module; what it showed so far, if it failed."""

    splits: Splits
    units: Units = field(default_factory=Units)
    axes: Mapping[str, Axes] = field(default_factory=dict)  # of each parameter and buffer
    unknown: set[str] = field(default_factory=set)  # operations without a rule
    made: list[Axes] = field(default_factory=list)  # the labels of each tensor that the pass made, in order


def trace_channels(module: nn.Module, example: Example, found: Found, known: Mapping[str, Axes] | None = None) -> None:
    """Find the channels of a module that belong together, in one forward pass, and add what is found to ``found``.

    The module is on the CPU and in evaluation mode. Its parameters and buffers have ``known`` labels; by
    default each channel has its own.
    """
    own = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    labelling = _Labelling(found)
    found.axes = {name: found.units.own_labels(tensor.shape, (known or {}).get(name)) for name, tensor in own.items()}
    for name, tensor in own.items():
        labelling.put(tensor, found.axes[name])
    for layer in module.modules():
        if isinstance(layer, nn.MultiheadAttention):
            _tie_attention(layer, labelling.traced)
    with labelling:
        outputs = run_example(module, example)
    for tensor in tree_leaves(outputs):
        if isinstance(tensor, Tensor):
            labelling.traced.fix(*labelling.axes(tensor))


def _tie_attention(layer: nn.MultiheadAttention, traced: Pass) -> None:
    """Unite the inner and outer channels of torch's attention, which have the same width."""
    if layer.in_proj_weight is None:  # inputs have different widths
        for weight in (layer.q_proj_weight, layer.k_proj_weight, layer.v_proj_weight):
            traced.fix(*traced.axes(weight))
        return
    rows, columns = traced.axes(layer.in_proj_weight)
    traced.units.unite(rows.reshape(3, -1), columns)
    traced.unite(*traced.axes(layer.out_proj.weight))


class _Operation(NamedTuple):
    """An operation of torch: its name without namespace and overload, the names of its arguments, and its rule."""

    name: str
    arguments: tuple[str, ...]
    rule: Rule


@cache
def _operation(func: Any) -> _Operation:
    name = func._schema.name.partition("::")[2]
    arguments = tuple(argument.name for argument in func._schema.arguments)
    return _Operation(name, arguments, rule_for(name, torch.Tag.pointwise in func.tags))


class _Labelling(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Runs each operation and labels its outputs."""

    def __init__(self, found: Found) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found = found
        self.traced = Pass(found.units, found.splits, self.axes)
        self._axes: dict[int, Axes] = {}
        self._alive: list[Tensor] = []  # so that no two tensors of the pass have the same id

    def axes(self, tensor: Tensor) -> Axes:
        return self._axes[id(tensor)] if id(tensor) in self._axes else fixed(tensor.shape)

    def put(self, tensor: Tensor, axes: Axes) -> None:
        self._axes[id(tensor)] = axes
        self._alive.append(tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        operation = _operation(func)
        call = {**dict(zip(operation.arguments, args, strict=False)), **(kwargs or {})}
        if tensors_of(call):
            outs = [tensor for tensor in tree_leaves(out) if isinstance(tensor, Tensor)]
            self._label(operation.name, operation.rule, call, outs)
        return out

    def _label(self, name: str, rule: Rule, call: Call, outs: list[Tensor]) -> None:
        for place, (out, own) in enumerate(zip(outs, pieces(name, call, outs), strict=True)):
            axes = self._followed(rule, own, out)
            if axes is None and not place:
                self._note(name, call)
                rule, axes = unknown, unknown(self.traced, own, out)
            self.found.made.append(fixed(out.shape) if axes is None else axes)
            self.put(out, self.found.made[-1])

    def _followed(self, rule: Rule, call: Call, out: Tensor) -> Axes | None:
        """The labels of an output by a rule; ``None`` if it does not apply, as to the indices of a maximum."""
        if rule is unknown:
            return None
        try:
            axes = rule(self.traced, call, out)
        except (KeyError, IndexError, TypeError, ValueError):  # called in a way that the rule does not know
            return None
        return axes if tuple(map(len, axes)) == tuple(out.shape) else None

    def _note(self, name: str, call: Call) -> None:
        tensors = [value for value in tree_leaves(call) if isinstance(value, Tensor)]
        if any(self.found.units.find(labels).any() for value in tensors for labels in self.axes(value)):
            self.found.unknown.add(name)
