"""Who could train what: clients, their examples of several models, and their processors."""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

__all__ = ["Population"]


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


def _check_field(name: str, value: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    if tuple(value.shape) != shape or value.dtype != dtype:
        raise ValueError(
            f"`{name}` must have shape {shape} and type {dtype}, got shape {tuple(value.shape)} and {value.dtype}."
        )


def _listed(noun: str, ids: list[int], most: int = 10) -> str:
    """The ids with their noun, e.g. ``clients 3, 5``; of many only the first."""
    shown = ", ".join(map(str, ids[:most])) + (f" and {len(ids) - most} more" if len(ids) > most else "")
    return f"{noun}{'s' * (len(ids) > 1)} {shown}"
