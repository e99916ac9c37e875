"""The decisions about a round: who trains what, with which coefficient."""

from dataclasses import dataclass

from torch import Tensor

from lightning_spectral.participation.population import Population

__all__ = ["Assignment", "outcome_to_assignment"]


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

    Returns:
        The assignment.

    Example:
        >>> import torch
        >>> population = Population(torch.tensor([[30], [10]]), processors=torch.tensor([2, 1]))
        >>> assignment = outcome_to_assignment(population, torch.full((3, 1), 0.5), torch.tensor([0, 0, -1]))
        >>> assignment.clients, assignment.models, assignment.coefficients
        ([0], [0], [1.5])
    """
    drawn = (choice >= 0).nonzero()[:, 0] if order is None else order
    models, owners = choice[drawn], population.owner[drawn]
    assert bool((probs[drawn, models] > 0).all()), "a processor drew a model of probability zero"
    coefficients = (_example_counts if normalize else _unbiased)(population, probs.double())[drawn, models]
    pairs: dict[tuple[int, int], float] = {}
    for client, model, coefficient in zip(owners.tolist(), models.tolist(), coefficients.tolist(), strict=True):
        pairs[client, model] = pairs.get((client, model), 0.0) + coefficient
    active = models.bincount(minlength=probs.shape[1])
    return Assignment(probs, [c for c, _ in pairs], [m for _, m in pairs], list(pairs.values()), active)


def _unbiased(population: Population, probs: Tensor) -> Tensor:
    return population.weights / probs


def _example_counts(population: Population, probs: Tensor) -> Tensor:
    # the quotient first: equal probabilities and one processor make it exactly one
    relative = probs.amax(0) / (population.processors[population.owner, None] * probs)
    return population.num_examples[population.owner] * relative
