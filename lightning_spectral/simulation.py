"""Simulated dropout and device speed: which clients report back, and when; decided before training, without waiting."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

from lightning_spectral.arguments import Number, Whole, check_fields
from lightning_spectral.errors import check_is
from lightning_spectral.protocol.per_client import Assigned, PerClient, assign, check_entries, check_num_entries
from lightning_spectral.protocol.records import ExclusionReason, Key, WorkUnit
from lightning_spectral.protocol.rng import derived_seed

__all__ = [
    "ClientDropout",
    "Conditions",
    "DeviceProfile",
    "SimulatedOutcome",
    "SimulatedRound",
    "SimulatedTask",
    "Simulation",
    "VirtualClock",
]

PASSES = 3  # a backward pass takes about twice as many multiplications as the forward pass before it


@dataclass(frozen=True)
class DeviceProfile:
    """The speed of one type of device.

    Args:
        downlink: Bytes per second that it receives; ``float("inf")`` if transfers take no time.
        uplink: Bytes per second that it sends.
        macs_per_second: Multiply-accumulates per second that it computes while training.
    """

    downlink: float
    uplink: float
    macs_per_second: float

    def __post_init__(self) -> None:
        speed = Number(above=0, finite=False)
        check_fields(self, downlink=speed, uplink=speed, macs_per_second=speed)


def _macs(argument: str, value: Any) -> Mapping[float, float] | Callable[[float], float] | None:
    if value is None or (callable(value) and not isinstance(value, type)):
        return cast("Callable[[float], float] | None", value)
    if not isinstance(value, Mapping) or not value:
        raise TypeError(
            f"`{argument}` must be a function of the keep ratio, or a mapping such as {{0.5: 1e6}}, got {value!r}."
        )
    ratio, count = Number(above=0, hint="its keys are keep ratios"), Number(at_least=0)
    return {ratio(argument, key): count(f"{argument}[{key!r}]", entry) for key, entry in value.items()}


@dataclass(frozen=True)
class SimulatedTask:
    """What a client is asked to do in a round, as far as it affects the duration.

    Attributes:
        keep_ratio: Share of singular terms of its sub-model.
        num_examples: Examples that it trains on in a local epoch.
        local_epochs: Passes over them, the last one perhaps in part.
        num_parameters: Parameters of its sub-model.
        downlink_bytes: Bytes that it is sent.
        uplink_bytes: Bytes that it sends back.
    """

    keep_ratio: float
    num_examples: int
    local_epochs: float
    num_parameters: int = 0
    downlink_bytes: int = 0
    uplink_bytes: int = 0


@dataclass(frozen=True)
class VirtualClock:
    """Predicts when each client of a round finishes, from the speed of its device.

    A client takes ``downlink_bytes / downlink + 3 macs * num_examples * local_epochs / macs_per_second + uplink_bytes /
    uplink`` seconds; all clients of a round start together. Real time plays no part.

    Args:
        profiles: One for all clients; ``{profile: share of clients}``; or one per client.
        deadline: Seconds that the server waits; a client that takes longer is late.
        keep_first: Over-selection: of the ``clients_per_round`` that are asked, the server waits for this many and
            leaves out the others as surplus; ``None`` to wait for all.
        macs: Multiply-accumulates of a sub-model's forward pass for one example, by keep ratio: a mapping or a
            function. ``None`` for the number of the sub-model's parameters, which is right for linear layers that see
            an example once, and too low for convolutions.

    Note:
        The server waits for a client that drops out until the deadline, or, without a deadline, not at all.

    Example:
        >>> phone = DeviceProfile(downlink=1e6, uplink=1e5, macs_per_second=1e9)
        >>> sizes = {"num_parameters": 10**6, "downlink_bytes": 4 * 10**6, "uplink_bytes": 4 * 10**6}
        >>> task = SimulatedTask(keep_ratio=0.5, num_examples=100, local_epochs=2, **sizes)
        >>> VirtualClock(phone).seconds(phone, task)  # 4 s down, 3 * 10**6 * 200 / 10**9 = 0.6 s of work, 40 s up
        44.6
    """

    profiles: PerClient[DeviceProfile]
    deadline: float = math.inf
    keep_first: int | None = None
    # the repr of a function contains its address, which must not enter a run's configuration
    macs: Mapping[float, float] | Callable[[float], float] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        check_fields(
            self,
            profiles=partial(check_entries, rule=partial(check_is, expected=DeviceProfile)),
            deadline=Number(above=0, finite=False, hint="it is in seconds"),
            keep_first=Whole(at_least=1, optional=True),
            macs=_macs,
        )

    def seconds(self, profile: DeviceProfile, task: SimulatedTask) -> float:
        """Duration of a task on a device in seconds, from the server's first byte to the device's last."""
        forward: float = task.num_parameters
        if callable(self.macs):
            forward = self.macs(task.keep_ratio)
        elif self.macs is not None:
            if task.keep_ratio not in self.macs:
                known = sorted(self.macs)
                raise ValueError(f"`macs` has no entry for keep ratio {task.keep_ratio}, only {known}; add it.")
            forward = self.macs[task.keep_ratio]
        macs = PASSES * forward * task.num_examples * task.local_epochs
        down, up = task.downlink_bytes / profile.downlink, task.uplink_bytes / profile.uplink
        return down + macs / profile.macs_per_second + up


@dataclass(frozen=True)
class ClientDropout:
    """Makes clients drop out of rounds: such a client is sent its sub-model, trains nothing and returns nothing.

    Whether a client drops out depends only on the run's seed, the round and the client, not on who else takes part or
    where a run was resumed.

    Args:
        probability: Probability p of dropping out of a round, in [0, 1]: one for all clients; ``{probability: share of
            clients}``; or one per client.

    Example:
        >>> ClientDropout({0.0: 0.5, 0.5: 0.5})  # half of the clients are on mains power
        ClientDropout(probability={0.0: 0.5, 0.5: 0.5})
    """

    probability: PerClient[float]

    def __post_init__(self) -> None:
        check_fields(self, probability=partial(check_entries, rule=Number(at_least=0, at_most=1)))


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
        finished = [unit for unit in tasks if outcomes[unit.key].left_out is None]
        if self.clock.keep_first is not None:
            # among devices that finish together the order is drawn, so that it does not depend on client ids
            photo = self.seed, "photo finish", round_idx
            finished.sort(key=lambda unit: (outcomes[unit.key].seconds, derived_seed(*photo, *unit.ids)))
        kept = finished[: self.clock.keep_first]
        for unit in finished[len(kept) :]:
            outcomes[unit.key] = SimulatedOutcome("surplus", outcomes[unit.key].seconds)
        # the server stops waiting when it has all or enough, or when the deadline has passed
        is_enough = self.clock.keep_first is not None and len(kept) >= self.clock.keep_first
        is_missed = any(outcome.left_out in ("dropped_out", "late") for outcome in outcomes.values())
        if is_missed and not is_enough and self.clock.deadline < math.inf:
            return SimulatedRound(outcomes, self.clock.deadline)
        return SimulatedRound(outcomes, max((outcomes[unit.key].seconds for unit in kept), default=0.0))

    def _outcome_alone(self, round_idx: int, unit: WorkUnit, task: SimulatedTask) -> SimulatedOutcome:
        """The outcome as far as it depends on this unit alone: everything but being surplus."""
        if task.num_examples == 0:
            return SimulatedOutcome("no_data")
        # a derived seed is a uniform integer below 2**63: no generator is needed for a single draw
        drawn = derived_seed(self.seed, "client dropout", round_idx, *unit.ids)
        if self.probabilities is not None and drawn < self.probabilities.of(unit.client_id) * 2**63:
            return SimulatedOutcome("dropped_out")
        if self.clock is None or self.profiles is None:
            return SimulatedOutcome()
        seconds = self.clock.seconds(self.profiles.of(unit.client_id), task)
        return SimulatedOutcome("late" if seconds > self.clock.deadline else None, seconds)


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
        check_is("dropout", self.dropout, ClientDropout | None)
        check_is("clock", self.clock, VirtualClock | None)

    def check(self, num_clients: int, clients_per_round: int) -> None:
        """Raise ``ValueError`` if the conditions do not fit the federation."""
        if self.dropout is not None:
            check_num_entries("probability", self.dropout.probability, num_clients)
        if self.clock is not None:
            check_num_entries("profiles", self.clock.profiles, num_clients)
            if (first := self.clock.keep_first or 0) > clients_per_round:
                raise ValueError(
                    f"`keep_first={first}` is more than clients_per_round={clients_per_round}; lower it, or ask more."
                )

    @property
    def exclusion_reasons(self) -> tuple[ExclusionReason, ...]:
        """The reasons for which clients may be left out under these conditions."""
        reasons: list[ExclusionReason] = ["dropped_out"] if self.dropout is not None else []
        if self.clock is not None and self.clock.deadline < math.inf:
            reasons.append("late")
        if self.clock is not None and self.clock.keep_first is not None:
            reasons.append("surplus")
        return tuple(reasons)

    def prepare(self, num_clients: int, seed: int) -> Simulation:
        """Assign probabilities and devices to clients, once for all rounds."""
        chance = None if self.dropout is None else self.dropout.probability
        probabilities = None if chance is None else assign(chance, num_clients, seed, "dropout probability")
        profiles = None if self.clock is None else assign(self.clock.profiles, num_clients, seed, "device profile")
        return Simulation(seed, probabilities, self.clock, profiles)
