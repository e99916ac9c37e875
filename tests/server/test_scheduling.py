import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_spectral.protocol.records import WorkUnit
from lightning_spectral.server.processes import deal, predicted_work, shares

WORK = st.lists(st.floats(0.0, 1000.0), min_size=1, max_size=20)


def makespan(work: list[float], dealt: list[list[int]]) -> float:
    return max(sum(work[i] for i in share) for share in dealt)


@given(WORK, st.integers(1, 5))
def test_everything_is_dealt_once(work: list[float], num_processes: int) -> None:
    dealt = deal(work, num_processes)
    assert len(dealt) == num_processes
    assert sorted(itertools.chain(*dealt)) == list(range(len(work)))


@given(st.lists(st.integers(1, 20), min_size=1, max_size=7), st.integers(2, 3))
def test_the_last_process_is_at_most_a_third_later_than_in_the_best_of_all_dealings(
    work: list[int], num_processes: int
) -> None:
    assignments = itertools.product(range(num_processes), repeat=len(work))
    best = min(
        max(sum(w for w, p in zip(work, a, strict=True) if p == q) for q in range(num_processes)) for a in assignments
    )
    bound = 4 / 3 - 1 / (3 * num_processes)
    assert makespan([float(w) for w in work], deal(work, num_processes)) <= bound * best + 1e-9


def test_equal_pieces_are_dealt_by_index() -> None:
    assert deal([1.0, 2.0, 2.0, 2.0, 1.0], num_processes=2) == [[1, 3], [2, 0, 4]]


@given(WORK, st.integers(2, 4))
def test_no_share_is_longer_than_an_even_one_by_more_than_the_longest_unit(
    work: list[float], num_processes: int
) -> None:
    dealt = shares([WorkUnit(index) for index in range(len(work))], work, num_processes)
    longest = max(sum(work[unit.client_id] for unit in share) for share in dealt)
    bound = sum(work) / num_processes + (num_processes - 1) / num_processes * max(work)
    assert longest <= bound + 1e-9 * sum(work)


def test_a_single_process_takes_the_units_in_the_given_order() -> None:
    units = [WorkUnit(5), WorkUnit(3), WorkUnit(8)]
    assert shares(units, [], num_processes=1) == [units]


def test_shares_hold_the_units_themselves() -> None:
    one, two = WorkUnit(4, "words", 80.0), WorkUnit(4, "images", 20.0)
    assert shares([one, two], [1.0, 2.0], num_processes=3) == [[two], [one], []]


@pytest.mark.parametrize(("ratio", "expected"), [(1.0, 40.0), (0.2, 24.0)])
def test_smaller_sub_models_are_less_work(ratio: float, expected: float) -> None:
    assert predicted_work(40, ratio) == pytest.approx(expected)
