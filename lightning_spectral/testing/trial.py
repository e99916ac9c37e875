"""A small federation without a Trainer, in which the claims of `check_algorithm` are tried."""

from __future__ import annotations

import atexit
import copy
import os
import pickle
import subprocess
import sys
import threading
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache, wraps
from importlib.util import find_spec
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_map_only
from torch.utils.data import TensorDataset

from lightning_spectral.algorithms import Algorithm
from lightning_spectral.algorithms.base import Known
from lightning_spectral.algorithms.filter import Filter, Fit, Plan, instructions
from lightning_spectral.client.batches import BatchSource, ClientData
from lightning_spectral.client.device import ClientSide, Device, Instructions
from lightning_spectral.client.local_hooks import LocalHook
from lightning_spectral.client.local_loop import LocalSettings, Placement
from lightning_spectral.client.user_optimizer import options_of
from lightning_spectral.filters.own import STATES, Stored, chain
from lightning_spectral.participation.cohorts import ClientDirectory
from lightning_spectral.protocol.buffer_rules import Rules
from lightning_spectral.protocol.client_store import ClientStore
from lightning_spectral.protocol.cohort import Workers
from lightning_spectral.protocol.exchange import copy_module, named_state, update_norm
from lightning_spectral.protocol.per_client import assign
from lightning_spectral.protocol.records import Download, RoundSummary, Upload, WorkUnit
from lightning_spectral.server.executor import SequentialExecutor
from lightning_spectral.server.fault_policy import Faults, Raise
from lightning_spectral.server.lasting import Kept, Lasting
from lightning_spectral.server.processes import Processes
from lightning_spectral.server.round import Engine
from lightning_spectral.sums.exact_mean import Peers

T = TypeVar("T")
Record = TypeVar("Record", Download, Upload)
SEED, ROUNDS = 3, 3
SIZES = (3, 7, 5, 2, 4)  # numbers of examples, and so the weights of clients; at least as many as their steps


class SomeSteps(ClientData):
    """A client that sees one batch several times, so that clients differ whatever the batch is."""

    def __init__(self, batch: Any, num_steps: int) -> None:
        super().__init__(BatchSource(TensorDataset()), torch.arange(num_steps), 1, SEED, ())
        self.batch, self.steps = batch, num_steps

    def epoch(self, local_epoch: int) -> Iterator[tuple[Any, int]]:
        """Yield copies of the batch, since steps may write to it."""
        return ((copy.deepcopy(self.batch), 1) for _ in range(self.steps))


@dataclass(frozen=True)
class Case:
    """What every trial has in common.

    Attributes:
        algorithm: The algorithm.
        module: The user's module; only copies of it are trained.
        batch: What its ``training_step`` receives.
        lr: Learning rate of the clients' SGD.
        local_hooks: What acts in every local step.
        filters: What acts on updates.
        buffers: What becomes of buffers.
        device: Where the server is, and where clients train.
    """

    algorithm: Algorithm
    module: nn.Module
    batch: Any
    lr: float
    local_hooks: tuple[LocalHook, ...]
    filters: tuple[Filter, ...] = ()
    buffers: Rules = field(default_factory=dict)
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    def __str__(self) -> str:
        """What is tried, in messages."""
        return f"{self.algorithm!r}{f' with the filters {list(self.filters)!r}' if self.filters else ''}"

    def data(self, download: Download) -> ClientData:
        """The data of a download's client: from one to three steps."""
        batch = tree_map_only(Tensor, lambda tensor: tensor.to(self.device), self.batch)
        return SomeSteps(batch, 1 + download.unit.client_id % 3)


def has_codec() -> bool:
    """Whether the packages of the extra ``network`` are installed with which records and halves travel."""
    return all(find_spec(package) is not None for package in ("msgspec", "safetensors"))


def _sent(record: Record) -> Record:
    """A record that has travelled as bytes."""
    if not has_codec():
        return cast(Record, pickle.loads(pickle.dumps(record)))
    from lightning_spectral.protocol.codec import decode, encode

    return decode(*encode(record), type(record))


class TrialExecutor(SequentialExecutor):
    """A device that loses some clients after their downloads, and that may share nothing with the server.

    Args:
        device: Trains the clients.
        lost: Those of which nothing comes back, by id.
        elsewhere: Whether records travel as bytes.

    Attributes:
        travelled: For each client of the round, by id: how many bytes of tensors arrived at the device elsewhere, and
            came back.
        states: What the device elsewhere keeps for each client, by id.
    """

    def __init__(self, device: Device, lost: Collection[int], elsewhere: bool) -> None:
        super().__init__(device)
        self.lost, self.elsewhere = lost, elsewhere
        self.travelled: dict[int, tuple[int, int]] = {}
        self.states: dict[int, dict[str, Tensor]] = {}

    def run(self, downloads: Iterable[Download]) -> Iterator[Upload]:
        """Train one client after another."""
        for download in downloads:
            if download.unit.client_id in self.lost:
                yield Upload(download.unit, {}, left_out="late")
            elif self.elsewhere:
                client = download.unit.client_id
                arrived = replace(_sent(download), client_state=self.states.get(client, {}))
                trained = self.device.run(arrived)
                self.states[client] = {name: tensor.clone() for name, tensor in trained.client_state.items()}
                upload = _sent(replace(trained, client_state={}))
                self.travelled[client] = arrived.num_bytes, upload.num_bytes
                yield upload
            else:
                yield self.device.run(download)


class Trial:
    """Rounds of five clients, who step by plain SGD, as does the server.

    Args:
        case: What is tried.
        saved: What `save` of another trial returned, to resume it; ``None`` to begin.
        local_epochs: As for the federation; 0 trains nobody.
        elsewhere: Whether devices share nothing with the server.
        server_lr: Learning rate of the server.
        lost: Clients of which nothing comes back.
        absolute: For absolute coefficients, what the ``sizes`` are multiplied by; ``None`` for those that are divided
            by their sum.
        sizes: Coefficients of the clients.
    """

    def __init__(
        self,
        case: Case,
        saved: Mapping[str, Any] | None = None,
        *,
        local_epochs: int = 1,
        elsewhere: bool = False,
        server_lr: float = 1.0,
        lost: Collection[int] = (),
        absolute: float | None = None,
        sizes: Sequence[int] = SIZES,
    ) -> None:
        self.case, self.round_idx = case, 0
        scale = 1.0 if absolute is None else absolute
        self.units = [WorkUnit(client_id, coefficient=scale * size) for client_id, size in enumerate(sizes)]
        self.server: nn.Module = copy_module(case.module).to(case.device)
        self.state = case.algorithm.new_state(self.server, SEED)
        if self.state is not None:
            self.state.to(case.device)
        self.lasting, self.decisions = Lasting(), Kept()
        self.lasting.attach("decisions", self.decisions)
        if self.state is not None:
            self.lasting.attach("algorithm", self.state)
        if saved is not None:
            saved = copy.deepcopy(dict(saved))
            self.server.load_state_dict(saved["server"])
            self.lasting.load_state_dict(saved["lasting"])
            self.round_idx = saved["round_idx"]
        decided = None if saved is None else self.decisions.values
        rules = Plan(self.server, case.algorithm, case.filters, buffers=case.buffers).rules(decided)
        self.half = case.algorithm.bind(self.server, self.state, Known(rules, decisions=decided))
        if saved is None:
            self.half.initialize(Workers())
            self.half.settle()
        self.decisions.values = self.half.decisions
        self.template = SGD([p for p in self.server.parameters() if p.requires_grad], lr=case.lr)
        own = [] if self.state is None else [p for p in self.state.parameters() if p.requires_grad]
        self.optimizer = SGD([*self.template.param_groups[0]["params"], *own], lr=server_lr)
        told, store, sizes_of_all = instructions(self.half, case.filters), ClientStore(), torch.tensor(SIZES)
        batch_sizes = assign(1, len(SIZES), SEED, "batch sizes")
        fit = Fit(self.half, Processes(), lambda: sizes_of_all, "update", batch_sizes=batch_sizes)
        self.ends = chain(case.filters, fit, store, told.keeps_state)
        for name, end in self.ends.items():
            if isinstance(end, Stored):
                end.store.to(case.device)
            self.lasting.attach(name, end)
        self.engine = Engine(
            case.algorithm,
            self.half,
            told,
            self.ends,
            ClientDirectory(torch.tensor(SIZES), case.algorithm.capacities.of_clients(len(SIZES), SEED)),
            lambda _: self.executor,
            seed=SEED,
            local_epochs=local_epochs,
            absolute=absolute is not None,
            options=lambda: (options_of(self.template),),
            figure="update",
            store=store,
            faults=Faults(on_not_finite=Raise(), on_no_update=Raise()),
        )
        self.executor = TrialExecutor(self.device(elsewhere), lost, elsewhere)

    def device(self, elsewhere: bool = False) -> Device:
        """A device that trains its clients; one elsewhere shares nothing with the server."""
        told, module, optimizer = self.engine.instructions, self.server, self.template
        if elsewhere:
            told, (module, optimizer) = self._told_elsewhere(), copy.deepcopy((module, optimizer))
        placement = Placement(self.case.device, moves_batches=False)
        settings = LocalSettings(placement, self.case.local_hooks, hasattr)
        return Device(module, told, [optimizer], self.case.data, settings)

    def _told_elsewhere(self) -> Instructions:
        """What a device is told after a round trip: pickled, and as over a network unless a script defines a part."""
        told: Instructions = pickle.loads(pickle.dumps(self.engine.instructions))
        parts = [told.side, *told.ends.values()]
        if any(type(part).__module__ == "__main__" for part in parts) or not has_codec():
            return told
        from lightning_spectral.network.objects import read_object, write_object

        makers = (*parts, self.case.algorithm, self.case.module)
        packages = {type(maker).__module__.partition(".")[0] for maker in makers}
        return read_object(write_object(told), Instructions, packages)

    def play(self, units: Sequence[WorkUnit] | None = None) -> RoundSummary:
        """Play a round of some clients, by default all, who train in the given order."""
        units = self.units if units is None else units
        self.engine.open_round(self.round_idx, sorted(units))
        self.engine.round.agree(units)
        self.engine.round.play(units)
        return self.close()

    def can_share(self) -> bool:
        """Whether several processes can train a round's clients."""
        try:
            return self.engine.open_round(self.round_idx, self.units).algorithm_round.sums is not None
        except NotImplementedError:
            return False
        finally:
            self.engine.abandon_round()

    def close(self) -> RoundSummary:
        """Close the round, and step the server."""
        self.engine.round.gather()
        return self.apply()

    def apply(self) -> RoundSummary:
        """Step the server, once processes have met."""
        summary = self.engine.apply_round()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.engine.settle()
        self.round_idx += 1
        return summary

    def parameters(self) -> dict[str, Tensor]:
        """Copies of the server's parameters."""
        return {name: parameter.detach().clone() for name, parameter in self.server.named_parameters()}

    def weights(self) -> dict[str, Tensor]:
        """Copies of the server's parameters and buffers."""
        return {f"module.{name}": tensor for name, tensor in tensors_of(self.server).items()}

    def everything(self) -> dict[str, Tensor]:
        """Copies of all that lasts from round to round: the server's tensors, the state's, and each client's."""
        stored = {
            f"{'device of client' if part == STATES else 'client'} {key[0]}: {name}": tensor.clone()
            for part, end in self.ends.items()
            if isinstance(end, Stored)
            for key in end.store
            for name, tensor in end.store.kept(WorkUnit(*key)).items()
        }
        for each in self.case.filters:
            state = self.ends[each.name].state_dict() if each.name in self.ends else {}
            for path, leaf in tree_flatten_with_path(state)[0]:
                if isinstance(leaf, Tensor | int | float):
                    stored[f"filter {each.name}{keystr(path)}"] = torch.as_tensor(leaf).clone()
        for client, kept in self.executor.states.items():
            stored |= {f"device of client {client}: {name}": tensor.clone() for name, tensor in kept.items()}
        return {**self.weights(), **{f"state.{name}": t for name, t in tensors_of(self.state).items()}, **stored}

    def save(self) -> dict[str, Any]:
        """What a checkpoint between two rounds holds."""
        return copy.deepcopy(
            {"server": self.server.state_dict(), "lasting": self.lasting.state_dict(), "round_idx": self.round_idx}
        )


def tensors_of(module: nn.Module | None) -> dict[str, Tensor]:
    """Copies of a module's parameters and buffers, by name."""
    return {} if module is None else {n: tensor.detach().clone() for n, tensor in named_state(module).items()}


def change_norms(trial: Trial) -> dict[int, float]:
    """How far each client's sub-model moves in the trial's next round, by client id.

    Clients that send back anything but tensors of their sub-model, whole, are left out.
    """
    opened = trial.engine.open_round(trial.round_idx, trial.units)
    device, norms = trial.device(), {}
    observing: Any = _Observing(device.instructions.side)
    device.instructions = replace(device.instructions, side=observing)
    for unit in trial.units:
        download, receipt = opened.send(unit)
        device.run(replace(download, local_epochs=0))
        before = observing.seen
        upload, after = device.run(download), observing.seen
        both_ways = upload.tensors.keys() & download.tensors.keys()
        if all(name in after and after[name].shape == upload.tensors[name].shape for name in both_ways):
            where, rules = opened.algorithm_round.positions(receipt), trial.half.rules
            sent, returned = ({name: tensors[name] for name in both_ways} for tensors in (before, after))
            norms[unit.client_id] = update_norm(rules.averaged(sent, where), rules.averaged(returned, where))
    trial.engine.abandon_round()
    return norms


@dataclass(eq=False)
class _Observing:
    """A device half that lets the tensors of a client be seen, which the server never sees."""

    side: ClientSide
    seen: dict[str, Tensor] = field(default_factory=dict, init=False)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.side, name)

    def collect(self, client: nn.Module, download: Download) -> Upload:
        self.seen = tensors_of(client)
        return self.side.collect(client, download)


def play_in_two_processes(trials: Sequence[Trial], groups: Sequence[Sequence[WorkUnit]]) -> list[RoundSummary]:
    """Play a round of which two processes train a part each, and add up their sums in two threads."""
    for trial, group in zip(trials, groups, strict=True):
        trial.engine.open_round(trial.round_idx, trial.units)
        trial.engine.round.play(group)
    board, barrier = [None, None], threading.Barrier(2, timeout=60)
    peers = [Peer(rank, board, barrier) for rank in range(2)]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda peer: trials[peer.rank].engine.round.add_up(peer), peers))
    outcomes = [outcome for trial in trials for outcome in trial.engine.round.outcomes]
    for trial in trials:
        by_key = {outcome.unit.key: outcome for outcome in outcomes}
        trial.engine.round.gathered = tuple(by_key[unit.key] for unit in trial.units)
        trial.engine.round.executor.end_round()
    return [trial.apply() for trial in trials]


class Peer(Peers):
    """One of several processes, in a thread: they say what they have on a board, and wait at a barrier."""

    def __init__(self, rank: int, board: list[Any], barrier: threading.Barrier) -> None:
        self.rank, self.size, self._board, self._barrier = rank, len(board), board, barrier

    def gather(self, value: T) -> list[T]:
        self._board[self.rank] = value
        self._barrier.wait()
        said = list(self._board)
        self._barrier.wait()
        return said

    def add_up(self, tensors: Sequence[Tensor]) -> None:
        said = self.gather([tensor.clone() for tensor in tensors])
        for tensor, parts in zip(tensors, zip(*said, strict=True), strict=True):
            tensor.copy_(torch.stack(parts).sum(0))


def with_statistics(module: nn.Module) -> nn.Module:
    """A copy whose every ``training_step`` also moves the running mean of a batch normalisation from 0 towards 1."""
    kind: Any = type(module)

    class WithStatistics(kind):  # type: ignore[misc]
        @wraps(kind.training_step)
        def training_step(self, *arguments: Any) -> Any:
            self.trial_statistics(torch.ones_like(self.trial_statistics.running_mean).expand(2, 1))
            return kind.training_step(self, *arguments)

    copied: Any = copy_module(module)
    copied.__class__ = WithStatistics
    copied.trial_statistics = nn.BatchNorm1d(1, affine=False)
    return cast(nn.Module, copied)


def uninterrupted(case: Case) -> list[dict[str, Tensor]]:
    """All that lasts of a run: before the first round, and after each."""
    trial = Trial(case)
    after = [trial.everything()]
    for _ in range(ROUNDS):
        trial.play()
        after.append(trial.everything())
    return after


def uninterrupted_elsewhere(case: Case) -> list[dict[str, Tensor]] | str | None:
    """The same in a process with another ``PYTHONHASHSEED``.

    Returns:
        What lasts of the run, what failed there, or ``None`` if the algorithm or the module cannot be sent there,
        because a script, a notebook or a function defines it.
    """
    try:
        data = pickle.dumps(replace(case, module=copy_module(case.module)))
    except Exception:
        return None
    process: Any = _other_process()
    pickle.dump((sys.path, torch.get_num_threads(), data), process.stdin)
    process.stdin.flush()
    found: list[dict[str, Tensor]] | str | None = pickle.load(process.stdout)
    return found


@cache
def _other_process() -> subprocess.Popen[bytes]:
    """A process that waits for cases, since starting it takes longer than playing them; it ends with this one."""
    seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    command = f"import sys; sys.path[:] = {sys.path!r}; from {__name__} import _serve; _serve()"
    environment, pipe = {**os.environ, "PYTHONHASHSEED": seed}, subprocess.PIPE
    process = subprocess.Popen([sys.executable, "-c", command], env=environment, stdin=pipe, stdout=pipe)
    atexit.register(process.communicate)
    return process


def _serve() -> None:
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what modules print must not get between the answers
    warnings.simplefilter("ignore")
    while True:
        try:
            sys.path[:], threads, data = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        torch.set_num_threads(threads)
        answer: list[dict[str, Tensor]] | str | None = None
        with suppress(Exception):  # its classes cannot be imported here
            case = pickle.loads(data)
            try:
                earlier = copy_module(case.module)  # of whose round nothing may last in this process
                for parameter in earlier.parameters():
                    parameter.data.mul_(1.01)
                Trial(replace(case, module=earlier)).play()
                answer = uninterrupted(case)
            except Exception as error:
                answer = f"{type(error).__name__}: {error}"
        pickle.dump(answer, answers)
        answers.flush()
