"""Finds the groups that cannot be cut, in few trials, each of which takes a forward pass."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import TypeAlias

from lightning_spectral.nn.width.plan import ChannelGroup
from lightning_spectral.nn.width.units import Labels


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
