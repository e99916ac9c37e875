"""The Trainer strategy that distributes the clients of a round over processes, and the memory of such a process."""

from __future__ import annotations

import ctypes
import platform
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from types import FrameType
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor
from torch import distributed as dist

from lightning_spectral.arguments import Whole
from lightning_spectral.client.local_loop import metrics_of
from lightning_spectral.errors import ClientError, LostProcessError, RoundError
from lightning_spectral.plugin.user_hooks import as_host, replaced
from lightning_spectral.protocol.records import WorkUnit
from lightning_spectral.server.processes import Meetings, Processes
from lightning_spectral.server.round import listed, named


def alone() -> AbstractContextManager[None]:
    """Hide all other processes from torch.distributed within the block, in which this one trains a client."""
    is_one_of_several = dist.is_available() and dist.is_initialized()
    return replaced(dist.group, WORLD=None) if is_one_of_several else nullcontext()


class ClientParallelStrategy(DDPStrategy):
    """Each process trains some of a round's clients; only sums are synchronised, once per round.

    Use ``Trainer(strategy="client_parallel", devices=N, num_nodes=M)`` with any launcher of Lightning's DDP; processes
    start, find each other and stop as they do there. The module is not wrapped, however, so the gradients of different
    clients are never mixed. Weights, metrics and ledger equal those of a single process bit for bit, if each process
    has the same number of threads.

    All processes hold the same server's module and evaluate it on all of the evaluation data: if the data were divided
    among them, examples would be padded and sums rounded in another order. Logged values are therefore the same
    everywhere: `reduce`, which Lightning calls for them, leaves them as they are, and metrics do not sync.

    Args:
        processes_per_device: Number of processes that share a device, with all of its memory between them: one alone
            seldom keeps a GPU busy with small models. They exchange sums by gloo: NCCL takes one process per GPU.
        **options: Options of ``lightning.pytorch.strategies.DDPStrategy`` that do not concern gradients: ``timeout``,
            ``process_group_backend``, ``start_method``, ``cluster_environment``. ``timeout`` is how long processes wait
            for the slowest one, half an hour by default. They wait for each other once a round: it must be longer than
            the longest turn of a client, and longer still if some processes are slower than others.

    Raises:
        TypeError: If the module to fit is not federated.
        LostProcessError: If another process has ended or does not respond within ``timeout``.
        ValueError: With ``sync_batchnorm=True``, which would mix the clients of different processes, or if processes
            that share a device are to use NCCL.

    Example:
        >>> trainer = pl.Trainer(
        ...     strategy=ClientParallelStrategy(start_method="spawn"), accelerator="cpu", devices=2, logger=False
        ... )
        >>> trainer.world_size
        2
    """

    strategy_name = "client_parallel"

    def __init__(self, processes_per_device: int = 1, **options: Any) -> None:
        self._processes_per_device = Whole(at_least=1)("processes_per_device", processes_per_device)
        if processes_per_device > 1 and options.setdefault("process_group_backend", "gloo") != "gloo":
            raise ValueError(
                f"processes_per_device={processes_per_device} needs process_group_backend='gloo', got "
                f"{options['process_group_backend']!r}; leave it out."
            )
        super().__init__(**options)
        self._isolated = ExitStack()
        self._sigterm_received = False
        self._meetings: Meetings | None = None

    @property
    def parallel_devices(self) -> list[torch.device] | None:
        """The device of each process on this machine."""
        return self._parallel_devices

    @parallel_devices.setter
    def parallel_devices(self, devices: list[torch.device] | None) -> None:
        shared = None if devices is None else [device for device in devices for _ in range(self._processes_per_device)]
        self._parallel_devices = shared

    @property
    def processes(self) -> Processes:
        """This process among the others."""
        return Processes(self.global_rank, self.world_size, self.root_device, self._meetings)

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Give every process all of the evaluation data."""
        return {"num_replicas": 1, "rank": 0}

    def setup(self, trainer: pl.Trainer) -> None:
        """Check that the fit is federated, and keep metrics of the server's module from syncing until it ends."""
        module = self.lightning_module
        if trainer.state.fn == "fit":
            as_host(module, "strategy='client_parallel' spreads clients", ", or use strategy='ddp'")
        if self._layer_sync is not None:
            raise ValueError("sync_batchnorm=True would mix the batches of different clients; leave it out.")
        assert module is not None
        for metric in metrics_of(module):
            self._isolated.enter_context(replaced(metric, distributed_available_fn=bool))  # which returns False
        self._meetings = Meetings(self.global_rank, self.world_size) if self.world_size > 1 else None
        # before the Trainer registers its own handler: on SIGTERM, Lightning's broadcasts at once, and a process that
        # is waiting in another collective at that moment never returns
        self._sigterm_received = False
        trainer._signal_connector._sigterm_notifier_fn = self._note_sigterm  # type: ignore[assignment, method-assign]
        super().setup(trainer)

    def configure_ddp(self) -> None:
        """Start every process from the weights of process 0, instead of wrapping the module."""
        assert self.model is not None
        host: Any = self.lightning_module
        for module in (self.model, *(model.state for model in host.members.values() if model.state is not None)):
            for tensor in (*module.parameters(), *module.buffers()):
                dist.broadcast(tensor.detach(), 0)

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Return the value as it is: what is logged is the same in every process."""
        return tensor

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Whether all, or any, of the processes decided so."""
        votes: Tensor = torch.tensor(int(decision), device=self.root_device)
        with self._meeting():
            dist.all_reduce(votes)
        return bool(votes == self.world_size) if all else bool(votes)

    def barrier(self, *args: Any, **options: Any) -> None:
        """Wait for all processes, unless one is lost, or this one alone has failed."""
        if not self._is_alone:
            with self._meeting():
                super().barrier(*args, **options)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Return the value of one process in all of them, or this one's own if there will be no more meetings."""
        if self._is_alone:
            return obj
        with self._meeting():
            return super().broadcast(obj, src)

    @property
    def _is_alone(self) -> bool:
        """Whether nobody would come to a meeting, such as that in which a checkpoint is saved after an error."""
        if self._meetings is None:
            return False
        has_failed = self.lightning_module is not None and self.lightning_module.trainer.interrupted
        return self._meetings.is_broken or (has_failed and not _is_known_to_all(sys.exc_info()[1]))

    def _meeting(self) -> AbstractContextManager[None]:
        return nullcontext() if self._meetings is None else self._meetings.meeting()

    def note_shares(self, round_idx: int, shares: Sequence[Sequence[WorkUnit]] = ()) -> None:
        """Note what each process trains until they next meet, for the error if one does not arrive."""
        if self._meetings is not None:
            doing = [listed(units) for units in shares] or ["between turns"] * self.world_size
            self._meetings.begin({rank: f"round {round_idx}, {what}" for rank, what in enumerate(doing)})

    def may_begin(self, round_idx: int, unit: WorkUnit) -> bool:
        """Let the others know whose turn it is here; false if this process, or another a second ago, got SIGTERM."""
        if self._meetings is None:
            return not self._sigterm_received
        self._meetings.note(f"round {round_idx}, {named(unit)}")
        return not self._meetings.must_end(self._sigterm_received)

    def _note_sigterm(self, signum: int, frame: FrameType | None) -> None:
        """Note the signal and forward it to processes started here; it takes effect after the turn."""
        if not self._sigterm_received and self.launcher is not None:
            self.launcher.kill(signum)
        self._sigterm_received = True

    def share_sigterm(self) -> None:
        """End all processes after a round, as Lightning does for SIGTERM, if any of them received that signal."""
        if self.reduce_boolean_decision(self._sigterm_received, all=False):
            assert self.lightning_module is not None
            self.lightning_module.trainer._signal_connector.received_sigterm = True

    def on_exception(self, exception: BaseException) -> None:
        """Restore the metrics' own synchronisation, and disconnect if other processes may not know of the error.

        A failure of a client or of the round is raised in every process, and so is the end after SIGTERM. After other
        errors they might wait for this process until the timeout; once it has disconnected, they fail too.
        """
        self._isolated.close()
        if not _is_known_to_all(exception) and dist.is_initialized() and dist.get_backend() == "gloo":
            dist.destroy_process_group()
        super().on_exception(exception)

    def teardown(self) -> None:
        self._isolated.close()
        super().teardown()


def _is_known_to_all(exception: BaseException | None) -> bool:
    """Whether all processes end with this error."""
    known = isinstance(exception, ClientError | RoundError | SIGTERMException)
    return known and not isinstance(exception, LostProcessError)


def processes_of(trainer: pl.Trainer) -> Processes:
    """The processes that train the clients of a Trainer's rounds."""
    strategy = trainer.strategy
    return strategy.processes if isinstance(strategy, ClientParallelStrategy) else Processes()


M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3  # from <malloc.h> of glibc
LARGEST = 2**31 - 1  # mallopt takes an int
TOP_PAD = 64 * 2**20  # bytes asked for beyond each need: fewer, larger steps


def tune_allocator() -> bool:
    """Keep freed memory in this process instead of handing it back to the system; return whether that was possible.

    By default glibc returns large blocks at once and asks for them again at the next step; every new page costs a page
    fault. Without that, small models on the CPU train 1.25 to 1.4 times as fast, with unchanged peak memory. The
    setting is permanent for the process: call this once in each, before training. To do it from outside::

        MALLOC_TRIM_THRESHOLD_=2147483647 MALLOC_MMAP_THRESHOLD_=2147483647 MALLOC_TOP_PAD_=67108864 python train.py

    Returns:
        Whether the C library is glibc and took the settings; otherwise nothing is changed.

    Example:
        >>> tune_allocator() in (True, False)
        True
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    settings = {M_TRIM_THRESHOLD: LARGEST, M_MMAP_THRESHOLD: LARGEST, M_TOP_PAD: TOP_PAD}
    mallopt = ctypes.CDLL(None).mallopt
    return all([mallopt(ctypes.c_int(option), ctypes.c_int(value)) == 1 for option, value in settings.items()])
