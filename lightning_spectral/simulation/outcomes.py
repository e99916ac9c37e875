"""Which clients of a round report back, and when: decided before training, so that no client trains in vain."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import partial

from lightning_spectral.arguments import Number, check_fields
from lightning_spectral.errors import check_is
from lightning_spectral.protocol.per_client import Assigned, PerClient, assign, check_num_entries, check_per_client
from lightning_spectral.protocol.records import ExclusionReason, WorkUnit
from lightning_spectral.protocol.rng import derived_seed
from lightning_spectral.simulation.clock import DeviceProfile, SimulatedTask, VirtualClock

__all__ = ["ClientDropout", "Conditions", "SimulatedOutcome", "SimulatedRound", "Simulation", "drops_out"]


@dataclass(frozen=True)
class ClientDropout:
    """Makes clients drop out of rounds: such a client is sent its sub-model, trains nothing and returns nothing.

    Whether a client drops out depends only on the run's seed, the round and the client, not on who else takes part or
    where a run was resumed.

    Args:
        probability: Probability p of dropping out of a round, in [0, 1]: one for all clients; ``{probability: share of
            clients}``; or one per client.

    Example:
        >>> dropout = ClientDropout({0.0: 0.5, 0.5: 0.5})  # half of the clients are on mains power
        >>> [dropout.assign(num_clients=6, seed=0).of(client_id) for client_id in range(6)]
        [0.5, 0.5, 0.5, 0.0, 0.0, 0.0]
    """

    probability: PerClient[float]

    def __post_init__(self) -> None:
        check_fields(self, probability=partial(check_per_client, rule=Number(at_least=0, at_most=1)))

    def check(self, num_clients: int) -> None:
        """Raise ``ValueError`` if probabilities are listed for another number of clients."""
        check_num_entries("probability", self.probability, num_clients)

    def assign(self, num_clients: int, seed: int) -> Assigned[float]:
        """Each client's probability, the same in every round."""
        return assign(self.probability, num_clients, seed, "dropout probability")


def drops_out(probability: float, seed: int, round_idx: int, unit: WorkUnit) -> bool:
    """Whether a unit drops out of a round: an independent draw for each unit and round.

    Example:
        >>> sum(drops_out(0.25, 0, 0, WorkUnit(client_id)) for client_id in range(1000))
        250
    """
    # a derived seed is a uniform integer below 2**63: no generator is needed for a single draw
    return derived_seed(seed, "client dropout", round_idx, *unit.ids) < probability * 2**63


Key = tuple[int, str]


@dataclass(frozen=True)
class SimulatedOutcome:
    """Whether a unit reports back in a round, and when.

    Attributes:
        left_out: Why its update will not be used; ``None`` if it is to train.
        seconds: When it finishes, by the virtual clock; NaN without a clock, or if it never finishes.
    """

    left_out: ExclusionReason | None = None
    seconds: float = math.nan


@dataclass(frozen=True)
class SimulatedRound:
    """The outcomes of all units of a round.

    Attributes:
        outcomes: One for each unit, by `WorkUnit.key`.
        seconds: Duration of the round by the virtual clock; NaN without one.
    """

    outcomes: Mapping[Key, SimulatedOutcome] = field(default_factory=dict)
    seconds: float = math.nan


@dataclass(frozen=True)
class Simulation:
    """Dropout and device speed of the clients of one run; see `Conditions.prepare`.

    Attributes:
        seed: The run's seed.
        probabilities: Each client's probability of dropping out; ``None`` if none do.
        clock: Maps a device and a task to seconds; ``None`` if time plays no part.
        profiles: Each client's device; ``None`` without a clock.
    """

    seed: int
    probabilities: Assigned[float] | None = None
    clock: VirtualClock | None = None
    profiles: Assigned[DeviceProfile] | None = None

    def outcomes(self, round_idx: int, tasks: Mapping[WorkUnit, SimulatedTask]) -> SimulatedRound:
        """The outcome of each unit: a pure function of the arguments, whatever the order of ``tasks``.

        A client without data reports so at once; one that drops out never reports. Of the others, in the order in which
        they finish, the first `VirtualClock.keep_first` are kept, unless they are late.
        """
        outcomes = {unit.key: self._outcome_alone(round_idx, unit, task) for unit, task in tasks.items()}
        if self.clock is None:
            return SimulatedRound(outcomes)
        if self.clock.keep_first is not None:
            finished = [unit for unit in tasks if outcomes[unit.key].left_out is None]
            finished.sort(key=lambda unit: (outcomes[unit.key].seconds, self._tie_break(round_idx, unit)))
            for unit in finished[self.clock.keep_first :]:
                outcomes[unit.key] = SimulatedOutcome("surplus", outcomes[unit.key].seconds)
        return SimulatedRound(outcomes, _round_seconds(self.clock, outcomes.values()))

    def _outcome_alone(self, round_idx: int, unit: WorkUnit, task: SimulatedTask) -> SimulatedOutcome:
        """The outcome as far as it depends on this unit alone: everything but being surplus."""
        if task.num_examples == 0:
            return SimulatedOutcome("no_data")
        chance = 0.0 if self.probabilities is None else self.probabilities.of(unit.client_id)
        if drops_out(chance, self.seed, round_idx, unit):
            return SimulatedOutcome("dropped_out")
        if self.clock is None or self.profiles is None:
            return SimulatedOutcome()
        seconds = self.clock.seconds(self.profiles.of(unit.client_id), task)
        return SimulatedOutcome("late" if seconds > self.clock.deadline else None, seconds)

    def _tie_break(self, round_idx: int, unit: WorkUnit) -> int:
        """Order among devices that finish at the same time: drawn, so that it does not depend on client ids."""
        return derived_seed(self.seed, "photo finish", round_idx, *unit.ids)


def _round_seconds(clock: VirtualClock, outcomes: Collection[SimulatedOutcome]) -> float:
    """When the server stops waiting: it has all or enough, or the deadline has passed."""
    kept = [outcome.seconds for outcome in outcomes if outcome.left_out is None]
    is_enough = clock.keep_first is not None and len(kept) >= clock.keep_first
    is_missed = any(outcome.left_out in ("dropped_out", "late") for outcome in outcomes)
    if is_missed and not is_enough and clock.deadline < math.inf:
        return clock.deadline
    return max(kept, default=0.0)


@dataclass(frozen=True)
class Conditions:
    """The user's choice of simulated dropout and device speed.

    Attributes:
        dropout: Which clients drop out; ``None`` if none do.
        clock: How long clients take; ``None`` if time plays no part.
    """

    dropout: ClientDropout | None = None
    clock: VirtualClock | None = None

    def __post_init__(self) -> None:
        for name, kind in {"dropout": ClientDropout, "clock": VirtualClock}.items():
            if getattr(self, name) is not None:
                check_is(name, getattr(self, name), kind)

    def check(self, num_clients: int, clients_per_round: int) -> None:
        """Raise ``ValueError`` if the conditions do not fit the federation."""
        if self.dropout is not None:
            self.dropout.check(num_clients)
        if self.clock is not None:
            self.clock.check(num_clients, clients_per_round)

    @property
    def exclusion_reasons(self) -> tuple[ExclusionReason, ...]:
        """The reasons for which clients may be left out under these conditions."""
        possible: dict[ExclusionReason, bool] = {
            "dropped_out": self.dropout is not None,
            "late": self.clock is not None and self.clock.deadline < math.inf,
            "surplus": self.clock is not None and self.clock.keep_first is not None,
        }
        return tuple(reason for reason, is_possible in possible.items() if is_possible)

    def prepare(self, num_clients: int, seed: int) -> Simulation:
        """Assign probabilities and devices to clients, once for all rounds."""
        probabilities = None if self.dropout is None else self.dropout.assign(num_clients, seed)
        if self.clock is None:
            return Simulation(seed, probabilities)
        return Simulation(seed, probabilities, self.clock, self.clock.assign(num_clients, seed))
