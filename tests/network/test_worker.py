"""The process that a device keeps: what it lives and dies with, and that there is one for a node."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from loopback_runs import wait_for as wait_long_for

from lightning_spectral.network import worker
from lightning_spectral.network.worker import Job, ask, end_of

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="devices need Unix sockets")

# A worker without torch: instead of training, it does as it is told.
STUB = """\
import os, sys, time, types
from pathlib import Path
from lightning_spectral.network import worker

count = 0

class Service:
    def answer(self, question, parts):
        global count
        count += 1
        if question == "sleep":
            Path(parts["file"].decode()).write_text(str(os.getpid()))
            time.sleep(600)
        if question == "die":
            os.kill(os.getpid(), 9)
        if question == "die once" and not Path(parts["file"].decode()).exists():
            Path(parts["file"].decode()).touch()
            os._exit(3)
        said = {"pid": os.getpid(), "count": count, "folder": os.getcwd()}
        return {**parts, **{name: str(value).encode() for name, value in said.items()}}

worker.IDLE_SECONDS = float(os.environ.get("IDLE", 60))
sys.modules["lightning_spectral.network.device"] = types.SimpleNamespace(
    service_of=lambda *job: Service(), answered=lambda answer, share_errors: answer()
)
worker.main()
"""
PYTHON, ROOT = sys.executable, Path(worker.__file__).parent.parent.parent


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Job]:
    """A job whose worker is the stub; what it has started ends with the test."""
    (tmp_path / "stub.py").write_text(STUB)
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH="{ROOT}" exec "{sys.executable}" "{tmp_path}/stub.py" "$3"\n')
    python.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.setenv("FLWR_HOME", str(tmp_path / "home"))
    with subprocess.Popen(["sleep", "600"]) as parent:
        yield Job(7, 1, {"": "app:LitNet"}, "app:client", {"rounds": 3}, "cpu", parent=parent.pid)
        parent.kill()


wait_for = partial(wait_long_for, seconds=60.0)


def pid_of(answer: dict[str, bytes]) -> int:
    return int(answer["pid"])


def test_one_process_answers_all_messages_of_a_run(job: Job) -> None:
    parts = {"": b"", "large": os.urandom(3_000_000), "ключ": b"\0"}
    first, second = (ask(job, "train", parts, 0.0) for _ in range(2))
    assert {name: first[name] for name in parts} == parts
    assert (first["count"], second["count"]) == (b"1", b"2")
    assert pid_of(first) == pid_of(second) != os.getpid()


def test_messages_at_the_same_time_find_one_process(job: Job) -> None:
    answers: list[dict[str, bytes]] = []
    threads = [threading.Thread(target=lambda: answers.append(ask(job, "train", {}, 0.0))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({pid_of(answer) for answer in answers}) == 1
    assert sorted(int(answer["count"]) for answer in answers) == list(range(1, 9))


@pytest.mark.parametrize("other", [{"run": 2}, {"parent": os.getpid()}, {"config": {"rounds": 4}}])
def test_the_process_of_another_run_makes_way(job: Job, other: dict[str, Any]) -> None:
    before = pid_of(ask(job, "train", {}, 0.0))
    assert ask(replace(job, **other), "train", {}, 0.0)["count"] == b"1"
    assert end_of(before)()


def test_nodes_have_a_process_each(job: Job) -> None:
    other = replace(job, node=8)
    pids = [pid_of(ask(one, "train", {}, 0.0)) for one in (job, other, job, other)]
    assert pids[0] == pids[2] != pids[1] == pids[3]


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_a_process_that_is_killed_between_two_messages_is_started_again(job: Job, how: int) -> None:
    before = pid_of(ask(job, "train", {}, 0.0))
    os.kill(before, how)
    assert pid_of(ask(job, "train", {}, 0.0)) != before


def test_a_process_that_dies_of_a_message_is_started_again_and_answers_it(job: Job, tmp_path: Path) -> None:
    before = pid_of(ask(job, "train", {}, 0.0))
    answer = ask(job, "die once", {"file": str(tmp_path / "died").encode()}, 0.0)
    assert pid_of(answer) != before
    assert answer["count"] == b"1"


def test_a_message_of_which_every_process_dies_is_an_error(job: Job) -> None:
    with pytest.raises(RuntimeError, match="ended 2 times while it answered, killed or by a crash of the user's code"):
        ask(job, "die", {}, 0.0)
    assert ask(job, "train", {}, 0.0)["count"] == b"1"


def test_a_process_that_cannot_start_is_named(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(subprocess.CalledProcessError):
        ask(job, "train", {}, 0.0)
    monkeypatch.setattr(sys, "executable", "/bin/true")
    with pytest.raises(RuntimeError, match="ends at once"):
        ask(job, "train", {}, 0.0)


@contextmanager
def sleeping(job: Job, file: Path) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """A process that waits for an answer, and the worker that is to find it."""
    script = f"import sys; from lightning_spectral.network.worker import Job, ask; sys.executable = {sys.executable!r};"
    script += f"ask(Job(**{vars(job)}), 'sleep', {{'file': {str(file).encode()}}}, 0.0)"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen([PYTHON, "-c", script], env=environment, stderr=subprocess.DEVNULL) as asker:
        wait_for(lambda: file.exists() and file.read_text())
        yield asker, int(file.read_text())
        asker.kill()


def test_a_process_whose_asker_is_killed_ends(job: Job, tmp_path: Path) -> None:
    before = pid_of(ask(job, "train", {}, 0.0))
    with sleeping(job, tmp_path / "busy") as (asker, busy):
        assert busy == before
        asker.kill()
        wait_for(end_of(busy))
    assert ask(job, "train", {}, 0.0)["count"] == b"1"


@pytest.mark.parametrize("it_trains", [False, True])
def test_a_process_ends_with_its_node(job: Job, it_trains: bool, tmp_path: Path) -> None:
    pid = pid_of(ask(job, "train", {}, 0.0))
    with sleeping(job, tmp_path / "busy") if it_trains else nullcontext():
        os.kill(job.parent, signal.SIGKILL)  # a zombie, since nobody has waited for it
        wait_for(end_of(pid))


def test_a_process_waits_as_long_as_the_server_and_then_ends(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("IDLE", "0.3")
    pid = pid_of(ask(job, "query.agree", {}, 60.0))
    time.sleep(1.0)
    assert pid_of(ask(job, "train", {}, 0.1)) == pid
    wait_for(end_of(pid))
    assert pid_of(ask(job, "train", {}, 0.0)) != pid


def test_a_folder_that_others_can_enter_is_refused(job: Job, tmp_path: Path) -> None:
    pid = pid_of(ask(job, "train", {}, 0.0))
    folder = tmp_path / "home" / "workers" / "7"
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o710)
    with pytest.raises(PermissionError, match="workers/7 must be a folder that only this user can enter; remove it"):
        ask(job, "train", {}, 0.0)
    folder.chmod(0o700)
    assert pid_of(ask(job, "train", {}, 0.0)) == pid
    folder.rename(other := tmp_path / "elsewhere")
    folder.symlink_to(other)
    with pytest.raises(OSError, match=r"symbolic links|Not a directory"):
        ask(job, "train", {}, 0.0)


def test_a_home_may_have_a_longer_path_than_a_socket(job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLWR_HOME", str(tmp_path / ("x" * 200)))
    before = os.getcwd()
    assert (ask(job, "train", {}, 0.0)["folder"].decode(), os.getcwd()) == (before, before)


def test_processes_of_another_user_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
        with pytest.raises(PermissionError, match="a process of user"):
            worker._peer(ours)


def test_nothing_is_unpickled(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = map(Connection, (one.detach() for one in socket.socketpair()))
    with ours, theirs:
        ours.send({"an": "object"})  # pickled
        with pytest.raises(UnicodeDecodeError):
            worker._receive(theirs)


def test_what_hands_messages_on_imports_neither_torch_nor_lightning() -> None:
    script = """
import sys
import lightning_spectral.network.worker
heavy = {"torch", "lightning", "numpy", "msgspec", "safetensors"} & set(sys.modules)
assert not heavy, heavy
"""
    subprocess.run([sys.executable, "-c", script], env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True)


def test_an_end_is_noticed_where_there_are_no_handles_of_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "pidfd_open", raising=False)
    with subprocess.Popen(["sleep", "600"]) as process:
        has_ended = end_of(process.pid)
        assert not has_ended()
        process.kill()
    assert has_ended()
