"""A running mean, entry by entry, over the clients that held the entry."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from lightning_spectral.protocol.exact_sum import ExactSum
from lightning_spectral.protocol.magnitudes import largest_magnitudes
from lightning_spectral.protocol.running_mean import merge
from lightning_spectral.protocol.term_sum import TermSum
from lightning_spectral.protocol.weights import Weights

Tensors = Mapping[str, Tensor]


class MeanEntryChange:
    r"""Weighted mean of how much single entries of tensors changed, each over the clients that held it.

    An entry that no client held does not change. The sums are exact, as in `MeanChange`, whose bits these are if
    everybody holds everything.

    Args:
        before: Tensors before training, by name; read again for every client.
        total_weight: Sum of the weights of all clients that were asked.
        absolute: Whether weights are the coefficients of an unbiased estimate: each entry's mean is then multiplied by
            the sum of the weights of all clients that reported.

    Example:
        >>> mean = MeanEntryChange({"b": torch.zeros(3)}, total_weight=4)
        >>> mean.add({"b": torch.tensor([0, 1])}, {"b": torch.tensor([1.0, 1.0])}, weight=1)
        >>> mean.add({"b": torch.tensor([1])}, {"b": torch.tensor([5.0])}, weight=3)
        >>> dict(mean.finish())
        {'b': tensor([1., 4., 0.], dtype=torch.float64)}
    """

    def __init__(self, before: Tensors, total_weight: float, absolute: bool = False) -> None:
        self.weights = Weights(total_weight)
        self._absolute = absolute
        self._shapes = {name: tensor.shape for name, tensor in before.items()}
        flat, magnitudes = {name: tensor.reshape(1, -1) for name, tensor in before.items()}, largest_magnitudes(before)
        self._sums = {name: TermSum(name, entries, 1, magnitudes[name]) for name, entries in flat.items()}
        self._held = {name: torch.zeros_like(entries[0], dtype=torch.float64) for name, entries in flat.items()}

    @property
    def sums(self) -> list[ExactSum]:
        """One sum for each tensor."""
        return [total.sum for total in self._sums.values()]

    @property
    def totals(self) -> list[Tensor]:
        """The fine sums, and the weights of each entry's holders."""
        return [*(total.fine for total in self.sums), *self._held.values()]

    @torch.no_grad()
    def add(
        self, entries: Tensors, after: Tensors, weight: float, magnitudes: Mapping[str, float] | None = None
    ) -> None:
        """Add one client.

        Args:
            entries: Of each tensor, the distinct indices of what the client held in the flattened tensor.
            after: The values there, after training, in the same order.
            weight: Its weight.
            magnitudes: `largest_magnitudes` of these, if known already.

        Raises:
            OverflowError: If a value is not finite or too large, or there are too many clients.
            ValueError: If weights are negative or sum to more than their total.
        """
        largest = magnitudes or largest_magnitudes({name: after[name] for name in self._sums})
        for name, total in self._sums.items():
            total.check(largest[name])
        steps = float(self.weights.add(weight))
        for name, total in self._sums.items():
            total.add(entries[name], after[name].reshape(1, -1), largest[name], steps)
            self._held[name][entries[name]] += steps

    def merge(self, other: MeanEntryChange) -> None:
        """Add another sum over the same tensors."""
        merge(self, other)

    def finish(self) -> Iterator[tuple[str, Tensor]]:
        """Each tensor's name and mean change, float64, computed one after another."""
        scale = self.weights.value if self._absolute else 1.0
        for name, total in self._sums.items():
            held = self._held[name]
            visited = held.nonzero().squeeze(1)
            change = torch.zeros_like(held)
            change[visited] = total.mean(visited, held[visited])[0].mul_(scale)
            yield name, change.view(self._shapes[name])
