import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_spectral.protocol.work_unit import WorkUnit
from lightning_spectral.server.scheduling import deal, num_slots, predicted_work, schedule

WORK = st.lists(st.floats(0.0, 1000.0), min_size=1, max_size=20)


def makespan(work: list[float], dealt: list[list[int]]) -> float:
    return max(sum(work[i] for i in share) for share in dealt)


def scheduled(client_ids: list[int], work: list[float], num_processes: int) -> list[list[int | None]]:
    """The schedule, by client id."""
    slots = schedule([WorkUnit(client_id) for client_id in client_ids], work, num_processes)
    return [[None if unit is None else unit.client_id for unit in process] for process in slots]


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


@given(st.integers(1, 40), st.integers(1, 9))
def test_every_unit_has_one_slot_and_all_processes_as_many(num_clients: int, num_processes: int) -> None:
    length = num_slots(num_clients, num_processes)
    assert length * num_processes >= num_clients
    work = [1000.0] + [1.0] * (num_clients - 1)
    dealt = scheduled(list(range(num_clients)), work, num_processes)
    assert all(len(one) == length for one in dealt)
    trained = [client_id for one in dealt for client_id in one if client_id is not None]
    assert sorted(trained) == list(range(num_clients))


def seconds_of(dealt: list[list[int | None]], work: list[float]) -> float:
    """The duration of a round in which all processes wait for each other after each slot."""
    return sum(max(0.0 if i is None else work[i] for i in row) for row in zip(*dealt, strict=True))


@given(WORK, st.integers(2, 4))
def test_a_round_is_at_most_its_unevenness_longer_than_an_even_share(work: list[float], num_processes: int) -> None:
    dealt = scheduled(list(range(len(work))), work, num_processes)
    shortest = 0.0 if any(None in one for one in dealt) else min(work)
    longer = seconds_of(dealt, work) - sum(work) / num_processes
    assert longer <= (num_processes - 1) / num_processes * (max(work) - shortest) + 1e-9 * sum(work)


@given(st.lists(st.integers(1, 20), min_size=4, max_size=6))
def test_no_other_schedule_is_shorter(work: list[int]) -> None:
    lengths = [float(w) for w in work]
    ours = seconds_of(scheduled(list(range(len(work))), lengths, 2), lengths)
    padded = [*range(len(work)), *[None] * (len(work) % 2)]
    others = (seconds_of([list(order[::2]), list(order[1::2])], lengths) for order in itertools.permutations(padded))
    assert ours == min(others)


def test_a_single_process_takes_the_units_in_the_given_order() -> None:
    assert scheduled([5, 3, 8], [1.0, 9.0, 2.0], 1) == [[5, 3, 8]]


def test_units_of_similar_size_share_a_slot() -> None:
    assert scheduled([0, 1, 2, 3, 4], [1.0, 8.0, 9.0, 2.0, 3.0], 2) == [[2, 4, 0], [1, 3, None]]


@given(st.lists(st.integers(0, 3), min_size=1, max_size=20), st.integers(2, 4))
def test_equal_units_keep_their_order(work: list[int], num_processes: int) -> None:
    rows = zip(*scheduled(list(range(len(work))), [float(w) for w in work], num_processes), strict=True)
    in_order = [i for i in itertools.chain(*rows) if i is not None]
    assert in_order == [i for size in (3, 2, 1, 0) for i in range(len(work)) if work[i] == size]


def test_a_schedule_holds_the_units_themselves() -> None:
    one, two = WorkUnit(4, "words", 80.0), WorkUnit(4, "images", 20.0)
    assert schedule([one, two], [1.0, 2.0], num_processes=3) == [[two], [one], [None]]


@pytest.mark.parametrize(("ratio", "expected"), [(1.0, 40.0), (0.2, 24.0)])
def test_smaller_sub_models_are_less_work(ratio: float, expected: float) -> None:
    assert predicted_work(40, ratio) == pytest.approx(expected)
