"""A device's SuperNode: Flower's own, except for its pauses and for how it starts its program for a message.

Flower's looks every three seconds and waits for one or more if a message comes before its parts; its program, of which
a message starts one, imports for a second; no option changes this. Here a message waits at most a fifth longer than
necessary, and the program runs in a fork of a process that has imported it. ``flower-supernode`` works as well.
"""

from __future__ import annotations

import os
import select
import sys
import time
from contextlib import suppress
from functools import partial
from types import SimpleNamespace
from typing import Any

from lightning_spectral.errors import from_extra

with from_extra("network"):
    from flwr.supercore.cli import flower_superexec
    from flwr.supercore.constant import TaskType
    from flwr.supercore.superexec import run_superexec
    from flwr.supercore.superexec.executor.subprocess_executor import SubprocessExecutor
    from flwr.supercore.superexec.executor.types import ExecutionSpec, LaunchResult
    from flwr.supernode import start_client_internal
    from flwr.supernode.cli import flower_supernode
    from flwr.supernode.runtime import run_clientapp as program

SHORTEST, GROWTH = 0.1, 1.2  # seconds of the first pause without a message, and by how much each is longer
PART = 0.05  # seconds of the first pause for a part of a message; Flower doubles it up to ten


class Pauses:
    """Stands for the module ``time`` in Flower's loop, whose pauses grow from an answer on to the three seconds."""

    _next = SHORTEST

    def sleep(self, seconds: float) -> None:
        """Sleep, at most as long as Flower would: half a second for an answer of the device, three for a message."""
        if seconds < 1.0:
            self._next = SHORTEST
        pause, self._next = self._next, self._next * GROWTH
        time.sleep(min(pause, seconds))


class ForkingExecutor(SubprocessExecutor):  # type: ignore[misc]
    """Runs Flower's program for a message in a fork of this process."""

    def launch(self, spec: ExecutionSpec) -> LaunchResult:
        if spec.task_type != TaskType.CLIENT_APP:
            return super().launch(spec)
        if os.fork() == 0:
            try:
                program.run_clientapp(spec.runtime_api_address, spec.token, spec.insecure, parent_pid=spec.parent_pid)
            finally:
                os._exit(0)
        return LaunchResult.accepted()

    def reconcile(self) -> None:
        """Wait for those that have ended."""
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def main() -> None:
    """Run a SuperNode with the options of a `Kit`."""
    (port,) = (option.removeprefix("--port=") for option in sys.argv if option.startswith("--port="))
    pull, inflate = start_client_internal.pull_objects, program.pull_and_inflate_object_from_tree
    node, (heard, rung) = os.getpid(), os.pipe()

    def ring_and_pull(*args: Any, **options: Any) -> Any:  # there is a message, of which these are the parts
        os.write(rung, b".")
        return pull(*args, **options, initial_backoff=PART)

    def sleep_until_rung(seconds: float) -> None:
        if select.select([heard], [], [], seconds)[0]:
            os.read(heard, 4096)

    if os.fork() == 0:
        vars(program)["pull_and_inflate_object_from_tree"] = partial(inflate, initial_backoff=PART)
        executor = ForkingExecutor()
        vars(run_superexec).update(time=SimpleNamespace(sleep=sleep_until_rung), get_executor=lambda *_, **__: executor)
        sys.argv[1:] = ["--insecure", f"--runtime-api-address=127.0.0.1:{port}", f"--parent-pid={node}"]
        flower_superexec()
        return
    vars(start_client_internal).update(time=Pauses(), pull_objects=ring_and_pull)
    sys.argv.append("--isolation=process")
    flower_supernode()


if __name__ == "__main__":
    main()
