"""Which channels of a module belong together, and the module without some: as a sub-model, or for single steps."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.utils.hooks import RemovableHandle

from lightning_spectral.client.kept_state import KeptState
from lightning_spectral.functional.spectra import num_terms_for
from lightning_spectral.nn.width.rules import Key, Labels, is_depthwise, loses_groups
from lightning_spectral.protocol.exchange import travelling_tensors
from lightning_spectral.tables import Block, Tabular

LISTED = 6  # names in a line of the table


@dataclass(frozen=True)
class ChannelGroup:
    """A group of channels that can be removed one by one, each with everything that belongs to it.

    Attributes:
        name: Name of the first layer that has them.
        num_units: Number of channels in the group.
        first_label: Label of the first channel; the others follow.
        tensors: For each parameter or buffer that is cut, the dimensions along which it is cut.
    """

    name: str
    num_units: int
    first_label: int
    tensors: Mapping[str, tuple[int, ...]]

    @property
    def layers(self) -> tuple[str, ...]:
        """Names of the layers that are cut."""
        return tuple(dict.fromkeys(name.rpartition(".")[0] for name in self.tensors))

    def holds(self, labels: Labels) -> bool:
        return bool(((labels >= self.first_label) & (labels < self.first_label + self.num_units)).any())

    def num_kept(self, keep_ratio: float) -> int:
        """Number of units that a client with keep ratio r holds: ceil(r N)."""
        return num_terms_for(self.num_units, keep_ratio)


@dataclass(frozen=True, eq=False)
class WidthPlan(Tabular):
    """A plan of how a module can be cut by width; ``print`` shows it as a table.

    Attributes:
        groups: The groups of channels that can be cut, in order of registration.
        labels: For each tensor that is cut, the labels along each of its dimensions: 0 for entries that stay, otherwise
            the label of a unit.
        shapes: The whole shape of each of these tensors.
        whole: Names of the trainable parameters that are held whole.
        notes: Reasons why channels that might have been cut are held whole.
        splits: Where a dimension of channels becomes several in the forward pass, the dimension that is cut.
    """

    groups: tuple[ChannelGroup, ...]
    labels: Mapping[str, tuple[Labels, ...]]
    shapes: Mapping[str, tuple[int, ...]]
    whole: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    splits: Mapping[Key, int] = field(default_factory=dict)

    @cached_property
    def num_labels(self) -> int:
        """Number of labels, including the label of entries that stay."""
        return 1 + sum(group.num_units for group in self.groups)

    def indices(self, kept: Mapping[str, Any]) -> dict[str, tuple[Tensor, ...]]:
        """The indices that stay along each dimension of each tensor that is cut, ascending.

        ``kept`` has, for each group by name, the units that stay, shape ``(n,)``: an array, or a tensor on the CPU.

        Example:
            >>> from torch import nn
            >>> from lightning_spectral.nn.width.planner import width_plan
            >>> plan = width_plan(nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1)), torch.zeros(1, 2))
            >>> plan.indices({"0": torch.tensor([0, 2])})["2.weight"]
            (tensor([0]), tensor([0, 2]))
        """
        stays = np.zeros(self.num_labels, bool)  # with numpy: indices have values where tensors have none
        stays[0] = True
        for group in self.groups:
            stays[group.first_label + np.asarray(kept[group.name])] = True
        found = {name: map(np.flatnonzero, (stays[dim] for dim in dims)) for name, dims in self.labels.items()}
        return {name: tuple(map(torch.from_numpy, dims)) for name, dims in found.items()}

    def first(self, keep_ratio: float) -> dict[str, NDArray[np.int64]]:
        """The first units of each group, as many as a client with this keep ratio holds."""
        return {group.name: np.arange(group.num_kept(keep_ratio)) for group in self.groups}

    def num_parameters(self, module: nn.Module, keep_ratio: float) -> int:
        """Number of parameters of a sub-model of ``module``."""
        indices = self.indices(self.first(keep_ratio))
        sizes = {name: math.prod(map(len, dims)) for name, dims in indices.items()}
        return sum(sizes.get(name, parameter.numel()) for name, parameter in module.named_parameters())

    def check_module(self, module: nn.Module) -> None:
        """Raise ``ValueError`` if this is the plan of another module."""
        shapes = {name: tuple(tensor.shape) for name, tensor in travelling_tensors(module).items()}
        for name, shape in self.shapes.items():
            if shapes.get(name) != shape:
                raise ValueError(
                    f"`plan` is the plan of another module: there {name} is {shape}, here {shapes.get(name)}. Make one "
                    "of this module with `width_plan`."
                )

    def positions(self, kept: Mapping[str, Any]) -> dict[str, Tensor]:
        """Positions of each small tensor's entries in the flattened whole one; tensors that stay whole are left out."""
        found = {}
        for name, dims in self.indices(kept).items():
            if tuple(map(len, dims)) != self.shapes[name]:
                found[name] = torch.zeros((), dtype=torch.int64)
                for index, size in zip(dims, self.shapes[name], strict=True):
                    found[name] = found[name][..., None] * size + index
        return found

    def _blocks(self) -> list[Block]:
        rows = [(group.name or "-", str(group.num_units), _listed(group.layers)) for group in self.groups]
        below = [*([f"held whole: {_listed(self.whole)}"] if self.whole else []), *self.notes]
        return [[("group", "channels", "layers"), *rows], *(["\n".join(below)] if below else [])]


def _listed(names: Sequence[str]) -> str:
    shown = [name or "(the module itself)" for name in names[:LISTED]]
    return ", ".join([*shown, f"{len(names) - LISTED} more"] if len(names) > LISTED else shown)


@torch.no_grad()
def cut_module(module: nn.Module, indices: Mapping[str, Sequence[Tensor]]) -> None:
    """Cut parameters and buffers of a module to the indices that stay, and update the sizes that its layers store."""
    own = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    small: dict[int, Tensor] = {}
    for name, where in indices.items():
        left = take(own[name].detach(), where).clone()
        is_parameter = isinstance(own[name], nn.Parameter)
        small[id(own[name])] = nn.Parameter(left, own[name].requires_grad) if is_parameter else left
    before = {layer: dict(vars(layer)) for layer in module.modules()}
    for tensors, new in replacements(module, small):
        tensors.update(new)
    for layer, sizes in before.items():  # an attention reads the weight of another
        _resize(layer, sizes)


def cut_to(module: nn.Module, plan: WidthPlan, keep_ratio: float) -> None:
    """Cut a module to the first channels of each group."""
    cut_module(module, plan.indices(plan.first(keep_ratio)))


def replacements(module: nn.Module, small: Mapping[int, Tensor]) -> Iterator[tuple[dict[str, Any], dict[str, Tensor]]]:
    """For each layer, the dictionaries of its tensors, each with the new tensors that replace some of them.

    ``small`` has new tensors by the identity of the old one, which may occur in several places.
    """
    for layer in module.modules():
        owned: list[dict[str, Any]] = [layer._parameters, layer._buffers]
        for own in owned:
            yield own, {name: small[id(tensor)] for name, tensor in own.items() if id(tensor) in small}


def take(tensor: Tensor, indices: Sequence[Tensor]) -> Tensor:
    """The part of a tensor at the given indices of each dimension."""
    for dim, index in enumerate(indices):
        if len(index) < tensor.shape[dim]:
            tensor = tensor.index_select(dim, index.to(tensor.device))
    return tensor


def cut_outputs(module: nn.Module, plan: WidthPlan) -> tuple[str, ...]:
    """Names of the linear layers and convolutions with outputs that can be cut."""
    found = []
    for name, layer in module.named_modules():
        is_transposed = (isinstance(layer, _ConvNd) and layer.transposed) or _is_transformers_linear(layer)
        labels = plan.labels.get(f"{name}.weight" if name else "weight")
        is_affine = isinstance(layer, nn.Linear | _ConvNd) or _is_transformers_linear(layer)
        if is_affine and labels is not None and labels[int(is_transposed)].any():
            found.append(name)
    return tuple(found)


def _is_transformers_linear(layer: nn.Module) -> bool:
    return type(layer).__name__ == "Conv1D" and hasattr(layer, "nf")


def _resize(layer: Any, before: Mapping[str, Any]) -> None:
    """Update the sizes that a layer stores to those of its weights, from its attributes ``before``."""
    weight = getattr(layer, "weight", None)
    if isinstance(layer, nn.MultiheadAttention) and layer.in_proj_weight is not None:
        layer.embed_dim = layer.kdim = layer.vdim = len(layer.out_proj.weight)
        layer.head_dim = layer.embed_dim // layer.num_heads
    elif not isinstance(weight, Tensor):
        return
    elif isinstance(layer, nn.Linear):
        layer.out_features, layer.in_features = weight.shape
    elif isinstance(layer, _ConvNd):
        (first, second), groups = weight.shape[:2], before["groups"]
        if groups > 1 and is_depthwise(groups, before["in_channels"]):
            layer.groups = first if layer.transposed else first * groups // layer.out_channels
        inner, outer = (first, second * layer.groups) if layer.transposed else (second * layer.groups, first)
        layer.in_channels, layer.out_channels = inner, outer
    elif isinstance(layer, nn.GroupNorm):
        if loses_groups(before["num_groups"], before["num_channels"]):
            layer.num_groups = len(weight) * layer.num_groups // layer.num_channels
        layer.num_channels = len(weight)
    elif isinstance(layer, nn.modules.batchnorm._NormBase):
        layer.num_features = len(weight)
    elif isinstance(layer, nn.LayerNorm | nn.RMSNorm):
        layer.normalized_shape = tuple(weight.shape)
    elif isinstance(layer, nn.Embedding):
        layer.embedding_dim = weight.shape[1]
    elif _is_transformers_linear(layer):
        layer.nf = weight.shape[1]


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
            sizes = ((vars(self._client.get_submodule(name)), new) for name, new in narrow.sizes.items())
            for own, new in chain(replacements(self._client, self._parts(narrow)), sizes):
                self._before.append((own, {name: own[name] for name in new}))
                own.update(new)

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
