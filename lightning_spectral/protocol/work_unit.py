"""Who trains what: the unit in which rounds are planned, drawn, counted and summed."""

from __future__ import annotations

from typing import NamedTuple


class WorkUnit(NamedTuple):
    """One client that trains one model in one round.

    Attributes:
        client_id: Which client, from 0.
        model: Which model; ``""`` if there is only one.
        coefficient: Its weight in the average, any non-negative number. Under uniform participation its number of
            examples D; the average divides by the sum over those who reported.

    Example:
        >>> WorkUnit(7, coefficient=80).ids, WorkUnit(7, "words").ids
        ((7,), (7, 'words'))
    """

    client_id: int
    model: str = ""
    coefficient: float = 1.0

    @property
    def key(self) -> tuple[int, str]:
        """Client and model, which identify a unit within a round whatever its coefficient."""
        return self.client_id, self.model

    @property
    def ids(self) -> tuple[int | str, ...]:
        """What its random draws are derived from; without the model if there is only one."""
        return self.key if self.model else (self.client_id,)
