"""Determines which clients take part in each round, and which of them this process trains."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import cast

from lightning_spectral.participation import Sampler, UniformParticipation
from lightning_spectral.plugin.checks.sampler import check_measurable, check_sampler
from lightning_spectral.plugin.federation.interfaces import Plan, Runtime
from lightning_spectral.plugin.federation.member import Member
from lightning_spectral.plugin.host import Share
from lightning_spectral.protocol.records import RoundSummary, WorkUnit
from lightning_spectral.protocol.rng import derived_generator
from lightning_spectral.server.measuring import measure_figures
from lightning_spectral.server.processes import predicted_work, shares
from lightning_spectral.server.sampled_cohorts import SampledCohorts
from lightning_spectral.sums.exact_mean import MOST_TERMS


class Cohorts:
    """The cohorts of a federation's fits, drawn uniformly or by a sampler.

    Args:
        plan: Who takes part, and who could.
        members: The models by name.
        runtime: Whatever runs the rounds.

    Attributes:
        sampled: The sampler's cohorts, in a fit that has a sampler.
    """

    def __init__(self, plan: Plan, members: Mapping[str, Member], runtime: Runtime) -> None:
        self._plan, self._members, self._runtime = plan, members, runtime
        self.limit: int | float = 1.0
        self.sampled: SampledCohorts | None = None
        self._resumed: tuple[int, list[WorkUnit]] = -1, []

    def begin(self, limit: int | float) -> None:
        """Begin a fit: limit each cohort to a number of clients, or to a share of it.

        Raises:
            ValueError: If nobody would train, or more than can be summed exactly.
        """
        self.limit, self.sampled, self._resumed = limit, None, (-1, [])
        sampler = self._plan.participation
        if isinstance(sampler, Sampler):
            check_sampler(sampler, {name: member.owner.algorithm for name, member in self._members.items()})
            check_measurable(sampler, {name: member.owner.module for name, member in self._members.items()})
            keys = [member.key for member in self._members.values()]
            self.sampled = SampledCohorts(sampler, self._plan.population(), keys, self._plan.seed)
        if limit and not self._most_units:
            raise ValueError(f"limit_train_batches={limit} of {self.usual_size} clients trains none; raise it.")
        if self._most_units > (most := MOST_TERMS * len(self._members)):
            raise ValueError(
                f"A round must have at most {most} turns, so that its updates can be summed exactly, got "
                f"{self._most_units}; lower the sampler's `active`."
            )

    @property
    def usual_size(self) -> int:
        """Number of units in a round; if it is random, a number that is hardly ever exceeded."""
        if self.sampled is not None:
            return self.sampled.usual_size
        if self._plan.participation is None:
            raise ValueError(
                "FederatedModule does not know who takes part in a round; give it `clients_per_round=10`, or "
                "`participation=LossVarianceReduced(active=10)`."
            )
        return cast(UniformParticipation, self._plan.participation).clients_per_round

    @property
    def _most_units(self) -> int:
        size, limit = self.usual_size, self.limit
        return min(size, limit) if isinstance(limit, int) else int(size * limit)

    def units(self, round_idx: int) -> list[WorkUnit]:
        """The units of a round, as a pure function of the seed, the round and what the sampler has seen."""
        for member in self._members.values():
            if (engine := member.engine_or_none) is not None:  # with a sampler, cohorts can be drawn without a fit
                engine.run.clients.begin_round(round_idx)
        if self._resumed[0] == round_idx:
            return self._resumed[1]
        if self.sampled is None:
            with self._runtime.profile("plan"):
                return self._uniform(round_idx)[: self._most_units]
        if not self.sampled.has_drawn(round_idx):
            with self._runtime.profile("plan"):
                self._measure(self.sampled, round_idx)
                is_cut = self.limit != 1.0 or isinstance(self.limit, int)  # only in a quick try
                self.sampled.draw(round_idx, self._most_units if is_cut else None)
        return self.sampled.units

    def resume(self, round_idx: int, units: Sequence[WorkUnit]) -> None:
        """Restore the cohort of a round whose servers have stepped: measured and drawn now, it would be another one."""
        self._resumed = round_idx, list(units)

    def _uniform(self, round_idx: int) -> list[WorkUnit]:
        (member,) = self._members.values()
        generator = derived_generator(self._plan.seed, "participation", round_idx)
        participation = cast(UniformParticipation, self._plan.participation)
        clients = member.engine.run.clients
        ids = participation.cohort(clients.num_clients, generator).tolist()
        return [
            WorkUnit(client_id, coefficient=size) for client_id, size in zip(ids, clients.sizes_of(ids), strict=True)
        ]

    def _measure(self, sampled: SampledCohorts, round_idx: int) -> None:
        """Measure the figures that the sampler is based on, for those clients that are due to be measured."""
        for index, member in enumerate(self._members.values()):
            if units := sampled.due(round_idx, index):
                sampled.note_measured(index, measure_figures(member.engine, round_idx, units))

    def note(self, index: int, summary: RoundSummary) -> RoundSummary:
        """Let the sampler learn from a round of one model, and add its diagnostics to the round's summary."""
        if self.sampled is None:
            return summary
        own = self.sampled.diagnostics(index, summary.clients)
        measured = self.sampled.measured(index)
        self.sampled.note(index, summary.clients)
        return replace(summary, diagnostics={**summary.diagnostics, **own}, measured=measured)

    def share(self, round_idx: int) -> Share:
        """The clients that this process trains in a round, and those of the others."""
        return self.share_of(round_idx, self.units(round_idx))

    def share_of(self, round_idx: int, units: Sequence[WorkUnit]) -> Share:
        """The units that this process takes of those of a round."""
        processes = self._runtime.processes
        work = self._work(units) if processes.size > 1 else []
        return Share(round_idx, shares(units, work, processes.size), processes.rank)

    def _work(self, units: Sequence[WorkUnit]) -> list[float]:
        """Predicted time of each unit's turn; with several models, it takes their sizes into account."""
        by_key = {member.key: member for member in self._members.values()}
        return [self._work_of(by_key[unit.model], unit) for unit in units]

    def _work_of(self, member: Member, unit: WorkUnit) -> float:
        clients = member.engine.run.clients
        work = predicted_work(clients.epoch_of(unit.client_id), clients.capacity_of(unit.client_id))
        return work if len(self._members) == 1 else work * sum(p.numel() for p in member.owner.module.parameters())
