"""Determines which clients take part in each round, and which of them this process trains."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import cast

import lightning.pytorch as pl
from torch import Tensor

from lightning_spectral.algorithms import Algorithm
from lightning_spectral.participation import Population, Sampler, UniformParticipation
from lightning_spectral.plugin.client_parallel import processes_of
from lightning_spectral.plugin.data import FederatedDataModule
from lightning_spectral.plugin.host import Share
from lightning_spectral.plugin.member import Member
from lightning_spectral.plugin.sampler_checks import check_limit, check_measurable, check_sampler
from lightning_spectral.plugin.stages import stage_profile
from lightning_spectral.protocol.records import RoundSummary
from lightning_spectral.protocol.rng import derived_generator
from lightning_spectral.protocol.work_unit import WorkUnit
from lightning_spectral.server import scheduling
from lightning_spectral.server.client_directory import ClientDirectory
from lightning_spectral.server.measuring import measure_figures
from lightning_spectral.server.processes import Processes
from lightning_spectral.server.run import Figure
from lightning_spectral.server.sampled_cohorts import SampledCohorts
from lightning_spectral.sums.weights import MOST_TERMS


class CohortHooks(pl.LightningModule):
    """The planning half of a federation: cohorts, drawn uniformly or by a sampler, and how processes share them."""

    seed: int
    participation: UniformParticipation | Sampler | None
    _limit: int | float
    _sampled: SampledCohorts | None

    @property
    def members(self) -> Mapping[str, Member]:
        """The models of the federation by name."""
        raise NotImplementedError

    def data_of(self, name: str) -> FederatedDataModule:
        """The data of one model's clients."""
        raise NotImplementedError

    def population(self) -> Population:
        """Which client can train which model."""
        raise NotImplementedError

    @property
    def by_key(self) -> Mapping[str, Member]:
        """The models by their names in work units."""
        return {member.seat.key: member for member in self.members.values()}

    @property
    def processes(self) -> Processes:
        """The processes that train the clients of a round; several with ``strategy="client_parallel"``."""
        return processes_of(self.trainer)

    @property
    def coefficients_are_absolute(self) -> bool:
        """Whether coefficients are used as they are, which holds for those of an unbiased sampler."""
        return isinstance(self.participation, Sampler) and not self.participation.normalize

    def clients_of(self, name: str, algorithm: Algorithm) -> ClientDirectory:
        """What is known of one model's clients, with the capacities that an algorithm gives them."""
        data = self.data_of(name)
        capacities = algorithm.keep_ratios(data.num_clients, self.members[name].seed)
        return data.client_directory(capacities, self.available_for(name))

    def available_for(self, name: str) -> Tensor | None:
        """Whether each client can train a model, if it has examples of it; ``None`` if all can."""
        return None

    @property
    def sampler_figure(self) -> Figure:
        """The figure on which the sampler is based."""
        return self.participation.figure if isinstance(self.participation, Sampler) else ""

    def cut_cohort(self, limit: int | float) -> None:
        """Begin a fit: limit each cohort to a number or a share of clients, Lightning's ``limit_train_batches``."""
        self._limit, self._sampled = limit, None
        if isinstance(self.participation, Sampler):
            check_sampler(self.participation, {name: member.algorithm for name, member in self.members.items()})
            check_limit(limit, self.trainer)
            check_measurable(self.participation, {name: member.module for name, member in self.members.items()})
            keys = [member.seat.key for member in self.members.values()]
            self._sampled = SampledCohorts(self.participation, self.population(), keys, self.seed)
        if limit and not self._most_units:
            raise ValueError(f"limit_train_batches={limit} of {self._usual_size} clients trains none; raise it.")
        if self._most_units > (most := MOST_TERMS * len(self.members)):
            raise ValueError(
                f"A round's updates are summed exactly, which has room for {MOST_TERMS} clients per model; "
                f"{self._most_units} turns a round are more than {most}. Lower the sampler's `active`."
            )

    @property
    def _usual_size(self) -> int:
        """Number of units in a round; if it is random, a number that is hardly ever exceeded."""
        if self._sampled is not None:
            return self._sampled.usual_size
        if self.participation is None:
            raise ValueError(
                f"{type(self).__name__} does not know who takes part in a round; give it `clients_per_round=10`, or "
                "`participation=LossVarianceReduced(active=10)`."
            )
        return cast(UniformParticipation, self.participation).clients_per_round

    @property
    def _most_units(self) -> int:
        size, limit = self._usual_size, self._limit
        return min(size, limit) if isinstance(limit, int) else int(size * limit)

    def cohort(self, round_idx: int) -> list[WorkUnit]:
        """The units of a round, as a pure function of the seed, the round and what the sampler has seen."""
        if self._sampled is None:
            with stage_profile(self.trainer, "plan"):
                return self._uniform_cohort(round_idx)[: self._most_units]
        if not self._sampled.has_drawn(round_idx):
            with stage_profile(self.trainer, "plan"):
                self._measure(self._sampled, round_idx)
                is_cut = self._limit != 1.0 or isinstance(self._limit, int)  # only in a quick try
                self._sampled.draw(round_idx, self._most_units if is_cut else None)
        return self._sampled.units

    def _uniform_cohort(self, round_idx: int) -> list[WorkUnit]:
        (member,) = self.members.values()
        generator = derived_generator(self.seed, "participation", round_idx)
        participation = cast(UniformParticipation, self.participation)
        clients = member.engine.run.clients
        ids = participation.cohort(clients.num_clients, generator).tolist()
        return [
            WorkUnit(client_id, coefficient=size) for client_id, size in zip(ids, clients.sizes_of(ids), strict=True)
        ]

    def _measure(self, sampled: SampledCohorts, round_idx: int) -> None:
        """Measure the figures that the sampler is based on, for those clients that are due to be measured."""
        for index, member in enumerate(self.members.values()):
            if units := sampled.due(round_idx, index):
                outcomes = measure_figures(member.engine, round_idx, units)
                sampled.note_measured(index, outcomes)

    def note_round(self, index: int, summary: RoundSummary) -> RoundSummary:
        """Let the sampler learn from a round of one model, and add its diagnostics to the round's summary."""
        if self._sampled is None:
            return summary
        own = self._sampled.diagnostics(index, summary.clients)
        measured = self._sampled.measured(index)
        self._sampled.note(index, summary.clients)
        return replace(summary, diagnostics={**summary.diagnostics, **own}, measured=measured)

    def share(self, round_idx: int) -> Share:
        """The clients that this process trains in a round, and those of the others."""
        units, processes = self.cohort(round_idx), self.processes
        work = [self._work(unit) for unit in units] if processes.size > 1 else []
        return Share(round_idx, scheduling.shares(units, work, processes.size), processes.rank)

    def _work(self, unit: WorkUnit) -> float:
        """Predicted time of a unit's turn; with several models, it takes their sizes into account."""
        member = self.by_key[unit.model]
        clients = member.engine.run.clients
        work = scheduling.predicted_work(clients.epoch_of(unit.client_id), clients.capacity_of(unit.client_id))
        return work if len(self.members) == 1 else work * sum(p.numel() for p in member.module.parameters())
