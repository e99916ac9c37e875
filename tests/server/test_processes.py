"""Work is dealt so that processes finish together, and a process that is missing is named."""

import itertools
import threading
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import distributed as dist

from lightning_spectral.errors import LostProcessError
from lightning_spectral.protocol.records import WorkUnit
from lightning_spectral.server import processes as room
from lightning_spectral.server.processes import Meetings, deal, predicted_work, shares

CLOSED = RuntimeError("Connection closed by peer")


@pytest.fixture(autouse=True)
def store(monkeypatch: pytest.MonkeyPatch) -> Any:
    store = dist.HashStore()
    monkeypatch.setattr(room, "_store", lambda: store)
    monkeypatch.setattr(room, "PATIENCE", 0.5)
    monkeypatch.setattr(dist, "get_backend", lambda: "gloo")
    monkeypatch.setattr(dist, "destroy_process_group", lambda: None)
    return store


def fail_together(processes: list[Meetings]) -> list[Exception]:
    """Let some processes meet, and the meeting fail; return the error of each."""
    errors: dict[int, Exception] = {}
    have_arrived = threading.Barrier(len(processes))

    def fail(process: Meetings) -> None:
        try:
            with process.meeting():
                have_arrived.wait()
                raise CLOSED
        except RuntimeError as error:
            errors[process.rank] = error

    threads = [threading.Thread(target=fail, args=[process]) for process in processes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [errors[process.rank] for process in processes]


def wait_and_end(process: Meetings) -> None:
    """Arrive at a meeting and never leave it, like a process that is killed while it waits."""
    process.meeting().__enter__()


@pytest.fixture
def processes() -> list[Meetings]:
    """Three processes that have met once."""
    processes = [Meetings(rank, 3) for rank in range(3)]
    for process in processes:
        with process.meeting():
            process.turns = {rank: f"round 2, client {rank + 5}" for rank in range(3)}
    return processes


@pytest.mark.parametrize("arrives", [False, True])
def test_a_process_that_does_not_arrive_or_ends_while_it_waits_is_named(
    arrives: bool, processes: list[Meetings]
) -> None:
    if arrives:
        wait_and_end(processes[1])
    for error in fail_together([processes[0], processes[2]]):
        assert isinstance(error, LostProcessError)
        assert str(error).startswith("Process 1 (round 2, client 6) is missing from a meeting")


def test_a_process_that_ended_while_it_waited_is_named_beside_one_that_is_busy(processes: list[Meetings]) -> None:
    wait_and_end(processes[1])
    (error,) = fail_together([processes[2]])  # process 0 has not arrived
    assert str(error).startswith("Processes 0 (round 2, client 5), 1 (round 2, client 6) are missing from a meeting")


def test_the_turn_that_a_process_has_told_is_named_rather_than_all_it_may_be_in(processes: list[Meetings]) -> None:
    for process in processes:
        process.begin({rank: f"round 3, client {rank} or client {rank + 3}" for rank in range(3)})
    processes[1].note("round 3, client 4")
    for error in fail_together([processes[0], processes[2]]):
        assert str(error).startswith("Process 1 (round 3, client 4) is missing from a meeting")


def test_a_process_that_was_told_to_end_lets_the_others_know(
    processes: list[Meetings], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(room.time, "monotonic", lambda: now[0])  # type: ignore[attr-defined]
    assert [process.must_end(False) for process in processes] == [False] * 3
    assert processes[1].must_end(True)
    assert not processes[0].must_end(False)  # it asks once a second
    now[0] = 1.0
    assert [process.must_end(False) for process in processes] == [True] * 3


def test_a_meeting_that_fails_although_nobody_is_missing_keeps_its_error(processes: list[Meetings]) -> None:
    assert fail_together(processes) == [CLOSED] * 3


def test_a_store_that_does_not_answer_is_that_of_the_missing_process(
    processes: list[Meetings], monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch would wait for a stopped process without bound."""
    stopped = threading.Event()

    class Stopped:
        def set(self, key: str, value: str) -> None: ...

        def check(self, keys: list[str]) -> bool:
            return stopped.wait()

    monkeypatch.setattr(room, "_store", Stopped)
    (error,) = fail_together([processes[1]])
    assert str(error).startswith("Process 0 (round 2, client 5) is missing from a meeting")
    stopped.set()


WORK = st.lists(st.floats(0.0, 1000.0), min_size=1, max_size=20)


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
    dealt = deal([float(w) for w in work], num_processes)
    assert max(sum(work[i] for i in share) for share in dealt) <= bound * best + 1e-9


def test_equal_pieces_are_dealt_by_index() -> None:
    assert deal([1.0, 2.0, 2.0, 2.0, 1.0], num_processes=2) == [[1, 3], [2, 0, 4]]


@given(WORK, st.integers(2, 4))
def test_no_share_is_longer_than_an_even_one_by_more_than_the_longest_unit(
    work: list[float], num_processes: int
) -> None:
    dealt = shares([WorkUnit(index) for index in range(len(work))], work, num_processes)
    longest = max(sum(work[unit.client_id] for unit in share) for share in dealt)
    assert longest <= sum(work) / num_processes + (num_processes - 1) / num_processes * max(work) + 1e-9 * sum(work)


def test_a_single_process_takes_the_units_in_the_given_order() -> None:
    units = [WorkUnit(5), WorkUnit(3), WorkUnit(8)]
    assert shares(units, [], num_processes=1) == [units]


def test_shares_hold_the_units_themselves() -> None:
    one, two = WorkUnit(4, "words", 80.0), WorkUnit(4, "images", 20.0)
    assert shares([one, two], [1.0, 2.0], num_processes=3) == [[two], [one], []]


@pytest.mark.parametrize(("ratio", "expected"), [(1.0, 40.0), (0.2, 24.0)])
def test_smaller_sub_models_are_less_work(ratio: float, expected: float) -> None:
    assert predicted_work(40, ratio) == pytest.approx(expected)
