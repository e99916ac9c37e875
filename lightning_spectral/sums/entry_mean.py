"""The mean of sub-models that hold different entries of the same tensors."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

import torch
from torch import Tensor

from lightning_spectral.sums.change_blocks import put_differences
from lightning_spectral.sums.exact_sum import ExactSum, cut
from lightning_spectral.sums.magnitudes import largest_magnitudes
from lightning_spectral.sums.running_mean import merge
from lightning_spectral.sums.weights import Weights

Tensors = Mapping[str, Tensor]


class MeanEntryChange:
    r"""Weighted mean of the change of tensors, entry by entry, over the clients that held the entry.

    Entry i averages over its holders, :math:`\sum_c D_c \Delta_{ci} / \sum_c D_c`; entries held by no client do not
    change. The sums are exact, as in `MeanChange`, whose result this equals if every client holds everything.

    Args:
        before: The whole tensors that clients started from, by name; they are read again for every client.
        total_weight: Sum of the weights of all clients asked.
        absolute: Whether weights are the coefficients of an unbiased estimate: each entry's mean is then multiplied by
            the sum of the weights of all clients that reported, whether they held it or not.
        always_divided: Names of tensors that are divided by the sum of weights even if ``absolute`` is true.

    Example:
        >>> mean = MeanEntryChange({"b": torch.zeros(3)}, total_weight=4)
        >>> mean.add({"b": torch.tensor([1.0, 1.0])}, {"b": torch.tensor([0, 1])}, weight=1)
        >>> mean.add({"b": torch.tensor([5.0])}, {"b": torch.tensor([1])}, weight=3)
        >>> dict(mean.finish())
        {'b': tensor([1., 4., 0.], dtype=torch.float64)}
    """

    def __init__(
        self, before: Tensors, total_weight: float, absolute: bool = False, always_divided: Collection[str] = ()
    ) -> None:
        self.weights = Weights(total_weight)
        self._before = {name: tensor.reshape(-1) for name, tensor in before.items()}
        self._shapes = {name: tensor.shape for name, tensor in before.items()}
        self._multiplied = frozenset(before.keys() - set(always_divided) if absolute else ())
        magnitudes = largest_magnitudes(before)
        self._sums = {n: ExactSum(_zeros(flat), magnitudes[n]) for n, flat in self._before.items()}
        self.held = {name: _zeros(flat) for name, flat in self._before.items()}  # weight of each entry's holders

    @property
    def sums(self) -> list[ExactSum]:
        """One sum for each tensor."""
        return list(self._sums.values())

    @property
    def totals(self) -> list[Tensor]:
        """The fine sums, and the entries' weights."""
        return [*(total.fine for total in self.sums), *self.held.values()]

    @torch.no_grad()
    def add(
        self, after: Tensors, positions: Tensors, weight: float, magnitudes: Mapping[str, float] | None = None
    ) -> None:
        """Add one client.

        Args:
            after: At least the tensors of ``before``, as the client trained them.
            positions: For each tensor of which the client held a part, the positions of that part's entries in the
                flattened whole tensor; of the shape of the part.
            weight: The client's weight.
            magnitudes: `largest_magnitudes` of the tensors, if already known.

        Raises:
            OverflowError: If a value is not finite or too large, or there are too many clients.
            ValueError: If weights are negative or sum to more than their total.
        """
        known = largest_magnitudes({name: after[name] for name in self._sums}) if magnitudes is None else magnitudes
        for name, total in self._sums.items():
            total.check(name, known[name])
        steps = float(self.weights.add(weight))
        for name in self._sums:
            where = positions[name].reshape(-1).to(after[name].device) if name in positions else None
            self._add(name, after[name].reshape(-1), where, known[name], steps)

    def _add(self, name: str, after: Tensor, where: Tensor | None, largest: float, steps: float) -> None:
        total, before = self._sums[name], self._before[name]
        start = before if where is None else before[where]
        change = torch.empty(after.shape, dtype=torch.float64, device=after.device)
        put_differences([(after, start, total.overflows(largest, before.dtype))], [change])
        change.mul_(total.factor(steps))
        if total.is_wide(largest):
            _put(total.widen(), where, cut(change))
        _put(total.fine, where, change.round_())
        _put(self.held[name], where, torch.full_like(change, steps))

    def merge(self, other: MeanEntryChange) -> None:
        """Add another sum over the same tensors."""
        merge(self, other)

    def finish(self) -> Iterator[tuple[str, Tensor]]:
        """Yield each tensor's name and mean change, float64, computed one after another."""
        for name, total in self._sums.items():
            # as in `MeanChange`, nothing is divided by less than a step
            mean = total.total().div_(total.factor(self.held[name].clamp(min=1)))
            if name in self._multiplied:
                mean.mul_(self.weights.value)
            yield name, mean.view(self._shapes[name])

    @property
    def share_held(self) -> float:
        """Share of all entries that at least one client held."""
        held = sum(int((weight > 0).sum()) for weight in self.held.values())
        return held / max(1, sum(map(len, self.held.values())))


def without_rows(after: Tensors, positions: Tensors, rows: Tensors) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """A client's tensors and positions for `MeanEntryChange.add`, without some rows of some tensors.

    Args:
        after: The tensors as the client trained them.
        positions: As for `MeanEntryChange.add`.
        rows: The rows to leave out, by tensor name: indices along its first dimension.

    Example:
        >>> without_rows({"b": torch.tensor([7.0, 8.0, 9.0])}, {}, {"b": torch.tensor([1])})
        ({'b': tensor([7., 9.])}, {'b': tensor([0, 2])})
    """
    left, where = dict(after), dict(positions)
    for name in rows.keys() & after.keys():
        tensor = after[name]
        all_positions = positions.get(name, torch.arange(tensor.numel()).view(tensor.shape))
        stays = torch.ones(len(tensor), dtype=torch.bool).index_fill_(0, rows[name].cpu(), False)
        left[name], where[name] = tensor[stays.to(tensor.device)], all_positions[stays.to(all_positions.device)]
    return left, where


def _zeros(flat: Tensor) -> Tensor:
    return torch.zeros(len(flat), dtype=torch.float64, device=flat.device)


def _put(total: Tensor, where: Tensor | None, values: Tensor) -> None:
    """Add values at distinct places, or everywhere."""
    if where is None:
        total.add_(values)
    else:
        total.index_add_(0, where, values)
