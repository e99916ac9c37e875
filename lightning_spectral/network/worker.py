"""The process in which a device trains; it keeps the module and the data from message to message.

Flower starts a process for every message. Here that process only hands the message on: it imports just this file and
`flower` of this package, and so neither torch nor Lightning. The first message of a run starts the worker, and later
ones find it by a socket, in a folder that nobody but this user can enter. A node has at most one worker, which

- serves one run: it ends when it is asked on behalf of another,
- ends with Flower's processes of the node, with a process that waits for an answer, and when nothing was asked for a
  quarter of an hour, or for as long as the server waits for others, whose next question needs secrets of this process,
- is started again if it died, and answers the message then.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_spectral.network.device import DeviceService
    from lightning_spectral.network.messages import Parts

IDLE_SECONDS = 900.0  # without a message, after which a worker ends
WATCH_SECONDS = 0.2  # between two looks whether its node is still there
TRIES = 2  # of one message: its first worker may die of something else
SOCKET = "socket"  # in a folder of the node


@dataclass(frozen=True)
class Job:
    """What a worker does, all in types that JSON has.

    Attributes:
        node: Number of the node.
        run: Number of the run.
        modules: For each model, the name of what makes the user's module, as ``"app:LitNet"``.
        client: Likewise, of the function that returns the device's data.
        config: The configuration of run and node.
        accelerator: Where to train.
        share_errors: Whether the server is sent the texts of exceptions.
        trusted: Further packages whose classes the server may send.
        parent: Number of Flower's process with which the worker ends; by default the parent of this one.
        folder: Where the worker runs.
        path: Where Python looks for modules, the app's folder among it.
    """

    node: int
    run: int
    modules: Mapping[str, str]
    client: str
    config: Mapping[str, Any]
    accelerator: str
    share_errors: bool = False
    trusted: Sequence[str] = ()
    parent: int = field(default_factory=os.getppid)
    folder: str = field(default_factory=os.getcwd)
    path: list[str] = field(default_factory=lambda: list(sys.path))

    def written(self) -> bytes:
        """The job as bytes; jobs are equal if these are."""
        return json.dumps(asdict(self), sort_keys=True).encode()


def ask(job: Job, question: str, parts: Parts, seconds: float) -> dict[str, bytes]:
    """Return a worker's answer to one message, for which the server waits some seconds.

    Raises:
        RuntimeError: If the worker dies of the message.
        PermissionError: If others can enter the folder of the socket.
    """
    for _ in range(TRIES):
        with suppress(EOFError, ConnectionError), connected(job) as worker:
            _send(worker, question, parts, seconds)
            return _receive(worker)[2]
    raise RuntimeError(
        f"the process that trains on this device ended {TRIES} times while it answered, killed or by a crash of the "
        "user's code; the SuperNode's log may say why"
    )


@contextmanager
def connected(job: Job) -> Iterator[Connection]:
    """The worker that does a job, which is started if it is not there."""
    folder = Path(os.environ.get("FLWR_HOME") or Path.home() / ".flwr") / "workers" / f"{job.node:x}"
    with _within(folder):
        worker = _found(job) or _started(job)
    with worker:
        yield worker


@contextmanager
def _within(folder: Path) -> Iterator[None]:
    """Be in a folder, when no other process is; the socket's path might be longer than the system allows."""
    import fcntl

    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    with ExitStack() as after:
        after.callback(os.close, handle)
        found = os.fstat(handle)
        if found.st_uid != os.geteuid() or found.st_mode & 0o077:
            raise PermissionError(f"{folder} must be a folder that only this user can enter; remove it.")
        fcntl.flock(handle, fcntl.LOCK_EX)
        after.callback(os.chdir, os.getcwd())
        os.fchdir(handle)
        yield


def _found(job: Job) -> Connection | None:
    """The node's worker; ``None`` if there is none, or it had another job and has ended."""
    with socket.socket(socket.AF_UNIX) as tried:
        try:
            tried.connect(SOCKET)
        except (FileNotFoundError, ConnectionError):
            return None
        worker = _peer(tried)
    try:
        worker.send_bytes(job.written())
        worker.recv_bytes()
    except (EOFError, ConnectionError):
        worker.close()
        return None
    return worker


def _started(job: Job) -> Connection:
    """A new worker. Its socket is open before it is, so that nobody has to wait until it listens."""
    Path(SOCKET).unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(SOCKET)
        listening.listen()
        command = [sys.executable, "-m", "lightning_spectral.network.worker", str(listening.fileno())]
        subprocess.run(command, input=job.written(), pass_fds=[listening.fileno()], cwd=job.folder, check=True)
    if (worker := _found(job)) is None:
        raise RuntimeError("the process that trains on this device ends at once; the SuperNode's log may say why")
    return worker


def _peer(connection: socket.socket) -> Connection:
    """The other end of a connection, after a check that it is a process of this user."""
    if sys.platform == "darwin":  # SOL_LOCAL, LOCAL_PEERCRED: a struct xucred, which begins with a version and the user
        user = struct.unpack("=Ii", connection.getsockopt(0, 1, 8))[1]
    else:
        user = struct.unpack("=3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[1]
    if user != os.geteuid():
        raise PermissionError(f"a process of user {user} is at the other end of the socket of user {os.geteuid()}")
    return Connection(connection.detach())


def _send(connection: Connection, question: str, parts: Parts, seconds: float = 0.0) -> None:
    connection.send_bytes(json.dumps([question, seconds, *parts]).encode())
    for data in parts.values():
        connection.send_bytes(data)


def _receive(connection: Connection) -> tuple[str, float, dict[str, bytes]]:
    """A message; nothing of it is unpickled."""
    question, seconds, *names = json.loads(connection.recv_bytes())
    return question, seconds, {name: connection.recv_bytes() for name in names}


@dataclass(eq=False)
class Worker:
    """Answers the messages of one run, one after another.

    Args:
        job: What it does.
        answer: Answers a message.
    """

    job: Job
    answer: Callable[[str, Parts], dict[str, bytes]]
    _asker: Connection | None = field(default=None, init=False)  # who waits for an answer

    def serve(self, listening: socket.socket) -> None:
        """Answer until there is another job, or nobody has asked for long."""
        threading.Thread(target=self._end_with_others, daemon=True).start()
        listening.settimeout(IDLE_SECONDS)
        with suppress(TimeoutError):
            while True:
                connection, _ = listening.accept()
                with suppress(EOFError, ConnectionError, PermissionError), closing(_peer(connection)) as asker:
                    if asker.recv_bytes() != self.job.written():
                        return
                    asker.send_bytes(b"")
                    question, seconds, parts = _receive(asker)
                    listening.settimeout(max(IDLE_SECONDS, seconds))
                    self._asker = asker
                    answer = self.answer(question, parts)
                    self._asker = None  # from now on it may hang up
                    _send(asker, "", answer)

    def _end_with_others(self) -> None:
        has_ended = end_of(self.job.parent)
        while not (has_ended() or self._is_asked_in_vain()):
            time.sleep(WATCH_SECONDS)
        os._exit(1)

    def _is_asked_in_vain(self) -> bool:
        """Whether who waits for an answer, and has nothing more to say, has hung up."""
        asker = self._asker
        try:
            return asker is not None and asker.poll() and asker is self._asker
        except OSError:  # it was answered in the meantime
            return False


def end_of(process: int) -> Callable[[], bool]:
    """Whether a process has ended, to be asked again and again."""
    with suppress(AttributeError, OSError):  # where there is such a thing, it also tells of one that is only a zombie
        handle = os.pidfd_open(process)
        return lambda: bool(select.select([handle], [], [], 0)[0])

    def has_ended() -> bool:
        try:
            os.kill(process, 0)
        except ProcessLookupError:
            return True
        return False

    return has_ended


def main() -> None:
    """Run a worker: its job is on standard input, and the first argument is the number of an open socket."""
    job = Job(**json.load(sys.stdin))
    if os.fork():  # so that it is not a child of a process that soon ends
        os._exit(0)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    sys.path[:] = job.path

    @cache
    def service() -> DeviceService:
        from lightning_spectral.network.device import service_of

        made_by = job.modules, job.client, job.config, str(job.node), job.trusted
        return service_of(*made_by, job.accelerator, job.share_errors)

    def answer(question: str, parts: Parts) -> dict[str, bytes]:
        from lightning_spectral.network.device import answered

        return answered(lambda: service().answer(question, parts), job.share_errors)

    Worker(job, answer).serve(socket.socket(fileno=int(sys.argv[1])))


if __name__ == "__main__":  # as a message starts it
    main()
