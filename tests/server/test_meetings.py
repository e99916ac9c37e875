"""Processes that fail to meet learn which one is missing; here each process is a thread with a store in memory."""

import threading
from typing import Any

import pytest
from torch import distributed as dist

from lightning_spectral.errors import LostProcessError
from lightning_spectral.server import processes as room
from lightning_spectral.server.processes import Meetings

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


def test_a_process_that_ends_while_it_waits_is_named(processes: list[Meetings]) -> None:
    wait_and_end(processes[1])
    for error in fail_together([processes[0], processes[2]]):
        assert isinstance(error, LostProcessError)
        assert str(error).startswith("Process 1 (round 2, client 6) is missing from a meeting")


def test_a_process_that_ended_while_it_waited_is_named_beside_one_that_is_busy(processes: list[Meetings]) -> None:
    wait_and_end(processes[1])
    (error,) = fail_together([processes[2]])  # process 0 has not arrived
    assert str(error).startswith("Processes 0 (round 2, client 5), 1 (round 2, client 6) are missing from a meeting")


def test_a_process_that_does_not_arrive_is_named(processes: list[Meetings]) -> None:
    for error in fail_together([processes[0], processes[2]]):
        assert str(error).startswith("Process 1 (round 2, client 6) is missing from a meeting")


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
