"""The rounds of one model, in plain torch: callbacks decide when, an algorithm decides what."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from lightning_spectral.algorithms.base import Algorithm, Round, ServerHalf, promises_of
from lightning_spectral.algorithms.filter import Arrival, Opened, ServerEnd, Unusable
from lightning_spectral.client.device import Instructions
from lightning_spectral.client.forms import Forms
from lightning_spectral.errors import ClientError, RoundError, warn
from lightning_spectral.filters.own import NORM
from lightning_spectral.participation import Figure
from lightning_spectral.participation.cohorts import ClientDirectory
from lightning_spectral.protocol.client_store import ClientStore
from lightning_spectral.protocol.cohort import Cohort
from lightning_spectral.protocol.per_client import Assigned, PerClient, assign, check_num_entries
from lightning_spectral.protocol.records import (
    EXPLANATIONS,
    ClientOutcome,
    Download,
    ExclusionReason,
    Failure,
    Key,
    Options,
    Profile,
    Receipt,
    RoundSummary,
    StageClock,
    Upload,
    WorkUnit,
)
from lightning_spectral.server.advice import check_weights, smaller_updates, suspecting_weights
from lightning_spectral.server.executor import Executor
from lightning_spectral.server.fault_policy import Faults, clients_by_reason
from lightning_spectral.server.metrics import round_means
from lightning_spectral.server.processes import Processes, raise_everywhere
from lightning_spectral.simulation import Conditions, SimulatedTask, Simulation
from lightning_spectral.sums import SummandError, add_up
from lightning_spectral.sums.exact_mean import Peers

LISTED = 9  # further units are counted in messages
NUMBER = 4  # bytes of the one number that a measured client uploads
TIMED = 10  # clients from whose times that of a measurement is estimated
LONG = 60.0  # seconds of it that are worth a warning


@dataclass(eq=False)
class Engine:
    """Opens and closes the rounds of one model in one fit.

    Attributes:
        algorithm: The algorithm, as the user chose it.
        half: The algorithm, bound to the user's module with dense weights.
        instructions: What devices are told once.
        filters: What acts on updates at the server, by name, the one next to the algorithm first.
        clients: What is known of the clients.
        make_executor: Creates the executor that runs the device half; called when the first round opens.
        seed: The run's seed.
        local_epochs: Passes over a client's data in a round; 0 trains nothing. May differ between clients.
        local_steps: Instead of these, batches on which a client trains; likewise.
        absolute: Whether units' coefficients are used as weights without being divided by their sum; see `Cohort`.
        options: Called once a round; returns the options of the parameter groups of each of the user's optimizers.
        model: The model's name; empty if there is only one.
        figure: The figure of each client that the sampler uses; "" for none.
        faults: What to do about clients that do not report back.
        conditions: Simulated dropout and device speed.
        processes: The processes that train the clients of a round; each has its own engine, with the same weights.
        store: State of single clients that the server keeps.
        profile: Maps the name of a stage to a context manager that is entered around it.
        make_measuring: Creates the executor that measures clients before a round; ``None`` to use the same one.
        round_is_open: Whether a round is open.
        server_is_stepping: Whether the server's step has begun and not ended.
    """

    algorithm: Algorithm
    half: ServerHalf
    instructions: Instructions
    filters: Mapping[str, ServerEnd]
    clients: ClientDirectory
    make_executor: Callable[[Engine], Executor]
    seed: int
    local_epochs: PerClient[int] = 1
    local_steps: PerClient[int] | None = None
    absolute: bool = False
    options: Callable[[], tuple[tuple[Options, ...], ...]] = tuple
    model: str = ""
    figure: Figure = ""
    faults: Faults = field(default_factory=Faults)
    conditions: Conditions = field(default_factory=Conditions)
    processes: Processes = field(default_factory=Processes)
    store: ClientStore = field(default_factory=ClientStore)
    profile: Profile = nullcontext
    make_measuring: Callable[[Engine], Executor] | None = None
    round_is_open: bool = field(default=False, init=False)
    server_is_stepping: bool = field(default=False, init=False)
    _sizes: dict[tuple[float, int], tuple[list[int | None], int, int, int]] = field(default_factory=dict, init=False)
    _executor: Executor | None = field(default=None, init=False)
    _measuring: Executor | None = field(default=None, init=False)
    _has_measured: bool = field(default=False, init=False)
    _round: OpenRound | None = field(default=None, init=False)

    @cached_property
    def simulation(self) -> Simulation:
        """Dropout and device speed as assigned to the clients."""
        return self.conditions.prepare(self.clients.num_clients, self.seed)

    def length_of(self, client_id: int) -> dict[str, Any]:
        """How long a client trains, as its download says; one that joins later trains as long as an earlier one."""
        number = self._lengths.of(client_id % len(self._lengths))
        return {"local_epochs": number} if self.local_steps is None else {"local_epochs": 1, "local_steps": number}

    def passes_of(self, client_id: int) -> float:
        """Passes over its data that a client trains, the last one perhaps in part."""
        return self.clients.passes_of(client_id, **self.length_of(client_id))

    @cached_property
    def _lengths(self) -> Assigned[int]:
        name = "local_epochs" if self.local_steps is None else "local_steps"
        check_num_entries(name, given := getattr(self, name), self.clients.num_clients)
        return assign(given, self.clients.num_clients, self.seed, name.replace("_", " "))

    @cached_property
    def inward(self) -> Sequence[ServerEnd]:
        """What acts on updates when they arrive, in this order; downloads take the opposite way."""
        return list(self.filters.values())[::-1]

    @cached_property
    def is_private(self) -> bool:
        """Whether nothing of a round is told but its sums, and what hides clients in them."""
        return any(end.releases for end in self.inward)

    @property
    def round(self) -> OpenRound:
        assert self._round is not None, "SVDRefresh opens a round before its first client"
        return self._round

    @property
    def executor(self) -> Executor:
        """The executor that runs the device half; created when first needed."""
        if self._executor is None:
            self._executor = self.make_executor(self)
        return self._executor

    def task_of(self, opened: Round, unit: WorkUnit, capacity: float) -> SimulatedTask:
        """The task of a client for the simulation.

        Only a virtual clock needs the size of its sub-model, and how often it passes over its data: measured once for
        each capacity and number of passes, on a temporary sub-model.
        """
        length, passes = self.length_of(unit.client_id), self.passes_of(unit.client_id)
        task = SimulatedTask(capacity, self.clients.epoch_of(unit.client_id), passes)
        kind = capacity, length["local_epochs"]
        if self.conditions.clock is None:
            return task
        if kind not in self._sizes:
            told, download = self.instructions, replace(opened.send(unit)[0], **length)
            with Forms(self.half.server, told.side.take_form).client(download.capacity) as client:
                told.load(client, download)
                phases = [phase.epochs for phase in told.phases(client, download)]
                num_parameters = sum(parameter.numel() for parameter in client.parameters())
                uplink_bytes = told.sized(client, download).num_bytes
            self._sizes[kind] = phases, num_parameters, download.num_bytes, uplink_bytes
        phases, num_parameters, downlink_bytes, uplink_bytes = self._sizes[kind]
        passes = sum(passes if epochs is None else epochs for epochs in phases)
        downlink_bytes -= sum(end.saved_bytes(unit) for end in self.inward)
        return SimulatedTask(capacity, task.num_examples, passes, num_parameters, downlink_bytes, uplink_bytes)

    def open_round(self, round_idx: int, units: Iterable[WorkUnit]) -> OpenRound:
        """Open a round and prepare it for its cohort, from the server's weights; arguments as of `OpenRound`."""
        executor = self.executor
        self._round = OpenRound(self, executor, round_idx, units)
        self.round_is_open = True
        executor.begin_round()
        return self._round

    def apply_round(self) -> RoundSummary:
        """Finish the average, once it is gathered: from here on the server's weights change.

        Afterwards the parameters of the server, or of its state, hold the pseudo-gradient, the same in all processes.
        If no client is left, and `Faults` allows that, there is none, and the server's step changes nothing.
        """
        self.server_is_stepping = True
        summary = self.round.apply()
        self.round_is_open, self._round = False, None
        return summary

    def abandon_round(self) -> None:
        """Discard the open round, if there is one, and the executors; the round will not be finished."""
        if self._executor is not None:
            self._executor.end_round()
        self._executor = self._measuring = self._round = None

    def settle(self) -> None:
        """Update the server's module from the algorithm's state, after the server optimizer's step."""
        self.half.settle()
        self.server_is_stepping = False

    def measure(self, round_idx: int, units: Sequence[WorkUnit]) -> list[ClientOutcome]:
        """Measure the loss or update norm of some clients at the server's current weights, without changing the server.

        For losses, a client evaluates ``training_step`` once on each of its batches, without gradients, which takes a
        third of the multiplications of an epoch. For update norms, it trains as it would in the round and obtains the
        same update, so a client that is drawn afterwards trains twice. It gets its sub-model and returns one number.

        Returns:
            One outcome per unit, the same in all processes; those of failed clients are marked as left out.

        Raises:
            ClientError: If training fails and `Faults.on_error` says `Raise`.
        """
        if self._measuring is None:
            self._measuring = self.executor if self.make_measuring is None else self.make_measuring(self)
        executor, processes = self._measuring, self.processes
        opened = OpenRound(self, executor, round_idx, units)

        def measure() -> list[ClientOutcome]:
            executor.begin_round()
            own = units[processes.rank :: processes.size]
            try:
                return list(self._estimating(opened.measured(own), len(own)))
            finally:
                executor.end_round()

        gathered = processes.gather_results(measure, ClientError)
        by_client = {outcome.client_id: outcome for part in gathered for outcome in part}
        for end in self.inward:
            end.note(list(by_client.values()))
        return [by_client[unit.client_id] for unit in units]

    def _estimating(self, outcomes: Iterable[ClientOutcome], count: int) -> Iterator[ClientOutcome]:
        """Say how long the first measurement of a fit will take, once a few clients are measured, if that is long."""
        start = 0.0
        for number, outcome in enumerate(outcomes):
            if number == 0:  # it also builds what all of them need
                start = time.perf_counter()
            elif number == TIMED and not self._has_measured and self.processes.rank == 0:
                seconds = (time.perf_counter() - start) / TIMED * count
                if seconds > LONG:
                    model = f" for model {self.model!r}" if self.model else ""
                    warn(
                        f"Measuring {count} clients{model} takes about {seconds / 60:.1f} minutes before every round. "
                        'Measure fewer, e.g. measure=100, or none: measure="last", which uses the last known figures.'
                    )
            yield outcome
        self._has_measured = True


class OpenRound:
    """One round, from reading the server's weights to the pseudo-gradient.

    Args:
        engine: Settings and state shared by all rounds.
        executor: Runs the device half.
        round_idx: Communication round, from 0.
        units: The units that take part, in the cohort's order.

    Attributes:
        num_examples: Number of examples of each, by its key.
        algorithm_round: The round as the algorithm opened it.
        outcomes: Outcomes of the units that this process has received.
        gathered: One outcome per unit of the cohort, in its order; empty before `gather`.
        failure: A failure in this process that is raised once all processes meet.
        fallen: What stands for the uploads of clients that cannot take part after all.
    """

    def __init__(self, engine: Engine, executor: Executor, round_idx: int, units: Iterable[WorkUnit]) -> None:
        self.engine, self.executor, self.round_idx = engine, executor, round_idx
        asked = tuple(units)
        weighed: Sequence[WorkUnit] = sorted(asked, key=lambda unit: unit.key)
        for end in engine.inward:
            weighed = end.weigh(weighed)
        self._unit_of = {unit.key: unit for unit in weighed}
        self.units = tuple(self._unit_of[unit.key] for unit in asked)
        sizes = engine.clients.sizes_of([unit.client_id for unit in self.units])
        self.num_examples = {unit.key: size for unit, size in zip(self.units, sizes, strict=True)}
        self.clock = StageClock(engine.profile)
        self.outcomes: list[ClientOutcome] = []
        self.gathered: tuple[ClientOutcome, ...] = ()
        self.failure: Exception | None = None
        self.fallen: dict[Key, Upload] = {}
        with self.clock.measure("refresh"), suspecting_weights(engine.half.server, round_idx):
            cohort = self.cohort = self._cohort()
            self.algorithm_round: Round = engine.half.open(cohort)
            for end in engine.inward:
                end.begin(Opened(self.algorithm_round, cohort))
            tasks = {unit: engine.task_of(self.algorithm_round, unit, cohort.capacity_of(unit)) for unit in self.units}
            self.simulated = engine.simulation.outcomes(round_idx, tasks)

    def _cohort(self) -> Cohort:
        """The units that the round is opened for, by capacity."""
        engine, groups = self.engine, defaultdict[float, list[WorkUnit]](list)
        for _, unit in sorted(self._unit_of.items()):
            groups[engine.clients.capacity_of(unit.client_id)].append(unit)
        units = {keep_ratio: tuple(group) for keep_ratio, group in groups.items()}
        shares = {key: size / max(engine.clients.num_examples, 1) for key, size in self.num_examples.items()}
        known = engine.processes, engine.store, engine.absolute, shares, engine.options()
        return Cohort(engine.seed, self.round_idx, units, *known)

    def send(self, unit: WorkUnit) -> tuple[Download, Receipt]:
        """Draw the download of one unit, and pass it through all filters, with the fields that all downloads share."""
        engine = self.engine
        with self.clock.measure("sample"), address(self.round_idx, unit, "sampling"):
            download, receipt = self.algorithm_round.send(unit)
        common = replace(
            download,
            round_idx=self.round_idx,
            **engine.length_of(unit.client_id),
            options=self.cohort.options,
            seed=engine.seed,
        )
        for end in engine.filters.values():
            try:
                common = end.send(common)
            except Unusable as why:
                failure = Failure("network", str(why)) if why.reason == "error" else None
                self.fallen[unit.key] = Upload(unit, {}, left_out=why.reason, failure=failure)
        return common, receipt

    def arrive(self, arrival: Arrival, ends: Iterable[ServerEnd]) -> Arrival:
        """Pass an update through some of the filters, and add it unless one holds it back.

        Raises:
            Unusable: If it must be left out; no part of it has been added then.
            SummandError: If what is computed from it cannot be summed, likewise.
        """
        for end in ends:
            arrival = end.arrive(arrival)
            if arrival.is_held:
                return arrival
        self.algorithm_round.add(arrival.receipt, arrival.upload)
        return arrival

    def agree(self, units: Iterable[WorkUnit]) -> None:
        """Let the clients of some units agree on what filters ask; call it before `play`, with the same units.

        Raises:
            RoundError: If too few of them do.
        """
        ends = [end for end in self.engine.filters.values() if type(end).agree is not ServerEnd.agree]
        if not ends:
            return
        own = [self._unit_of[unit.key] for unit in units]
        asked = [unit for unit in own if self.simulated.outcomes[unit.key].left_out != "no_data"]
        with self.containing_failures(None), self.clock.measure("sample"):
            for end in ends:
                end.agree(asked, self.executor.agree)

    def play(
        self,
        units: Iterable[WorkUnit],
        start: Callable[[Turn], object] = lambda turn: turn.send(),
        end: Callable[[Turn], object] = lambda turn: turn.receive(),
    ) -> None:
        """Play the turns of some units.

        Units are taken, and their downloads drawn, as the executor asks for them. So an executor that trains one client
        after another needs the memory of one download, however many there are. Uploads are received as they arrive.
        After a failure that is held back, no more turns begin.

        Args:
            units: Whose turns to play.
            start: Called when a client's download is due; it must send it.
            end: Called when a client's upload has arrived; it must receive it.

        Raises:
            ClientError: If a turn fails; with several processes, only when they meet.
        """
        waiting: dict[Key, Turn] = {}  # sent, and not back yet
        latest: WorkUnit | None = None

        def downloads() -> Iterator[Download]:
            """Send each client its download; one that will not report back has its whole turn here."""
            nonlocal latest
            for latest in (self._unit_of[unit.key] for unit in units):
                with self.containing_failures(latest):
                    turn = Turn(self, latest)
                    start(turn)
                    if turn.trains:
                        waiting[latest.key] = turn
                    else:
                        turn.accept(self.fallen.get(latest.key) or Upload(latest, {}, left_out=turn.simulated.left_out))
                        end(turn)
                if self.failure is not None:
                    return
                if turn.trains and turn.download is not None:
                    yield turn.download

        uploads = uploads_of(self.executor, downloads())
        while self.failure is None:
            try:
                upload = next(uploads, None)
            except Exception as error:  # of the executor, most likely about the latest download
                self.contain(error, latest)
                return
            if upload is None:
                return
            with self.containing_failures(upload.unit):
                if (turn := waiting.pop(upload.unit.key, None)) is None:
                    message = "its executor returned an upload that nobody waits for, or returned it twice."
                    raise client_error(self.round_idx, upload.unit, "", message)
                turn.accept(upload)
                end(turn)

    def measured(self, units: Iterable[WorkUnit]) -> Iterator[ClientOutcome]:
        """Train some units and discard their updates; see `Engine.measure`."""
        turns: dict[Key, Turn] = {}

        def downloads() -> Iterator[Download]:
            for unit in units:
                turn = turns[unit.key] = Turn(self, unit)
                turn.send()
                assert turn.download is not None, "only clients with data are measured"
                yield turn.download

        for upload in uploads_of(self.executor, downloads()):
            failure = upload.failure
            if failure is not None and self.engine.faults.ends_run("error"):
                raise client_error(self.round_idx, upload.unit, "measuring", failure.message) from failure.cause
            left_out = None if upload.left_out == "no_update" else upload.left_out  # its update is known: none
            turn = turns.pop(upload.unit.key)
            if upload.left_out is None:
                turn.measure(upload)
            outcome = turn.outcome(upload, left_out)
            yield replace(outcome, uplink_bytes=NUMBER, virtual_seconds=math.nan)

    @contextmanager
    def containing_failures(self, unit: WorkUnit | None) -> Iterator[None]:
        """Hold back a failure in the work for one unit, or all, until processes meet in `gather`, if there are several.

        If it were raised immediately, the others would wait for this process.
        """
        try:
            yield
        except Exception as error:
            self.contain(error, unit)

    def contain(self, error: Exception, unit: WorkUnit | None) -> None:
        """Hold back a failure like `containing_failures`; ``unit`` is whose work failed, if that is known."""
        if self.engine.processes.size == 1:
            raise error
        self.failure = error
        if not isinstance(error, ClientError | RoundError):
            self.failure = client_error(self.round_idx, unit, "", error)
            self.failure.__cause__ = error

    def gather(self) -> None:
        """Once all clients of this process are done, meet the others, check that enough are left, and add up the sums.

        Raises:
            ClientError: If a client failed in one of several processes; raised in all of them.
            RoundError: If too few clients are left, more were left out than `Faults` allows, or a client failed in one
                of several processes because the server's weights are not finite; raised in all of them.
        """
        ends = [end for end in self.engine.inward if type(end).collected is not ServerEnd.collected]
        if ends and self.failure is None:
            left_out = [outcome.left_out for outcome in self.outcomes if outcome.left_out]
            with self.containing_failures(None), self.clock.measure("aggregate"):
                for end in ends:
                    end.collected(left_out)
        self.executor.end_round()
        processes = self.engine.processes
        failure = None if self.failure is None else str(self.failure)
        gathered = processes.gather((failure, self.outcomes, self.clock.seconds))
        failures = [failure for failure, *_ in gathered]
        if any(failures):
            check_weights(self.engine.half.server, self.round_idx, self.failure)
        raise_everywhere(failures, self.failure, ClientError)
        self.clock.seconds = {stage: max(seconds[stage] for _, _, seconds in gathered) for stage in self.clock.seconds}
        by_key = {outcome.unit.key: outcome for _, outcomes, _ in gathered for outcome in outcomes}
        if missing := [named(unit) for unit in self.units if unit.key not in by_key]:
            raise RoundError(
                f"Round {self.round_idx}: nothing was received from {', '.join(missing)}; an executor must return an "
                "upload for every download."
            )
        outcomes = self.gathered = tuple(by_key[unit.key] for unit in self.units)
        self.engine.faults.check_round(self.round_idx, outcomes, smaller_updates(self.engine.half))
        if outcomes and not self._moves_server():
            why = ", ".join(f"{len(ids)} {reason}" for reason, ids in clients_by_reason(outcomes).items())
            warn(
                f"Round {self.round_idx}: no client is left to average ({why}); the server's weights are unchanged.", 3
            )
        if self.engine.is_private and len(outcomes) > 1 and all(outcome.left_out == "error" for outcome in outcomes):
            warn(
                f"Round {self.round_idx}: training fails on every client, so only noise is added. Train on data that "
                "is not secret, without the filter that hides clients, to see why.",
                3,
            )
        with self.clock.measure("aggregate"):
            self.add_up(processes)

    def add_up(self, processes: Peers) -> None:
        """Give every process what all of them have: all call this together."""
        failure: RoundError | None = None
        for place, end in enumerate(inward := self.engine.inward):
            for arrival in end.gather(processes):
                try:
                    self.arrive(arrival, inward[place + 1 :])
                except (OverflowError, Unusable) as error:  # too late to leave it out, and too early to raise it
                    which = f"{named(arrival.receipt.unit)}, which {type(end).__name__} has let pass"
                    failure = RoundError(f"Round {self.round_idx}, {which}: {error}; lower the learning rate.")
        if inward:
            raise_everywhere(processes.gather(None if failure is None else str(failure)), failure, RoundError)
        if processes.size > 1 and not self.engine.is_private:  # which has added up with noise
            add_up(processes, self.algorithm_round.sums)  # a round without `sums` is played in a single process

    def _moves_server(self) -> bool:
        """Whether the round changes the server: some client is left, none is needed, or it is private."""
        if not all(outcome.left_out for outcome in self.gathered):
            return True
        return self.engine.is_private or promises_of(self.engine.algorithm).steps_without_clients

    def apply(self) -> RoundSummary:
        """Turn the sums into pseudo-gradients, unless no client is left, and summarise the round."""
        engine, outcomes, figures = self.engine, self.gathered, dict[str, float]()
        if self._moves_server():
            with self.clock.measure("apply"):
                self.algorithm_round.close()
        for end in engine.inward:
            end.note(outcomes)
            found = end.close(outcomes)
            figures.update(found if end.releases or not engine.is_private else {})
        diagnostics = {**self.algorithm_round.observed().figures, **figures}
        if engine.is_private:
            return RoundSummary(self.round_idx, (), {}, diagnostics, {}, model=engine.model, is_private=True)
        if engine.conditions.clock is not None:
            diagnostics["virtual_seconds"] = self.simulated.seconds
        left_out = clients_by_reason(outcomes)
        reasons = engine.faults.exclusion_reasons(engine.conditions, self.executor.exclusion_reasons)
        counts = {reason: len(left_out.get(reason, ())) for reason in dict.fromkeys([*reasons, *left_out])}
        means = round_means(outcomes)
        seconds = dict(self.clock.seconds)
        return RoundSummary(self.round_idx, outcomes, seconds, diagnostics, means, counts, engine.model)


class Turn:
    """One unit's turn in a round.

    Attributes:
        num_examples: Number of the client's training examples.
        receipt: What the server keeps of the download.
        download: What it was sent; ``None`` before `send`, and if it has no data.
        upload: What it sent back; ``None`` before `accept`.
    """

    receipt: Receipt

    def __init__(self, opened: OpenRound, unit: WorkUnit) -> None:
        self.round, self.round_idx, self.unit = opened, opened.round_idx, unit
        self.num_examples = opened.num_examples[unit.key]
        self.simulated = opened.simulated.outcomes[unit.key]
        self.download: Download | None = None
        self.upload: Upload | None = None
        self._figures: dict[str, float] = {}

    def send(self) -> None:
        """Draw the client's download. A client without data says so beforehand and is sent nothing."""
        if self.simulated.left_out == "no_data":
            self.receipt = Receipt(self.unit, self.round.cohort.capacity_of(self.unit))
        else:
            self.download, self.receipt = self.round.send(self.unit)

    @property
    def trains(self) -> bool:
        """Whether the client trains: one that will not report back does not."""
        return self.download is not None and self.simulated.left_out is None and self.unit.key not in self.round.fallen

    @property
    def is_masked(self) -> bool:
        """Whether the client masks its update."""
        return self.download is not None and self.download.masking is not None

    def accept(self, upload: Upload) -> None:
        """Accept the upload of the client's device.

        Raises:
            ClientError: If the device failed and `Faults` does not allow the round to go on without it; failures to
                load or to collect are the algorithm's fault.
            RoundError: If the device failed because the server's weights are not finite.
        """
        self.round.clock.add(upload.seconds)
        if (failure := upload.failure) is not None:
            check_weights(self.round.engine.half.server, self.round_idx, failure.cause)
            is_clients = self.round.engine.is_private or failure.stage in ("local training", "network")
            if not is_clients or self.round.engine.faults.ends_run("error"):
                raise client_error(self.round_idx, self.unit, failure.stage, failure.message) from failure.cause
        if upload.lost_state and self.download is not None:
            warn(
                f"Round {self.round_idx}: the device of {named(self.unit)} no longer has what it kept in round "
                f"{self.download.last_turn}, so it begins as in its first turn. Keep such a device's state "
                "on its disk: ClientData(..., state_folder=...).",
                4,
            )
        if self.round.engine.is_private:  # names in the user's code are for warnings about it
            upload = replace(upload.without_figures(), discarded=upload.discarded, put_back=upload.put_back)
        self.upload = upload

    def receive(self) -> ClientOutcome:
        """Add the client's update to the round's sums; an update that cannot be used is left out, with a warning.

        Raises:
            ClientError: If it cannot be used and `Faults` says `Raise`.
            RoundError: If it is not finite because the server's weights are not.
        """
        assert self.upload is not None, "an upload is accepted before it is received"
        left_out = self.upload.left_out
        message = "" if self.upload.failure is None else self.upload.failure.message
        if left_out is None:
            with self.round.clock.measure("aggregate"), address(self.round_idx, self.unit, "aggregation"):
                left_out, message = self._add(self.upload)
        engine = self.round.engine
        if left_out is not None:
            if left_out == "not_finite":
                check_weights(engine.half.server, self.round_idx)
            what = f"{EXPLANATIONS[left_out]} ({message})" if message else EXPLANATIONS[left_out]
            if engine.faults.ends_run(left_out):
                raise ClientError(
                    f"Round {self.round_idx}, {named(self.unit)}: {what}; to go on without such clients, write "
                    f"faults=Faults(on_{left_out}=LeaveOut())."
                )
            # others are to be expected, and a private run says nothing of a client
            if left_out in ("error", "not_finite", "no_update") and not engine.is_private:
                warn(f"Round {self.round_idx}: {named(self.unit)} is left out of the average: {what}.", 3)
        outcome = self.outcome(self.upload, left_out)
        self.round.outcomes.append(outcome)
        return outcome

    def _add(self, upload: Upload) -> tuple[ExclusionReason | None, str]:
        """Add an upload, or say why it cannot be summed; in that case no part of it has been added."""
        assert self.download is not None, "a client that was sent nothing returns nothing"
        try:
            arrival = self.round.arrive(Arrival(self.receipt, self.download, upload), self.round.engine.inward)
        except Unusable as why:
            return why.reason, str(why)
        except SummandError as error:
            return "not_finite", str(error)
        self._figures = dict(arrival.figures)
        for end in self.round.engine.inward:
            self._figures |= end.figures(self.unit)
            end.added(arrival)
        return None, ""

    def measure(self, upload: Upload) -> None:
        """Take the norm of an update that is discarded, if the sampler needs it and the update is finite."""
        assert self.download is not None, "a client that was sent nothing returns nothing"
        arrival = Arrival(self.receipt, self.download, upload)
        with suppress(Unusable):
            for end in self.round.engine.inward:
                if NORM in arrival.figures or "update" not in self.round.engine.figure:
                    break
                arrival = end.arrive(arrival)
        self._figures = dict(arrival.figures)

    def outcome(self, upload: Upload, left_out: ExclusionReason | None) -> ClientOutcome:
        """The outcome of the turn, given its upload and why that is left out of the average, if it is."""
        sent = downloads_sent(self.download, upload)
        return ClientOutcome(
            round_idx=self.round_idx,
            unit=self.unit,
            keep_ratio=self.receipt.capacity,
            num_examples=self.num_examples,
            num_steps=upload.num_steps,
            loss=upload.loss,
            downlink_bytes=sum(download.num_bytes for download in sent),
            frozen_bytes=sum(download.frozen_bytes for download in sent),
            uplink_bytes=upload.num_bytes,
            left_out=left_out,
            logged=upload.logged if left_out is None else {},
            virtual_seconds=self.simulated.seconds,
            unreached=upload.unreached,
            discarded=upload.discarded,
            missing=upload.missing,
            put_back=upload.put_back,
            figures=self._figures if left_out is None else {},
            seconds=math.fsum(upload.seconds.values()) if upload.seconds else math.nan,
        )


def uploads_of(executor: Executor, downloads: Iterable[Download]) -> Iterator[Upload]:
    """Yield one upload for each download, as they arrive; downloads are drawn as the executor takes them.

    A device that lost frozen tensors is sent the same download once more, with all of them, after the others have
    answered. Its upload then names what was missing.
    """
    incomplete: dict[Key, Download] = {}
    missing: dict[Key, tuple[str, ...]] = {}
    again: list[Download] = []

    def noted() -> Iterator[Download]:
        for download in downloads:
            if download.held:
                incomplete[download.unit.key] = download
            yield download

    for upload in executor.run(noted()):
        download = incomplete.pop(upload.unit.key, None)
        if not upload.missing:
            yield upload
        elif download is None:
            what = f"the device says that it lacks {', '.join(upload.missing)}, which came with this download."
            yield Upload(upload.unit, {}, left_out="error", failure=Failure("loading", what))
        else:
            missing[upload.unit.key] = upload.missing
            again.append(replace(download, held=frozenset()))
    if again:
        for upload in uploads_of(executor, again):
            yield replace(upload, missing=missing.get(upload.unit.key, ()))


def downloads_sent(download: Download | None, upload: Upload) -> list[Download]:
    """The downloads that an upload answers: two if the device had lost frozen tensors, none if it was not asked."""
    if download is None:
        return []
    return [download, replace(download, held=frozenset())] if upload.missing else [download]


@contextmanager
def address(round_idx: int, unit: WorkUnit, stage: str) -> Iterator[None]:
    """Raise any failure within the block as a `ClientError` that names the round, the client and the stage."""
    try:
        yield
    except Exception as error:
        raise client_error(round_idx, unit, stage, error) from error


def client_error(round_idx: int, unit: WorkUnit | None, stage: str, error: Exception | str) -> ClientError:
    """Create an error whose message begins with where it happened."""
    what = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
    who = "" if unit is None else f", {named(unit)}"
    return ClientError(f"Round {round_idx}{who}{stage and f', {stage}'}: {what}")


def named(unit: WorkUnit) -> str:
    """Name a unit in a message.

    Example:
        >>> named(WorkUnit(3)), named(WorkUnit(3, "words"))
        ('client 3', "client 3, model 'words'")
    """
    return f"client {unit.client_id}" + (f", model {unit.model!r}" if unit.model else "")


def listed(units: Sequence[WorkUnit]) -> str:
    """Name several candidates, in a message.

    Example:
        >>> listed([WorkUnit(3), WorkUnit(5), WorkUnit(4)]), listed([])
        ('client 3, client 5 or client 4', 'idle')
    """
    names = [named(unit) for unit in units[:LISTED]] or ["idle"]
    *others, last = names if len(units) <= LISTED else [*names, f"{len(units) - LISTED} others"]
    return f"{', '.join(others)} or {last}" if others else last
