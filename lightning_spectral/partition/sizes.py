"""How many examples each client gets: equal numbers, given proportions, or proportions drawn from a law."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lightning_spectral.arguments import Number, OneOf, Rule, check_fields

Floats = npt.NDArray[np.float64]
Law = Literal["lognormal", "power", "dirichlet"]


@dataclass(frozen=True)
class SizeLaw:
    """Draws how much clients have, relative to each other.

    Args:
        law: ``"lognormal"``: logarithms have the standard deviation ``spread``. ``"power"``: the k-th largest client
            has ``k ** -spread`` times what the largest has. ``"dirichlet"``: shares have the symmetric law
            Dir(1 / spread), the quantity skew of Li et al. (2022).
        spread: How unequal clients are, positive.
    """

    law: Law
    spread: float

    def __post_init__(self) -> None:
        check_fields(self, law=OneOf(get_args(Law)), spread=Number(above=0))

    def __call__(self, num_clients: int, rng: np.random.Generator) -> Floats:
        """Relative sizes, shape ``(num_clients,)``."""
        if self.law == "dirichlet":
            return rng.dirichlet(np.full(num_clients, 1 / self.spread))
        deviates = rng.standard_normal(num_clients)
        if self.law == "power":
            deviates = -np.log(1.0 + deviates.argsort().argsort())
        return np.asarray(np.exp(self.spread * (deviates - deviates.max())), dtype=np.float64)


Sizes: TypeAlias = SizeLaw | Sequence[float] | None


def numbers(argument: str, values: Any, rule: Rule, of: str, kind: str = "number") -> tuple[Any, ...]:
    """Numbers as a tuple of plain ones, so that a tensor, an array and a YAML list are the same choice."""
    values = values.tolist() if isinstance(values, Tensor | np.ndarray) else values
    if not isinstance(values, Sequence) or isinstance(values, str):
        raise TypeError(f"`{argument}` must be a sequence of {kind}s, one for each {of}, got {values!r}.")
    if not values:
        raise ValueError(f"`{argument}` must hold a {kind} for each {of}, got none.")
    return tuple(rule(f"{argument}[{k}]", value) for k, value in enumerate(values))


def check_sizes(argument: str, sizes: Any, num_clients: int) -> Sizes:
    """The rule for a partitioner's ``sizes``: a law, or a positive number for each client."""
    if sizes is None or isinstance(sizes, SizeLaw):
        return sizes
    plain = numbers(argument, sizes, Number(above=0), "client")
    if len(plain) != num_clients:
        raise ValueError(f"`{argument}` lists {len(plain)} clients; write num_clients={len(plain)}, got {num_clients}.")
    return plain


def numpy_generator(generator: torch.Generator) -> np.random.Generator:
    """A generator of NumPy's, seeded by a draw: torch's public gamma draw takes no generator."""
    return np.random.Generator(np.random.PCG64(int(torch.randint(2**63 - 1, (), generator=generator))))


def client_shares(sizes: Sizes, total: int, num_clients: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Client ids in random order with their numbers of examples, at least 1, which sum to ``total``.

    They are in proportion to ``sizes``, by largest remainders; without, the first clients get an extra example.
    """
    order = torch.randperm(num_clients, generator=generator)
    if isinstance(sizes, SizeLaw):
        weights = sizes(num_clients, numpy_generator(generator))
    else:
        weights = np.ones(num_clients) if sizes is None else np.asarray(sizes, dtype=np.float64)[order.numpy()]
    small, quota = weights < 0, total * weights / weights.sum()
    while (quota < 1).any():  # clients whose share is below one example get one
        small |= quota < 1
        rest = np.where(small, 0.0, weights)
        quota = np.where(small, 1.0, (total - small.sum()) * rest / max(rest.sum(), np.finfo(float).tiny))
    shares = quota.astype(np.int64)
    shares[(shares - quota).argsort(kind="stable")[: total - shares.sum()]] += 1
    return order, torch.from_numpy(shares)
