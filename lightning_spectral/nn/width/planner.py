"""Finds the channels of a module that belong together, and keeps whole those that cannot be cut."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from itertools import chain, takewhile
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_spectral.arguments import as_patterns, check_matches, matches_any
from lightning_spectral.client.kept_state import trying
from lightning_spectral.errors import check_is
from lightning_spectral.functional.checks import all_names
from lightning_spectral.nn.trace import Example, as_input, example_of, run_example
from lightning_spectral.nn.width.plan import ChannelGroup, WidthPlan, cut_module
from lightning_spectral.nn.width.rules import (
    FIXED,
    Axes,
    Key,
    Labels,
    Pass,
    Splits,
    fixed,
    labels_of,
    pieces,
    tensors_of,
    unknown,
)
from lightning_spectral.protocol.exchange import travelling_tensors


def width_plan(module: nn.Module, example_input: Example = None, exclude: Sequence[str] = ()) -> WidthPlan:
    """Find the channels of a module that can be cut, and what is cut along with each of them.

    The operations of a traced forward pass show which channels belong together: those of a residual sum, the inputs of
    a layer and the outputs that it reads, or the same places in each attention head. Each group is then tested: without
    one of its channels, the module has to run and to combine the same channels as the whole module does. Groups that
    fail are held whole, for example channels that the module's own code counts.

    Args:
        module: The user's module; it is only read.
        example_input: One input, a tuple of them, or a dictionary of keyword arguments, with two examples or more;
            ``None`` for the module's ``example_input_array``.
        exclude: Patterns of layers that are not cut at all.

    Example:
        >>> print(width_plan(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), torch.zeros(2, 4)))
        group  channels  layers
        0      8         0, 2
        <BLANKLINE>
        held whole: 2.bias
    """
    check_is("module", module, nn.Module)
    exclude = as_patterns("exclude", exclude)
    example = example_of(module) if example_input is None else example_input
    if example is None:
        raise ValueError(
            f"To find which channels of {type(module).__name__} belong together, a forward pass is traced: set its "
            "`example_input_array`, e.g. to a batch of two examples."
        )
    known = all_names(module)
    layers_of = {name: [one.rpartition(".")[0] for one in known[name]] for name in travelling_tensors(module)}
    check_matches("exclude", exclude, dict.fromkeys(chain.from_iterable(layers_of.values())), "layer")
    excluded = {name for name, layers in layers_of.items() if any(matches_any(layer, exclude) for layer in layers)}
    chosen: dict[Key, int] = {}
    rivals: dict[Key, tuple[int, ...]] = {}
    given_up: list[tuple[str, int, Labels]] = []  # a tensor, a dimension, and where along it
    notes: list[str] = []
    with trying(module, device="cpu"):
        module.eval()
        example = as_input(module, example)
        while True:  # groups that do not work are given up until all that are left work
            found = Pass(Splits(chosen))
            with trying(module):
                trace_channels(module, example, found)
            rivals = {**found.splits.rivals, **rivals}
            for name, dim, places in given_up:
                found.units.fix(found.named[name][dim][places])
            for name in excluded:
                for labels in found.named[name]:
                    found.units.fix(labels)
            plan = _grouped(module, found, notes)
            wrong = wrong_among(plan.groups, partial(_problem_without_one, module, example, plan))
            if not wrong:
                return plan
            for group, reason in wrong:
                last = group.first_label + group.num_units
                where = [
                    (name, dim, np.flatnonzero((own[dim] >= group.first_label) & (own[dim] < last)))
                    for name, dims in group.tensors.items()
                    for own in [plan.labels[name]]
                    for dim in dims
                ]
                own = np.concatenate([found.units.find(found.named[name][dim][places]) for name, dim, places in where])
                splits = found.splits
                touched = [key for key, labels in splits.labels.items() if np.isin(found.units.find(labels), own).any()]
                others = [key for key in touched if splits.taken[key] in rivals.get(key, ())[:-1]]
                for key in others:  # another choice where the group's channels are split
                    chosen[key] = rivals[key][rivals[key].index(splits.taken[key]) + 1]
                if not others:
                    given_up += where
                    notes.append(f"{group.name}: {group.num_units} channels are held whole: {reason}")


def _problem_without_one(
    module: nn.Module, example: Example, plan: WidthPlan, groups: Sequence[ChannelGroup]
) -> Problem | None:
    """The problem if one unit of each of some groups is cut off.

    Code that counts channels on its own may well be able to divide half of them, but hardly all but one.
    """
    kept = {group.name: torch.arange(group.num_units - (group in groups)) for group in plan.groups}
    return problem_of(module, example, plan, kept)


def check_cut(module: nn.Module, plan: WidthPlan, keep_ratio: float) -> None:
    """Raise ``ValueError`` if the sub-models of a keep ratio do not work; without an example nothing is tested."""
    if (example := example_of(module)) is None:
        return
    with trying(module, device="cpu"):
        module.eval()
        problem = problem_of(module, as_input(module, example), plan, plan.first(keep_ratio))
    if problem:
        raise ValueError(
            f"A sub-model of {type(module).__name__} with `keep_ratio={keep_ratio:g}` does not work: {problem.reason}. "
            "Leave layers out of the cut with `exclude`, or choose another keep ratio."
        )


@dataclass(frozen=True)
class Problem:
    """The problem with a module that has lost some channels."""

    reason: str  # for the user
    place: int  # how far the forward pass came: the number of tensors that it made
    trail: Sequence[Labels]  # labels of channels that may be at fault, the likeliest first


def problem_of(module: nn.Module, example: Example, plan: WidthPlan, kept: Mapping[str, Any]) -> Problem | None:
    """The problem with a module, in evaluation mode, that keeps only some units of each group; ``None`` if it works."""
    indices = plan.indices(kept)
    known = {
        name: tuple(labels[index.numpy()] for labels, index in zip(plan.labels[name], where, strict=True))
        for name, where in indices.items()
    }
    found = Pass(Splits(plan.splits))
    try:
        with trying(module):
            cut_module(module, indices)
            whole = {name: fixed(t.shape) for name, t in travelling_tensors(module).items() if name not in known}
            trace_channels(module, example, found, {**known, **whole})
    except Exception as error:  # from the user's own code, which may count channels in its own way
        said = "".join(f": {line}" for line in str(error).splitlines()[:1])  # a bare `assert` says nothing
        reason = f"the module does not run without some channels: {type(error).__name__}{said}"
        return Problem(reason, len(found.made), [np.concatenate(axes) for axes in reversed(found.made) if axes])
    if not (united := found.units.united).size:
        return None
    return Problem("without some channels, the others are not where they were", len(found.made), [united])


def _grouped(module: nn.Module, found: Pass, notes: Sequence[str]) -> WidthPlan:
    """Group the units that are parts of the same dimensions, with the same size in each."""
    classes = {name: tuple(map(found.units.find, axes)) for name, axes in found.named.items()}
    occurs: dict[int, list[tuple[str, int, int]]] = defaultdict(list)  # each class in which tensor and dimension
    for name, dims in classes.items():
        for dim, own in enumerate(dims):
            for label, count in zip(*(part.tolist() for part in np.unique(own, return_counts=True)), strict=True):
                occurs[label].append((name, dim, count))
    together = defaultdict(list)
    for label in sorted(occurs.keys() - {FIXED}):
        together[tuple(occurs[label])].append(label)
    parameters = dict(module.named_parameters())
    groups: list[ChannelGroup] = []
    new_label, first = np.zeros(1 + max(occurs, default=0), int), 1
    for places, members in together.items():
        if len(members) < 2 or not any(name in parameters for name, *_ in places):
            continue
        new_label[members] = np.arange(first, first + len(members))
        tensors: dict[str, tuple[int, ...]] = {}
        for name, dim, _ in places:
            tensors[name] = (*tensors.get(name, ()), dim)
        layer = next(iter(tensors)).rpartition(".")[0]
        namesakes = sum(group.name.partition("#")[0] == layer for group in groups)
        title = f"{layer}#{namesakes + 1}" if namesakes else layer
        groups.append(ChannelGroup(title, len(members), first, tensors))
        first += len(members)
    labels = {name: tuple(new_label[own] for own in dims) for name, dims in classes.items()}
    cut = {name: dims for name, dims in labels.items() if any(own.any() for own in dims)}
    whole = [name for name, p in parameters.items() if p.requires_grad and name not in cut]
    if found.unknown:
        operations = ", ".join(sorted(found.unknown))
        notes = [*notes, f"channels that go through {operations} are held whole: no rule says which belong together"]
    shapes = {name: tuple(map(len, dims)) for name, dims in cut.items()}
    return WidthPlan(tuple(groups), cut, shapes, tuple(whole), tuple(notes), found.splits.taken)


Trial: TypeAlias = Callable[[Sequence[ChannelGroup]], "Problem | None"]  # cuts some groups


def wrong_among(groups: Sequence[ChannelGroup], trial: Trial) -> list[tuple[ChannelGroup, str]]:
    """The groups that cannot be cut together with those before them, and why, in few trials.

    Each trial cuts some groups and takes a forward pass. What is wrong with a group does not go away when more groups
    are cut. Groups that problems name are left out until the others can be cut; then each of those left out is tested.
    """
    fine: list[ChannelGroup] = []
    wrong: list[tuple[ChannelGroup, str]] = []
    named: set[str] = set()  # groups that a problem named
    kind = {group.name: re.sub(r"\d+", "*", group.name) for group in groups}  # shared with those of other blocks

    def suspects_among(groups: Sequence[ChannelGroup], with_namesakes: bool) -> set[str] | None:
        """Names of groups without which the others can be cut; ``None`` if the problems name the wrong ones.

        With namesakes, groups are suspected together with those at the same place of other blocks.
        """
        suspects, place = set(named), -1
        while left := [group for group in groups if group.name not in suspects]:
            problem = trial([*fine, *left])
            if problem is None:
                break
            held = ([group.name for group in left if group.holds(labels)] for labels in problem.trail)
            found = next(filter(None, held), [])
            if not found or problem.place <= place:  # without those that were named, it is the same problem
                return None
            place = problem.place
            named.update(found)
            kinds = {kind[name] for name in found}
            suspects |= named | {group.name for group in left if with_namesakes and kind[group.name] in kinds}
        before = list(takewhile(lambda group: group.name not in suspects, groups))
        is_tested = not before or len(before) == len(groups)
        return suspects if is_tested or trial([*fine, *before]) is None else None

    def halve(groups: Sequence[ChannelGroup], problem: Problem | None = None) -> bool:
        """Test neighbouring groups by halving, for problems that do not show where they come from.

        Returns whether all of them can be cut; ``problem`` is that of all of them, where it is known.
        """
        problem = problem or trial([*fine, *groups])
        if problem is None:
            fine.extend(groups)
        elif len(groups) == 1:
            wrong.append((groups[0], problem.reason))
        else:
            middle = len(groups) // 2
            is_fine = halve(groups[:middle])
            halve(groups[middle:], problem if is_fine else None)
        return problem is None

    rest, with_namesakes = groups, True
    while rest:
        suspects = suspects_among(rest, with_namesakes)
        if suspects is None:
            halve(rest)
            break
        with_namesakes, tested, rest = False, rest, ()
        for place, group in enumerate(tested):  # up to the first suspect that can be cut
            problem = trial([*fine, group]) if group.name in suspects else None
            if problem is not None:
                wrong.append((group, problem.reason))
                continue
            fine.append(group)
            if group.name in suspects:
                rest = tested[place + 1 :]
                break
    return wrong


def trace_channels(module: nn.Module, example: Example, traced: Pass, known: Mapping[str, Axes] | None = None) -> None:
    """Find the channels of a module that belong together, in one forward pass, and add what is found to ``traced``.

    The module is on the CPU and in evaluation mode. Its parameters and buffers have ``known`` labels; by
    default each channel has its own.
    """
    own = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    traced.named = {name: traced.units.own_labels(t.shape, (known or {}).get(name)) for name, t in own.items()}
    for name, tensor in own.items():
        traced.put(tensor, traced.named[name])
    for layer in module.modules():
        if not isinstance(layer, nn.MultiheadAttention):
            continue
        if layer.in_proj_weight is None:  # inputs have different widths
            for weight in (layer.q_proj_weight, layer.k_proj_weight, layer.v_proj_weight):
                traced.fix(*traced.axes(weight))
        else:  # inner and outer channels of torch's attention have the same width
            rows, columns = traced.axes(layer.in_proj_weight)
            traced.units.unite(rows.reshape(3, -1), columns)
            traced.unite(*traced.axes(layer.out_proj.weight))
    with _Labelling(traced):
        outputs = run_example(module, example)
    for tensor in tree_leaves(outputs):
        if isinstance(tensor, Tensor):
            traced.fix(*traced.axes(tensor))


@cache
def _operation(func: Any) -> tuple[str, tuple[str, ...], bool]:
    """An operation's name without namespace and overload, the names of its arguments, and whether it is pointwise."""
    name = func._schema.name.partition("::")[2]
    return name, tuple(argument.name for argument in func._schema.arguments), torch.Tag.pointwise in func.tags


class _Labelling(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Runs each operation and labels its outputs."""

    def __init__(self, traced: Pass) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.traced = traced

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name, arguments, is_pointwise = _operation(func)
        call = {**dict(zip(arguments, args, strict=False)), **(kwargs or {})}
        if not tensors_of(call):
            return result
        outs, is_known = [tensor for tensor in tree_leaves(result) if isinstance(tensor, Tensor)], True
        for place, (out, own) in enumerate(zip(outs, pieces(name, call, outs), strict=True)):
            axes = None
            with suppress(KeyError, IndexError, TypeError, ValueError):  # called in a way that the rule does not know
                axes = labels_of(self.traced, name, is_pointwise, own, out) if is_known else None
            if axes is None or tuple(map(len, axes)) != tuple(out.shape):  # as for the indices of a maximum
                axes = fixed(out.shape)
                if not place:
                    is_known = False
                    given = [value for value in tree_leaves(call) if isinstance(value, Tensor)]
                    all_axes = [labels for value in given for labels in self.traced.axes(value)]
                    if any(self.traced.units.find(labels).any() for labels in all_axes):
                        self.traced.unknown.add(name)
                    axes = unknown(self.traced, own, out)
            self.traced.made.append(axes)
            self.traced.put(out, axes)
        return result
