"""A sub-model that runs some steps with only part of its channels."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lightning_spectral.nn.width.plan import WidthPlan, cut_to, replacements, take
from lightning_spectral.protocol.kept_state import KeptState


@dataclass(frozen=True)
class Narrow:
    """The part of a sub-model that remains at a smaller width."""

    indices: Mapping[str, tuple[Tensor, ...]]  # that stay along each dimension of a tensor of the sub-model
    sizes: Mapping[str, Mapping[str, Any]]  # of each layer that changes, by attribute
    buffers: Mapping[str, Tensor]  # of this width alone; they keep what steps change


def cut_for_steps(
    module: nn.Module, plan: WidthPlan, keep_ratio: float, widths: Iterable[float], own: Collection[str] = ()
) -> NarrowSteps:
    """Cut a whole module to the first channels of each group, in place, for steps that use fewer of them still.

    Sizes and buffers are found by comparing cuts of the whole module. ``widths`` are the smaller keep ratios; ``own``
    names the buffers of which each of them has its own.
    """
    smaller = {}
    for width in widths:
        kept = KeptState(module)
        try:
            cut_to(module, plan, width)
            buffers = {name: buffer.clone() for name, buffer in module.named_buffers() if name in own}
            smaller[width] = _sizes(module), buffers
        finally:
            kept.restore()
    cut_to(module, plan, keep_ratio)
    whole, before, narrow = plan.indices(plan.first(keep_ratio)), _sizes(module), {}
    for width, (after, buffers) in smaller.items():
        left = plan.indices(plan.first(width))
        indices = {name: tuple(map(torch.searchsorted, whole[name], left[name])) for name in whole}
        changed = {name: dict(after[name].items() - before[name].items()) for name in after}
        narrow[width] = Narrow(indices, {name: sizes for name, sizes in changed.items() if sizes}, buffers)
    return NarrowSteps(module, narrow)


def _sizes(module: nn.Module) -> dict[str, dict[str, Any]]:
    """All whole-number attributes of each layer: those in which two cuts of one module differ are sizes."""

    def is_size(value: object) -> bool:
        return isinstance(value, int) or (isinstance(value, tuple) and all(isinstance(item, int) for item in value))

    return {
        name: {attribute: value for attribute, value in vars(layer).items() if is_size(value)}
        for name, layer in module.named_modules()
    }


class NarrowSteps:
    """Makes a sub-model narrower and whole again, in place.

    While it is narrow, its layers hold parts of its parameters, through which gradients reach the parameters; gradients
    are zero in the entries that are not used. Layers with buffers that are cut hold copies of these, so a narrow step's
    updates of BatchNorm's averages are discarded, unless each width has its own.

    The backward pass of each client's first narrow step is watched by hooks, because layers that run again in it, as
    activation checkpointing makes them, would be whole. Steps that are not watched cost nothing.
    ``counts`` has the number of steps of the client so far at each keep ratio.
    """

    def __init__(self, client: nn.Module, narrow: Mapping[float, Narrow]) -> None:
        self._client, self._narrow = client, narrow
        self.counts: Counter[float] = Counter()
        self._before: list[tuple[dict[str, Any], dict[str, Any]]] = []
        cut = {name.rpartition(".")[0] for one in narrow.values() for name in one.indices}
        self._cut_layers = [client.get_submodule(name) for name in sorted(cut)]
        self._is_watch_due = False
        self._watches: list[RemovableHandle] = []

    @property
    def buffers(self) -> dict[float, Mapping[str, Tensor]]:
        """The buffers that belong to a smaller keep ratio alone."""
        return {keep_ratio: narrow.buffers for keep_ratio, narrow in self._narrow.items()}

    def start_client(self) -> None:
        self.counts.clear()
        self._is_watch_due = True

    def use(self, keep_ratio: float) -> None:
        """Narrow the client to this keep ratio until `restore`; the client's own keep ratio changes nothing."""
        self.end_backward()
        self._put_back()
        self.counts[keep_ratio] += 1
        if (narrow := self._narrow.get(keep_ratio)) is not None:
            for own, new in replacements(self._client, self._parts(narrow)):
                self._put(own, new)
            for name, sizes in narrow.sizes.items():
                self._put(vars(self._client.get_submodule(name)), sizes)

    def restore(self) -> None:
        """Restore the client's full width; the backward pass follows."""
        if self._before and self._is_watch_due:
            self.end_backward()
            self._watches = [layer.register_forward_pre_hook(_refuse) for layer in self._cut_layers]
            self._is_watch_due = False
        self._put_back()

    def end_backward(self) -> None:
        for watch in self._watches:
            watch.remove()
        self._watches.clear()

    def _put(self, own: dict[str, Any], new: Mapping[str, Any]) -> None:
        self._before.append((own, {name: own[name] for name in new}))
        own.update(new)

    def _put_back(self) -> None:
        for own, values in self._before:
            own.update(values)
        self._before.clear()

    def _parts(self, narrow: Narrow) -> dict[int, Tensor]:
        """Parts of parameters, and copies of parts of buffers, by the identity of the sub-model's own."""
        indices, parameters = narrow.indices, dict(self._client.named_parameters())
        parts = {id(p): take(p, indices[name]) for name, p in parameters.items() if name in indices}
        cut = {name.rpartition(".")[0] for name in indices.keys() - parameters.keys()}
        buffers = {n: b for n, b in self._client.named_buffers() if n.rpartition(".")[0] in cut}
        copies = {id(b): take(b, indices.get(name, ())).clone() for name, b in buffers.items()}
        return parts | copies | {id(self._client.get_buffer(name)): own for name, own in narrow.buffers.items()}


def _refuse(layer: nn.Module, inputs: object) -> None:
    if torch._C._current_graph_task_id() != -1:  # the user's own code may run layers in any hook
        raise RuntimeError(
            f"A {type(layer).__name__} runs again in the backward pass, as activation checkpointing makes it do, when "
            "it is no longer as narrow as this step was: leave out `torch.utils.checkpoint`, or `step_widths`."
        )
