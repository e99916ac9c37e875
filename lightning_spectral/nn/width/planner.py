"""Finds the channels of a module that belong together, and keeps whole those that cannot be cut."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TypeAlias

import numpy as np
import torch
from torch import nn

from lightning_spectral.arguments import as_patterns, check_matches, matches_any
from lightning_spectral.errors import check_is
from lightning_spectral.nn.plan.trace import Example, as_input, example_of
from lightning_spectral.nn.width.plan import ChannelGroup, WidthPlan
from lightning_spectral.nn.width.search import Problem, wrong_among
from lightning_spectral.nn.width.shape_rules import fixed
from lightning_spectral.nn.width.sub_model import cut_module
from lightning_spectral.nn.width.trace import Found, trace_channels
from lightning_spectral.nn.width.units import Key, Labels, Splits
from lightning_spectral.protocol.exchange import travelling_tensors
from lightning_spectral.protocol.kept_state import trying

Place: TypeAlias = tuple[str, int]  # a tensor and one of its dimensions


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
    with trying(module, device="cpu"):
        module.eval()
        return _Planner(module, as_input(module, example), _excluded(module, exclude)).plan()


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


def _excluded(module: nn.Module, patterns: Sequence[str]) -> set[str]:
    layers = dict.fromkeys(name.rpartition(".")[0] for name in travelling_tensors(module))
    check_matches("exclude", patterns, layers, "layer")
    return {n for n in travelling_tensors(module) if matches_any(n.rpartition(".")[0], patterns)}


class _Planner:
    """The search for a plan: groups that do not work are given up until all remaining ones work."""

    def __init__(self, module: nn.Module, example: Example, excluded: set[str]) -> None:
        self.module, self.example, self.excluded = module, example, excluded
        self.chosen: dict[Key, int] = {}
        self.rivals: dict[Key, tuple[int, ...]] = {}
        self.given_up: list[tuple[str, int, Labels]] = []  # a tensor, a dimension, and where along it
        self.notes: list[str] = []

    def plan(self) -> WidthPlan:
        while True:
            found = self.trace()
            plan = self.grouped(found)
            wrong = wrong_among(plan.groups, partial(self.problem, plan))
            if not wrong:
                return plan
            for group, reason in wrong:
                if not self.decide_otherwise(found, plan, group):
                    self.give_up(plan, group, reason)

    def trace(self) -> Found:
        found = Found(Splits(self.chosen))
        with trying(self.module):
            trace_channels(self.module, self.example, found)
        self.rivals = {**found.splits.rivals, **self.rivals}
        for name, dim, places in self.given_up:
            found.units.fix(found.axes[name][dim][places])
        for name in self.excluded:
            for labels in found.axes[name]:
                found.units.fix(labels)
        return found

    def grouped(self, found: Found) -> WidthPlan:
        """Group the units that are parts of the same dimensions, with the same size in each."""
        classes = {name: tuple(map(found.units.find, axes)) for name, axes in found.axes.items()}
        parameters = {name for name, _ in self.module.named_parameters()}
        groups: list[ChannelGroup] = []
        new_label = np.zeros(
            1 + max((int(c.max(initial=0)) for dims in classes.values() for c in dims), default=0), int
        )
        for places, members in _by_places(classes).items():
            if len(members) < 2 or not any(name in parameters for (name, _), _ in places):
                continue
            first = 1 + sum(group.num_units for group in groups)
            new_label[members] = np.arange(first, first + len(members))
            groups.append(_group(places, len(members), first, groups))
        labels = {name: tuple(new_label[own] for own in dims) for name, dims in classes.items()}
        cut = {name: dims for name, dims in labels.items() if any(own.any() for own in dims)}
        whole = [name for name, p in self.module.named_parameters() if p.requires_grad and name not in cut]
        notes = list(self.notes)
        if found.unknown:
            operations = ", ".join(sorted(found.unknown))
            notes.append(f"channels that go through {operations} are held whole: no rule says which belong together")
        shapes = {name: tuple(map(len, dims)) for name, dims in cut.items()}
        return WidthPlan(tuple(groups), cut, shapes, tuple(whole), tuple(notes), found.splits.taken)

    def problem(self, plan: WidthPlan, groups: Sequence[ChannelGroup]) -> Problem | None:
        """The problem if one unit of each of some groups is cut off.

        Code that counts channels on its own may well be able to divide half of them, but hardly all but one.
        """
        kept = {group.name: torch.arange(group.num_units - (group in groups)) for group in plan.groups}
        return problem_of(self.module, self.example, plan, kept)

    def decide_otherwise(self, found: Found, plan: WidthPlan, group: ChannelGroup) -> bool:
        """Whether there is another choice where the group's channels are split."""
        places = _places(plan, group)
        own = np.concatenate([found.units.find(found.axes[name][dim][where]) for name, dim, where in places])
        touched = [key for key, labels in found.splits.labels.items() if np.isin(found.units.find(labels), own).any()]
        others = [key for key in touched if found.splits.taken[key] in self.rivals.get(key, ())[:-1]]
        for key in others:
            self.chosen[key] = self.rivals[key][self.rivals[key].index(found.splits.taken[key]) + 1]
        return bool(others)

    def give_up(self, plan: WidthPlan, group: ChannelGroup, reason: str) -> None:
        self.given_up += _places(plan, group)
        self.notes.append(f"{group.name}: {group.num_units} channels are held whole: {reason}")


def problem_of(
    module: nn.Module, example: Example, plan: WidthPlan, kept: Mapping[str, torch.Tensor]
) -> Problem | None:
    """The problem with a module, in evaluation mode, that keeps only some units of each group; ``None`` if it works."""
    indices = plan.indices(kept)
    known = {
        name: tuple(labels[index.numpy()] for labels, index in zip(plan.labels[name], where, strict=True))
        for name, where in indices.items()
    }
    found = Found(Splits(plan.splits))
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


def _by_places(classes: Mapping[str, Sequence[Labels]]) -> dict[tuple[tuple[Place, int], ...], list[int]]:
    """Classes of labels, except the fixed one, by where they occur and how often."""
    places: dict[int, list[tuple[Place, int]]] = defaultdict(list)
    for name, dims in classes.items():
        for dim, own in enumerate(dims):
            for label, count in zip(*(part.tolist() for part in np.unique(own, return_counts=True)), strict=True):
                places[label].append(((name, dim), count))
    groups = defaultdict(list)
    for label in sorted(places):
        if label:
            groups[tuple(places[label])].append(label)
    return groups


def _group(
    places: Sequence[tuple[Place, int]], num_units: int, first: int, before: Sequence[ChannelGroup]
) -> ChannelGroup:
    tensors: dict[str, tuple[int, ...]] = {}
    for (name, dim), _ in places:
        tensors[name] = (*tensors.get(name, ()), dim)
    layer = next(iter(tensors)).rpartition(".")[0]
    namesakes = sum(group.name.partition("#")[0] == layer for group in before)
    return ChannelGroup(f"{layer}#{namesakes + 1}" if namesakes else layer, num_units, first, tensors)


def _places(plan: WidthPlan, group: ChannelGroup) -> list[tuple[str, int, Labels]]:
    """Where a group's channels are: tensor, dimension, places along it."""
    last = group.first_label + group.num_units
    return [
        (name, dim, np.flatnonzero((plan.labels[name][dim] >= group.first_label) & (plan.labels[name][dim] < last)))
        for name, dims in group.tensors.items()
        for dim in dims
    ]
