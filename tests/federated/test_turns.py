import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_spectral.federated.turns import deal, num_turns, predicted_work, turns

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


@given(st.integers(1, 40), st.integers(1, 9))
def test_turns_suffice_for_every_dealing_and_have_one_length(num_clients: int, num_processes: int) -> None:
    length = num_turns(num_clients, num_processes)
    assert length * num_processes >= num_clients
    work = [1000.0] + [1.0] * (num_clients - 1)
    dealt = turns(list(range(num_clients)), work, num_processes)
    assert all(len(one) == length for one in dealt)
    trained = [client_id for one in dealt for client_id in one if client_id is not None]
    assert sorted(trained) == list(range(num_clients))


@given(WORK, st.integers(2, 4))
def test_nobody_waits_for_process_0_to_begin_a_turn(work: list[float], num_processes: int) -> None:
    dealt = turns(list(range(len(work))), work, num_processes)
    begins = [
        list(itertools.accumulate([0.0 if i is None else work[i] for i in one], initial=0.0))[:-1] for one in dealt
    ]
    for other in begins[1:]:
        assert all(first <= begin + 1e-9 for first, begin in zip(begins[0], other, strict=True))


def test_a_single_process_takes_the_clients_as_they_come() -> None:
    assert turns([5, 3, 8], [1.0, 9.0, 2.0], 1) == [[5, 3, 8]]


def test_one_large_client_is_alone_if_the_others_are_small() -> None:
    assert turns([0, 1, 2, 3, 4], [1.0, 1.0, 9.0, 1.0, 1.0], 2) == [[4, 3, 1, 0], [2, None, None, None]]


@pytest.mark.parametrize(("ratio", "expected"), [(1.0, 40.0), (0.2, 24.0)])
def test_smaller_sub_models_are_less_work(ratio: float, expected: float) -> None:
    assert predicted_work(40, ratio) == pytest.approx(expected)
