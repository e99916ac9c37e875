"""Which groups cannot be cut, and in how many trials, with trials that are made up."""

from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_spectral.nn.width.plan import ChannelGroup
from lightning_spectral.nn.width.planner import Problem, wrong_among

GROUPS = tuple(
    ChannelGroup(f"blocks.{i}.{name}", 3, 1 + 6 * i + 3 * j, {}) for i in range(8) for j, name in enumerate("ab")
)
PLACES = {group.name: place for place, group in enumerate(GROUPS)}
Fails = Callable[[set[str]], str | None]  # the name of the group at fault if some are cut


class Trials:
    """Trials that fail for a group, and name it or another one."""

    def __init__(self, fails: Fails, blamed: Callable[[int], int] = lambda place: place) -> None:
        self.fails, self.blamed, self.count = fails, blamed, 0

    def __call__(self, groups: Sequence[ChannelGroup]) -> Problem | None:
        self.count += 1
        guilty = self.fails({group.name for group in groups})
        if guilty is None:
            return None
        named = GROUPS[self.blamed(PLACES[guilty]) % len(GROUPS)]
        return Problem(guilty, PLACES[guilty], [np.array([0, named.first_label])])


def failing(guilty: set[str]) -> Fails:
    """A trial fails for the first of some groups that it cuts."""
    return lambda cut: min(cut & guilty, key=PLACES.__getitem__, default=None)


def names(found: Sequence[tuple[ChannelGroup, str]]) -> list[str]:
    return [group.name for group, _ in found]


@given(st.sets(st.sampled_from(sorted(PLACES))), st.integers(0, 15), st.integers(0, 3))
def test_exactly_the_groups_at_fault_are_found_whichever_a_problem_names(guilty: set[str], add: int, by: int) -> None:
    found = wrong_among(GROUPS, Trials(failing(guilty), lambda place: by * place + add))
    assert names(found) == sorted(guilty, key=PLACES.__getitem__)
    assert all(reason == group.name for group, reason in found)


@pytest.mark.parametrize(
    ("guilty", "most"),
    [
        (set(), 1),
        ({"blocks.5.b"}, 8),  # the same place of other blocks is suspected, too, and cleared by one trial
        ({f"blocks.{i}.b" for i in range(8)}, 11),
        (set(PLACES), 18),
    ],
)
def test_problems_that_name_the_group_at_fault_save_trials(guilty: set[str], most: int) -> None:
    trials = Trials(failing(guilty))
    assert set(names(wrong_among(GROUPS, trials))) == guilty
    assert trials.count <= most


def test_of_groups_that_fail_only_together_the_later_one_is_held_whole() -> None:
    both = {"blocks.1.a", "blocks.6.b"}
    for named in both:
        trials = Trials(lambda cut, named=named: named if both <= cut else None)
        assert names(wrong_among(GROUPS, trials)) == ["blocks.6.b"]


def test_a_group_that_can_only_be_cut_with_a_later_one_is_held_whole() -> None:
    first, last = "blocks.0.a", "blocks.7.a"

    def fails(cut: set[str]) -> str | None:
        return "blocks.3.b" if "blocks.3.b" in cut else first if first in cut and last not in cut else None

    assert names(wrong_among(GROUPS, Trials(fails))) == [first, "blocks.3.b"]
