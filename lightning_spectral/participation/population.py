"""Who could train what, and who does: clients, their examples of several models, and their processors."""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

__all__ = ["Assignment", "Population", "outcome_to_assignment"]


@dataclass(frozen=True, eq=False)
class Population:
    """N clients, S models, and how many models each client can train at once.

    A client cannot train a model of which it has no examples, or for which it is marked unavailable. A client that can
    train nothing at all may be part of the population. P is the total number of processors.

    Args:
        num_examples: Examples of each client for each model, int64, shape ``(N, S)``.
        processors: Number B of processors of each client, at least 1, int64, shape ``(N,)``. Each trains one model in
            a round; two of one client may draw the same model.
        available: Whether each client could train each model if it had examples, bool, shape ``(N, S)``; by default
            always.

    Example:
        >>> population = Population(torch.tensor([[30, 10], [10, 0]]), processors=torch.tensor([2, 1]))
        >>> population.owner
        tensor([0, 0, 1])
        >>> population.weights
        tensor([[0.3750, 0.5000],
                [0.3750, 0.5000],
                [0.2500, 0.0000]], dtype=torch.float64)
    """

    num_examples: Tensor
    processors: Tensor
    available: Tensor | None = None

    def __post_init__(self) -> None:
        shape = tuple(self.num_examples.shape)
        if len(shape) != 2 or 0 in shape:
            raise ValueError(f"`num_examples` must have shape (N, S) with N, S >= 1, got shape {shape}.")
        _check_field("num_examples", self.num_examples, shape, torch.int64)
        _check_field("processors", self.processors, shape[:1], torch.int64)
        if self.available is not None:
            _check_field("available", self.available, shape, torch.bool)
        self._check_counts()

    def _check_counts(self) -> None:
        if (self.num_examples < 0).any():
            client, model = (self.num_examples < 0).nonzero()[0].tolist()
            number = int(self.num_examples[client, model])
            raise ValueError(f"`num_examples` must not be negative, got {number} of client {client}, model {model}.")
        if (self.processors < 1).any():
            clients = (self.processors < 1).nonzero()[:, 0].tolist()
            raise ValueError(f"`processors` must be at least 1, got less for {_listed('client', clients)}.")
        if not self.trainable.any(0).all():
            models = (~self.trainable.any(0)).nonzero()[:, 0].tolist()
            raise ValueError(f"no client can train {_listed('model', models)}; add examples, or leave it out.")

    @cached_property
    def trainable(self) -> Tensor:
        """Which client can train which model, bool, shape ``(N, S)``."""
        has_examples = self.num_examples > 0
        return has_examples if self.available is None else has_examples & self.available

    @cached_property
    def shares(self) -> Tensor:
        """Share d of each client in the examples of all clients that can train a model, float64, shape ``(N, S)``."""
        counted = torch.where(self.trainable, self.num_examples, 0)
        return counted.double() / counted.sum(0).double()

    @cached_property
    def owner(self) -> Tensor:
        """Client of each processor, int64, shape ``(P,)``; processors of a client are adjacent."""
        return torch.arange(len(self.processors)).repeat_interleave(self.processors)

    @cached_property
    def can(self) -> Tensor:
        """Which processor can train which model, bool, shape ``(P, S)``."""
        return self.trainable[self.owner]

    @cached_property
    def weights(self) -> Tensor:
        """Weights d / B of the processors in each average, float64, shape ``(P, S)``; columns sum to one."""
        return (self.shares / self.processors[:, None])[self.owner]


@dataclass(frozen=True, eq=False)
class Assignment:
    """Who trains what in a round: distinct pairs of a client and a model.

    Attributes:
        probs: Probability of each processor to train each model, float64, shape ``(P, S)``; coefficients are divided by
            it.
        clients: Client of each pair, in the order drawn.
        models: Model index of each pair.
        coefficients: Coefficient of each pair: in the sum of its model's updates, or, if normalized, its weight in an
            average that is divided by the sum of the weights.
        active: Number of active processors of each model, int64, shape ``(S,)``. It exceeds the number of the model's
            pairs if two processors of a client drew it.
    """

    probs: Tensor
    clients: list[int]
    models: list[int]
    coefficients: list[float]
    active: Tensor


def outcome_to_assignment(
    population: Population, probs: Tensor, choice: Tensor, order: Tensor | None = None, *, normalize: bool = False
) -> Assignment:
    r"""Compute who trains what, and with which coefficient, from what each processor drew.

    A processor of client i that trains model s contributes :math:`d_{is} / (B_i p)` to the coefficient of the pair, so
    that the sum of coefficients times updates is unbiased. If two processors of a client drew the same model, it is
    trained once, with both contributions.

    Args:
        population: Clients, models and processors.
        probs: Probability p of each processor to train each model, shape ``(P, S)``.
        choice: Model that each processor drew, -1 for none, int64, shape ``(P,)``.
        order: Indices of the processors that drew a model, in the order drawn; by default ascending.
        normalize: Whether to count examples instead of shares: :math:`n_{is} p^{max}_s / (B_i p)`, where
            :math:`p^{max}_s` is the largest p of the model. If all p are equal and clients have one processor, this is
            the number of examples, exactly.

    Example:
        >>> population = Population(torch.tensor([[30], [10]]), processors=torch.tensor([2, 1]))
        >>> assignment = outcome_to_assignment(population, torch.full((3, 1), 0.5), torch.tensor([0, 0, -1]))
        >>> assignment.clients, assignment.models, assignment.coefficients
        ([0], [0], [1.5])
    """
    drawn = (choice >= 0).nonzero()[:, 0] if order is None else order
    models, owners = choice[drawn], population.owner[drawn]
    assert bool((probs[drawn, models] > 0).all()), "a processor drew a model of probability zero"
    weights = _example_counts(population, probs.double()) if normalize else population.weights / probs.double()
    coefficients = weights[drawn, models]
    pairs: dict[tuple[int, int], float] = {}
    for client, model, coefficient in zip(owners.tolist(), models.tolist(), coefficients.tolist(), strict=True):
        pairs[client, model] = pairs.get((client, model), 0.0) + coefficient
    active = models.bincount(minlength=probs.shape[1])
    return Assignment(probs, [c for c, _ in pairs], [m for _, m in pairs], list(pairs.values()), active)


def _example_counts(population: Population, probs: Tensor) -> Tensor:
    # the quotient first: equal probabilities and one processor make it exactly one
    relative = probs.amax(0) / (population.processors[population.owner, None] * probs)
    return population.num_examples[population.owner] * relative


def _check_field(name: str, value: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    if tuple(value.shape) != shape or value.dtype != dtype:
        raise ValueError(
            f"`{name}` must have shape {shape} and type {dtype}, got shape {tuple(value.shape)} and {value.dtype}."
        )


def _listed(noun: str, ids: list[int], most: int = 10) -> str:
    """For example ``clients 3, 5``; of many only the first."""
    shown = ", ".join(map(str, ids[:most])) + (f" and {len(ids) - most} more" if len(ids) > most else "")
    return f"{noun}{'s' * (len(ids) > 1)} {shown}"
