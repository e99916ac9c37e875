"""Settings that differ between clients, or change from round to round."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeAlias, TypeVar, cast

import torch
from torch import Tensor

from lightning_spectral.arguments import Number, Rule, Whole
from lightning_spectral.protocol.rng import derived_generator

T = TypeVar("T", bound=Hashable)
V = TypeVar("V")
PerClient: TypeAlias = T | Mapping[T, float] | Sequence[T]


@dataclass(frozen=True, eq=False)
class Assigned(Generic[T]):
    """The value that each client of a federation has.

    Attributes:
        values: The distinct values, in the order in which they were given. In a small federation, a value with a small
            share may be assigned to no client.
        indices: Index into ``values`` for each client, int64, shape ``(num_clients,)``. If there is only one value, the
            tensor takes up a single number in memory.
    """

    values: tuple[T, ...]
    indices: Tensor

    def __len__(self) -> int:
        return len(self.indices)

    def of(self, client_id: int) -> T:
        """The value of one client."""
        return self.values[int(self.indices[client_id])]


def check_entries(argument: str, value: Any, rule: Rule) -> Any:
    """Check a setting in a constructor, where the number of clients is not yet known.

    Args:
        argument: Its name, for error messages.
        value: One for all clients, ``{value: share of clients}``, or a list with one per client.
        rule: The rule for a single value.

    Returns:
        The setting with plain numbers.

    Raises:
        ValueError: If there is no value, one is out of range, or shares are not positive or do not sum to 1.

    Example:
        >>> check_entries("keep_ratio", {0.2: 0.6, 0.4: 0.5}, Number(above=0))
        Traceback (most recent call last):
        ValueError: Shares of `keep_ratio` must sum to 1, got 0.6 + 0.5 = 1.1; write {value: share of clients}.
    """
    if not (entries := entries_of(value)):
        raise ValueError(
            f"`{argument}` must be one value for all clients, {{value: share of clients}} or a list with one value per "
            f"client, got {value!r}."
        )
    plain = [rule(argument, entry) for entry in entries]
    if isinstance(value, Mapping):
        share_of = Number(above=0, hint="it is a share of the clients: leave out values that no client has")
        pairs = zip(plain, value.values(), strict=True)
        shares = {entry: share_of(f"{argument}[{entry!r}]", share) for entry, share in dict(pairs).items()}
        if abs(sum(shares.values()) - 1.0) > 1e-9:
            terms = " + ".join(f"{share:g}" for share in shares.values())
            given = f"{terms} = {sum(shares.values()):g}"
            raise ValueError(f"Shares of `{argument}` must sum to 1, got {given}; write {{value: share of clients}}.")
        return shares
    if not _is_list(value):
        return plain[0]
    return tuple(plain) if isinstance(value, tuple) else plain


def check_num_entries(argument: str, value: PerClient[T], num_clients: int) -> None:
    """Raise ``ValueError`` if the length of a list is not the number of clients in the federation.

    Example:
        >>> check_num_entries("keep_ratio", [0.2, 0.4], num_clients=3)
        Traceback (most recent call last):
        ValueError: `keep_ratio` lists 2 values for 3 clients; give one per client, one for all, or {value: share}.
    """
    if _is_list(value) and len(entries_of(value)) != num_clients:
        raise ValueError(
            f"`{argument}` lists {len(entries_of(value))} values for {num_clients} clients; give one per client, one "
            "for all, or {value: share}."
        )


def assign(value: PerClient[T], num_clients: int, seed: int, purpose: str) -> Assigned[T]:
    """Assign a setting to the clients of a federation.

    Shares are exact: each value gets its share of the clients rounded down, and the remaining clients go to the values
    with the largest remainders. Which client gets which value is drawn from ``(seed, purpose)`` alone.

    Args:
        value: One for all clients, ``{value: share of clients}``, or a list with one per client; already checked.
        num_clients: Number of clients.
        seed: The run's seed.
        purpose: What is drawn, for `derived_generator`.

    Example:
        >>> ratios = assign({0.2: 0.6, 0.4: 0.4}, num_clients=10, seed=0, purpose="keep ratios")
        >>> [ratios.of(client_id) for client_id in range(10)].count(0.2)
        6
    """
    entries = entries_of(value)
    assert not _is_list(value) or len(entries) == num_clients, "`check_num_entries` comes first"
    values = tuple(dict.fromkeys(entries))
    if len(values) == 1:
        return Assigned(values, torch.zeros(1, dtype=torch.long).expand(num_clients))
    if isinstance(value, Mapping):
        wanted = torch.tensor(list(value.values()), dtype=torch.float64) * num_clients
        counts = (wanted + 1e-9).floor().long()
        counts[(counts - wanted).argsort(stable=True)[: num_clients - int(counts.sum())]] += 1
        in_order = torch.arange(len(values)).repeat_interleave(counts)
        return Assigned(values, in_order[torch.randperm(num_clients, generator=derived_generator(seed, purpose))])
    index_of = {entry: index for index, entry in enumerate(values)}
    return Assigned(values, torch.tensor([index_of[entry] for entry in entries]))


def _is_list(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)


def entries_of(value: PerClient[T]) -> Sequence[T]:
    """All given values: a single one, the keys of the shares, or the list.

    Example:
        >>> entries_of({0.2: 0.6, 0.4: 0.4})
        [0.2, 0.4]
    """
    if isinstance(value, Mapping):
        return list(value)
    return cast("Sequence[T]", value) if _is_list(value) else [cast("T", value)]


class _NamedInYaml:
    """Makes jsonargparse require a ``class_path``, as it does not for a dataclass among other dataclasses."""


@dataclass(frozen=True, repr=False)
class Schedule(_NamedInYaml, Generic[V]):
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

    values: Mapping[int, V]

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

    def at(self, round_idx: int) -> V:
        """The value that holds in a round."""
        return self.values[max(start for start in self.values if start <= round_idx)]


def value_at(setting: V | Schedule[V], round_idx: int) -> V:
    """The value of a setting in a round; a setting without a schedule is always the same."""
    return setting.at(round_idx) if isinstance(setting, Schedule) else setting


def values_of(setting: V | Schedule[V]) -> Iterable[V]:
    """Every value that a setting may have."""
    return setting.values.values() if isinstance(setting, Schedule) else [setting]
