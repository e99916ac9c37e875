"""Settings that change from round to round."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from lightning_spectral.arguments import Whole

T = TypeVar("T")


class _NamedInYaml:
    """Makes jsonargparse require a ``class_path``, as it does not for a dataclass among other dataclasses."""


@dataclass(frozen=True, repr=False)
class Schedule(_NamedInYaml, Generic[T]):
    """A setting that depends on the round: each value holds from its round until that of the next value.

    `SpectralSharding` accepts schedules for its strategy and its design.

    Args:
        values: Maps the first round of each value, counted from 0, to the value. Round 0 must have one.

    Raises:
        ValueError: If a key is not a round, or round 0 is missing.

    Example:
        >>> from lightning_spectral.sharding import Collective, TopN
        >>> schedule = Schedule({0: TopN(), 50: Collective()})
        >>> schedule.at(49), schedule.at(50)
        (TopN(), Collective(cohort='group'))
    """

    values: Mapping[int, T]

    def __post_init__(self) -> None:
        if not isinstance(self.values, Mapping):
            raise ValueError(f"A schedule maps rounds to values, got {self.values!r}; write Schedule({{0: ...}}).")
        round_idx = Whole(at_least=0, hint="the keys of a schedule are rounds")
        values = {round_idx("values", key): value for key, value in self.values.items()}
        if 0 not in values:
            raise ValueError(f"A schedule needs a value for round 0, got rounds {sorted(values)}.")
        object.__setattr__(self, "values", {key: values[key] for key in sorted(values)})

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.values!r})"

    def at(self, round_idx: int) -> T:
        """The value that holds in a round."""
        return self.values[max(start for start in self.values if start <= round_idx)]


def value_at(setting: T | Schedule[T], round_idx: int) -> T:
    """The value of a setting in a round; a setting without a schedule is always the same."""
    return setting.at(round_idx) if isinstance(setting, Schedule) else setting


def values_of(setting: T | Schedule[T]) -> Iterable[T]:
    """Every value that a setting may have."""
    return setting.values.values() if isinstance(setting, Schedule) else [setting]
