"""One open round: who takes part, what is sent, and how the sums become a pseudo-gradient."""

from __future__ import annotations

import math
import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TypeVar

from lightning_spectral.algorithms.base import Round
from lightning_spectral.errors import ClientError, RoundError, SpectralWarning
from lightning_spectral.protocol.cohort import Cohort
from lightning_spectral.protocol.exchange import load_tensors, select_tensors
from lightning_spectral.protocol.records import ClientOutcome, Download, Receipt, RoundSummary, Upload, WorkUnit
from lightning_spectral.protocol.stage_clock import STAGES, StageClock
from lightning_spectral.server.advice import check_weights, smaller_updates, suspecting_weights
from lightning_spectral.server.executor import Executor
from lightning_spectral.server.fault_policy import clients_by_reason
from lightning_spectral.server.metrics import round_means
from lightning_spectral.server.processes import raise_everywhere
from lightning_spectral.server.run import Run, SubModelSize
from lightning_spectral.server.update_norms import update_norm
from lightning_spectral.simulation import SimulatedTask
from lightning_spectral.sums import Extremes, add_up
from lightning_spectral.sums.exact_mean import Peers

RecordT = TypeVar("RecordT", Download, Upload)

LISTED = 9  # further units are counted in messages


class OpenRound:
    """One round of a run, from reading the server's weights to the pseudo-gradient.

    Args:
        run: Settings and state shared by all rounds.
        executor: Runs the device half.
        round_idx: Communication round, from 0.
        units: The units that take part, in the cohort's order.

    Attributes:
        num_examples: Number of examples of each, by its key.
        opened: The round as the algorithm opened it.
        extremes: The clients' smallest or largest values of the buffers that follow them.
        outcomes: Outcomes of the units that this process has received.
        gathered: One outcome per unit of the cohort, in its order; empty before `gather`.
        failure: A failure in this process that is raised once all processes meet.
    """

    def __init__(self, run: Run, executor: Executor, round_idx: int, units: Iterable[WorkUnit]) -> None:
        self.run = run
        self.executor = executor
        self.round_idx = round_idx
        self.units = tuple(units)
        sizes = run.clients.sizes_of([unit.client_id for unit in self.units])
        self.num_examples = {unit.key: size for unit, size in zip(self.units, sizes, strict=True)}
        self.clock = StageClock(run.profile)
        self.outcomes: list[ClientOutcome] = []
        self.gathered: tuple[ClientOutcome, ...] = ()
        self.failure: Exception | None = None
        self._options = run.options()
        run.store.discard()
        with self.clock.measure("refresh"), suspecting_weights(run.server, round_idx):
            self.cohort = self._cohort()
            run.frozen_base.refresh(run.half.frozen_tensors())
            self.opened: Round = run.half.open(self.cohort)
            limits = run.half.buffers.limits
            self.extremes = Extremes(select_tensors(run.server, limits), limits)
            tasks = {unit: self._simulated_task(unit) for unit in self.units}
            self.simulated = run.simulation.outcomes(round_idx, tasks)

    def _cohort(self) -> Cohort:
        groups: dict[float, list[WorkUnit]] = defaultdict(list)
        for unit in sorted(self.units, key=lambda unit: unit.key):
            groups[self.run.clients.capacity_of(unit.client_id)].append(unit)
        units = {keep_ratio: tuple(group) for keep_ratio, group in groups.items()}
        run = self.run
        shares = {key: size / max(run.clients.num_examples, 1) for key, size in self.num_examples.items()}
        return Cohort(run.seed, self.round_idx, units, run.processes, run.store, run.absolute, shares)

    def _simulated_task(self, unit: WorkUnit) -> SimulatedTask:
        """The task of a client for the simulation; only a virtual clock needs the size of its sub-model."""
        run, size = self.run, SubModelSize()
        if run.conditions.clock is not None:
            size = run.sizes.of(run.half, self.opened, unit, self.cohort.keep_ratio_of(unit))
            size = size._replace(downlink_bytes=size.downlink_bytes - run.frozen_base.bytes_held_by(unit))
        num_examples = run.clients.epoch_of(unit.client_id)
        return SimulatedTask(self.cohort.keep_ratio_of(unit), num_examples, run.local_epochs, *size)

    def send(self, unit: WorkUnit) -> tuple[Download, Receipt]:
        """Draw the download of one unit, and complete it with the fields that all downloads share."""
        with self.clock.measure("sample"), address(self.round_idx, unit, "sampling"):
            download, receipt = self.opened.send(unit)
        run = self.run
        common = replace(
            download,
            round_idx=self.round_idx,
            local_epochs=run.local_epochs,
            options=self._options,
            seed=run.seed,
        )
        return run.frozen_base.mark(common) if run.frozen_base.digests else common, receipt

    def averaged(self, receipt: Receipt, record: RecordT) -> RecordT:
        """A download or an upload without values that follow no average."""
        rules = self.run.half.buffers
        if not rules.limits:
            return record
        return replace(record, tensors=rules.averaged(record.tensors, self.opened.positions(receipt)))

    def add_extremes(self, receipt: Receipt, upload: Upload) -> None:
        """Note the smallest or largest values of the buffers that follow them, of an upload that is averaged."""
        if self.run.half.buffers.limits:
            self.extremes.add(upload.tensors, self.opened.positions(receipt))

    def update_norm(self, receipt: Receipt, download: Download | None, upload: Upload) -> float:
        """Norm of one unit's update if this run's sampler or its bound uses it, NaN otherwise."""
        is_used = self.run.update_bound is not None or self.run.figure in ("update", "stale update")
        if download is None or not is_used:
            return math.nan
        expected = None
        if self.run.figure == "stale update":
            expected = self.opened.expected_update(upload.unit)
        sent, returned = self.averaged(receipt, download), self.averaged(receipt, upload)
        return update_norm(sent.tensors, returned.tensors, expected)

    @contextmanager
    def containing_failures(self, unit: WorkUnit) -> Iterator[None]:
        """Hold back a failure in the work for one unit until all processes meet in `gather`, if there are several.

        If it were raised immediately, the others would wait for this process.
        """
        try:
            yield
        except Exception as error:
            self.contain(error, unit)

    def contain(self, error: Exception, unit: WorkUnit | None) -> None:
        """Hold back a failure like `containing_failures`; ``unit`` is whose work failed, if that is known."""
        if self.run.processes.size == 1:
            raise error
        self.failure = error
        if not isinstance(error, ClientError):
            self.failure = client_error(self.round_idx, unit, "", error)
            self.failure.__cause__ = error

    def gather(self) -> None:
        """Add up the sums of all processes, and check that enough clients are in them.

        Raises:
            ClientError: If a client failed in one of several processes; raised in all of them.
            RoundError: If more clients were left out than `Faults` allows, or a client failed in one of several
                processes because the server's weights are not finite; raised in all of them.
        """
        outcomes = self.gathered = self._meet()
        self.run.faults.check_round(self.round_idx, outcomes, smaller_updates(self.run.half))
        if outcomes and not self._moves(outcomes):
            _warn_no_client_left(self.round_idx, outcomes)
        else:
            with self.clock.measure("aggregate"):
                if self.run.processes.size > 1:  # a round without `sums` is played in a single process
                    self.add_up(self.run.processes)

    def add_up(self, processes: Peers) -> None:
        """Give every process the sums and the extremes over all processes."""
        add_up(processes, self.opened.sums)
        self.extremes.gather(processes)

    def _meet(self) -> tuple[ClientOutcome, ...]:
        """Exchange the outcomes of all processes; raise an error in each of them if one failed."""
        processes, store = self.run.processes, self.run.store
        failure = None if self.failure is None else str(self.failure)
        written = store.written() if processes.size > 1 else {}
        gathered = processes.gather((failure, self.outcomes, self.clock.seconds, written))
        failures = [failure for failure, *_ in gathered]
        if any(failures):
            check_weights(self.run.server, self.round_idx, self.failure)
        raise_everywhere(failures, self.failure, ClientError)
        self.clock.seconds = {stage: max(seconds[stage] for _, _, seconds, _ in gathered) for stage in STAGES}
        for rank, (*_, written) in enumerate(gathered):
            if rank != processes.rank:
                store.merge(written)
        outcomes = [outcome for _, outcomes, _, _ in gathered for outcome in outcomes]
        return self._in_order({outcome.unit.key: outcome for outcome in outcomes})

    def _in_order(self, outcomes: Mapping[tuple[int, str], ClientOutcome]) -> tuple[ClientOutcome, ...]:
        """One outcome per unit, in the cohort's order; none may be missing."""
        if missing := [named(unit) for unit in self.units if unit.key not in outcomes]:
            raise RoundError(
                f"Round {self.round_idx}: nothing was received from {', '.join(missing)}; an executor must return an "
                "upload for every download."
            )
        return tuple(outcomes[unit.key] for unit in self.units)

    def _moves(self, outcomes: Sequence[ClientOutcome]) -> bool:
        """Whether the round changes the server: some client is left, or none is needed."""
        return self.run.algorithm.steps_without_clients or not all(outcome.left_out for outcome in outcomes)

    def apply(self) -> RoundSummary:
        """Turn the sums into pseudo-gradients, unless no client is left, and summarise the round."""
        run, outcomes = self.run, self.gathered
        if self._moves(outcomes):
            with self.clock.measure("apply"):
                self.opened.close()
                load_tensors(run.server, dict(self.extremes.finish()))
        diagnostics = dict(self.opened.metrics())
        if run.conditions.clock is not None:
            diagnostics["virtual_seconds"] = self.simulated.seconds
        run.store.commit()
        run.frozen_base.note_outcomes(outcomes)
        run.frozen_base.commit()
        if run.update_bound is not None:
            diagnostics["clients_bounded"] = float(sum(outcome.is_bounded for outcome in outcomes))
        if len(run.store):
            diagnostics["store_bytes"] = float(run.store.num_bytes)
        left_out = clients_by_reason(outcomes)
        reasons = run.faults.exclusion_reasons(run.conditions, self.executor.exclusion_reasons)
        counts = {reason: len(left_out.get(reason, ())) for reason in reasons}
        means = round_means(outcomes)
        seconds = dict(self.clock.seconds)
        return RoundSummary(self.round_idx, outcomes, seconds, diagnostics, means, counts, run.model)


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
    """Name those of whom it may be one, in a message.

    Example:
        >>> listed([WorkUnit(3), WorkUnit(5), WorkUnit(4)]), listed([])
        ('client 3, client 5 or client 4', 'idle')
    """
    names = [named(unit) for unit in units[:LISTED]] or ["idle"]
    *others, last = names if len(units) <= LISTED else [*names, f"{len(units) - LISTED} others"]
    return f"{', '.join(others)} or {last}" if others else last


def _warn_no_client_left(round_idx: int, outcomes: Sequence[ClientOutcome]) -> None:
    why = ", ".join(f"{len(ids)} {reason}" for reason, ids in clients_by_reason(outcomes).items())
    warnings.warn(
        f"Round {round_idx}: no client is left to average ({why}); the server's weights are unchanged.",
        SpectralWarning,
        stacklevel=4,
    )
