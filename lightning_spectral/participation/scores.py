"""The scores by which clients are sampled, from what is known about them."""

import torch
from torch import Tensor

from lightning_spectral.participation.population import Population

__all__ = ["sampling_scores"]


def sampling_scores(population: Population, figures: Tensor | None) -> Tensor:
    """Figures of the clients, weighted as in the average, for each processor.

    Args:
        population: Clients, models and processors.
        figures: Figure of each client for each model, e.g. its loss, shape ``(N, S)``, NaN where it is not known yet;
            ``None`` if nothing is known. An unknown figure counts as the largest known one of the model, or as 1 if
            there is none. Negative ones count as zero.

    Returns:
        Scores, float64, shape ``(P, S)``, zero where a processor cannot train a model. If all scores of a model would
        be zero, the weights take their place: otherwise no client would ever train it.

    Example:
        >>> population = Population(torch.tensor([[30], [10]]), processors=torch.tensor([1, 1]))
        >>> sampling_scores(population, torch.tensor([[2.0], [float("nan")]]))
        tensor([[1.5000],
                [0.5000]], dtype=torch.float64)
    """
    known = torch.ones_like(population.shares) if figures is None else _completed(population, figures)
    scores = population.weights * known[population.owner]
    return torch.where((scores == 0).all(0), population.weights, scores)


def _completed(population: Population, figures: Tensor) -> Tensor:
    """Non-negative figures without gaps; those of clients without examples do not matter."""
    expected = tuple(population.num_examples.shape)
    if tuple(figures.shape) != expected:
        raise ValueError(f"`figures` must have shape (N, S) = {expected}, got {tuple(figures.shape)}.")
    values = torch.where(population.num_examples > 0, figures.detach().double().cpu(), torch.nan)
    if values.isinf().any():
        client, model = values.isinf().nonzero()[0].tolist()
        value = values[client, model].item()
        raise ValueError(
            f"`figures` must be finite, or NaN if not known, got {value} of client {client}, model {model}; "
            "its training diverged: lower the learning rate, or pass NaN."
        )
    values = values.clamp(min=0.0)  # leaves NaN
    largest = values.nan_to_num(-1.0).amax(0)
    return torch.where(values.isnan(), torch.where(largest < 0, 1.0, largest), values)
