"""Finds the channels of a module that belong together, and keeps whole those that cannot be cut."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import takewhile
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_spectral.arguments import as_patterns, check_matches, matches_any
from lightning_spectral.errors import check_is
from lightning_spectral.nn.trace import Example, as_input, example_of, run_example
from lightning_spectral.nn.width.plan import ChannelGroup, WidthPlan, cut_module
from lightning_spectral.nn.width.rules import Axes, Call, Pass, Rule, fixed, pieces, rule_for, tensors_of, unknown
from lightning_spectral.nn.width.units import Key, Labels, Splits, Units
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


@dataclass(frozen=True)
class Problem:
    """The problem with a module that has lost some channels."""

    reason: str  # for the user
    place: int  # how far the forward pass came: the number of tensors that it made
    trail: Sequence[Labels]  # labels of channels that may be at fault, the likeliest first

    def named(self, groups: Iterable[ChannelGroup]) -> list[ChannelGroup]:
        for labels in self.trail:
            if found := [group for group in groups if group.holds(labels)]:
                return found
        return []


Trial: TypeAlias = Callable[[Sequence[ChannelGroup]], "Problem | None"]  # cuts some groups


def wrong_among(groups: Sequence[ChannelGroup], trial: Trial) -> list[tuple[ChannelGroup, str]]:
    """The groups that cannot be cut together with those before them, and why; ``trial`` cuts some.

    What is wrong with a group does not go away when more groups are cut.
    """
    search = _Search(trial)
    search.run(groups)
    return search.wrong


class _Search:
    """Leaves out the groups that problems name until the others can be cut, then tests each of those left out."""

    def __init__(self, trial: Trial) -> None:
        self.fine: list[ChannelGroup] = []
        self.wrong: list[tuple[ChannelGroup, str]] = []
        self._trial = trial
        self._named: set[str] = set()  # groups that a problem named

    def run(self, groups: Sequence[ChannelGroup]) -> None:
        rest, with_namesakes = groups, True
        while rest:
            suspects = self._suspects(rest, with_namesakes)
            if suspects is None:
                self._halve(rest)
                return
            rest = self._judged(rest, suspects)
            with_namesakes = False  # a suspect was fine

    def _suspects(self, groups: Sequence[ChannelGroup], with_namesakes: bool) -> set[str] | None:
        """Names of groups without which the others can be cut; ``None`` if the problems name the wrong ones.

        With namesakes, groups are suspected together with those at the same place of other blocks.
        """
        suspects, place = set(self._named), -1
        while left := [group for group in groups if group.name not in suspects]:
            problem = self._trial([*self.fine, *left])
            if problem is None:
                break
            named = problem.named(left)
            if not named or problem.place <= place:  # without those that were named, it is the same problem
                return None
            place = problem.place
            self._named |= {group.name for group in named}
            kinds = {_kind(group) for group in named}
            suspects |= self._named | {group.name for group in left if with_namesakes and _kind(group) in kinds}
        before = list(takewhile(lambda group: group.name not in suspects, groups))
        is_tested = not before or len(before) == len(groups)
        return suspects if is_tested or self._trial([*self.fine, *before]) is None else None

    def _judged(self, groups: Sequence[ChannelGroup], suspects: set[str]) -> Sequence[ChannelGroup]:
        """Test each suspect, up to the first that can be cut; returns the groups after it."""
        for place, group in enumerate(groups):
            problem = self._trial([*self.fine, group]) if group.name in suspects else None
            if problem is not None:
                self.wrong.append((group, problem.reason))
                continue
            self.fine.append(group)
            if group.name in suspects:
                return groups[place + 1 :]
        return ()

    def _halve(self, groups: Sequence[ChannelGroup], problem: Problem | None = None) -> bool:
        """Test neighbouring groups by halving, for problems that do not show where they come from.

        Returns whether all of them can be cut; ``problem`` is that of all of them, where it is known.
        """
        problem = problem or self._trial([*self.fine, *groups])
        if problem is None:
            self.fine += groups
        elif len(groups) == 1:
            self.wrong.append((groups[0], problem.reason))
        else:
            middle = len(groups) // 2
            is_fine = self._halve(groups[:middle])
            self._halve(groups[middle:], problem if is_fine else None)
        return problem is None


def _kind(group: ChannelGroup) -> str:
    """The name of a group without numbers, which it shares with those at the same place of other blocks."""
    return re.sub(r"\d+", "*", group.name)


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
