"""Who of a round's clients will deliver: known before anybody trains, so nobody trains in vain."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from lightning_spectral.errors import check_is
from lightning_spectral.protocol.exclusion import ExclusionReason
from lightning_spectral.protocol.rng import derived_seed
from lightning_spectral.simulation.clock import Turn, VirtualClock
from lightning_spectral.simulation.dropout import ClientDropout

__all__ = ["Conditions", "Fate", "Fates"]


@dataclass(frozen=True)
class Fate:
    """What will become of a client's turn.

    Attributes:
        left_out: Why its update will not be used; ``None`` if it is to train.
        seconds: When it is done, by the virtual clock; NaN without a clock, or if it never is.
    """

    left_out: ExclusionReason | None = None
    seconds: float = math.nan


@dataclass(frozen=True)
class Fates:
    """What will become of a round.

    Attributes:
        clients: A fate for each client, by id.
        seconds: How long the round takes, by the virtual clock; NaN without one.
    """

    clients: Mapping[int, Fate] = field(default_factory=dict)
    seconds: float = math.nan

    def of(self, client_id: int) -> Fate:
        """A client's fate; one of whom nothing is known trains."""
        return self.clients.get(client_id, Fate())


@dataclass(frozen=True)
class Conditions:
    """Under which conditions clients work, simulated.

    Attributes:
        dropout: Who vanishes; ``None`` for nobody.
        clock: How long they take; ``None`` if nobody looks.
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
        """Why clients may be left out under these conditions."""
        possible: dict[ExclusionReason, bool] = {
            "dropped_out": self.dropout is not None,
            "late": self.clock is not None and self.clock.deadline < math.inf,
            "surplus": self.clock is not None and self.clock.keep_first is not None,
        }
        return tuple(reason for reason, is_possible in possible.items() if is_possible)

    def fates(self, seed: int, round_idx: int, turns: Mapping[int, Turn]) -> Fates:
        """What will become of each client: a pure function of its arguments, whatever their order.

        A client without data says so at once; one that drops out is never heard of; of the others, in the order in
        which they are done, the first `VirtualClock.keep_first` are kept, unless they are late.

        Args:
            seed: The run's seed.
            round_idx: Communication round, from 0.
            turns: What each client is asked to do, by id.
        """
        fates = {client_id: self._alone(seed, round_idx, client_id, turn) for client_id, turn in turns.items()}
        if self.clock is None:
            return Fates(fates)
        done = [client_id for client_id, fate in fates.items() if fate.left_out is None]
        # equal devices are done together: who comes first is then a matter of chance, and not of the client's number
        done.sort(key=lambda c: (fates[c].seconds, derived_seed(seed, "photo finish", round_idx, c)))
        for client_id in done[self.clock.keep_first :] if self.clock.keep_first is not None else []:
            fates[client_id] = Fate("surplus", fates[client_id].seconds)
        return Fates(fates, _round_seconds(self.clock, list(fates.values())))

    def _alone(self, seed: int, round_idx: int, client_id: int, turn: Turn) -> Fate:
        if turn.num_examples == 0:
            return Fate("no_data")
        if self.dropout is not None and self.dropout.drops(seed, round_idx, client_id):
            return Fate("dropped_out")
        if self.clock is None:
            return Fate()
        seconds = self.clock.seconds(seed, client_id, turn)
        return Fate("late" if seconds > self.clock.deadline else None, seconds)


def _round_seconds(clock: VirtualClock, fates: Sequence[Fate]) -> float:
    """When the server stops waiting: it has all or enough, or the deadline is over."""
    kept = [fate.seconds for fate in fates if fate.left_out is None]
    is_enough = clock.keep_first is not None and len(kept) >= clock.keep_first
    is_missed = any(fate.left_out in ("dropped_out", "late") for fate in fates)
    if is_missed and not is_enough and clock.deadline < math.inf:
        return clock.deadline
    return max(kept, default=0.0)
