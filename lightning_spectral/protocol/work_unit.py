"""Who trains what: the unit in which rounds are planned, drawn, counted and summed."""

from __future__ import annotations

from typing import NamedTuple


class WorkUnit(NamedTuple):
    """One client that trains one model in one round.

    Attributes:
        client_id: The client's id, from 0.
        model: The model's name; ``""`` if there is only one.
        coefficient: Its weight in the average, any non-negative number. With uniform participation, its number of
            examples D; the average is divided by the sum over the clients that reported.

    Example:
        >>> WorkUnit(7, coefficient=80).ids, WorkUnit(7, "words").ids
        ((7,), (7, 'words'))
    """

    client_id: int
    model: str = ""
    coefficient: float = 1.0

    @property
    def key(self) -> tuple[int, str]:
        """Client and model, which identify a unit within a round regardless of its coefficient."""
        return self.client_id, self.model

    @property
    def ids(self) -> tuple[int | str, ...]:
        """The ids from which its random draws are derived; without the model if there is only one."""
        return self.key if self.model else (self.client_id,)
