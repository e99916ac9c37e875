"""Running sums over clients, which never hold a list of models: add a client, merge two sums, finish the average."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

import torch
from torch import Tensor

from lightning_spectral.sums.change_blocks import ChangeBlocks
from lightning_spectral.sums.exact_sum import ExactSum, cut, unit_for
from lightning_spectral.sums.magnitudes import largest_magnitudes
from lightning_spectral.sums.running_mean import merge
from lightning_spectral.sums.term_sum import TermSum
from lightning_spectral.sums.weights import Weights

Tensors = Mapping[str, Tensor]


class MeanChange:
    r"""Weighted mean over clients of the change of dense tensors during training.

    Changes are computed in the tensors' own type; their sum is exact (`ExactSum`), so its bits do not depend on the
    order of the clients. A client that changed nothing adds exact zeros.

    With n clients of weights :math:`w_c` that sum to W, out of a total T, the error of the mean of changes
    :math:`\Delta_c` is at most

    .. math:: 2^{-50}\, n\, \tfrac{T}{W}\, \text{unit} + 2^{-51}\, \big(1 + n\, \tfrac{T}{W}\big) \max_c |\Delta_c|.

    The first term is the rounding of n weighted changes to the grid, whose unit is the power of two above the
    tensor's largest magnitude before training, at least 1. In the second term, the 1 is the rounding of the products,
    of the addition of two sums and of the division; the rest is the rounding of the weights, which vanishes if they
    are whole numbers.

    Args:
        before: The tensors every client started from, by name; they are read again for every client.
        total_weight: Sum of the weights of all clients asked.
        absolute: Whether weights are used as they are, as the coefficients of an unbiased estimate, and not divided by
            their sum.
        always_divided: Names of tensors whose weights are divided by their sum even if ``absolute`` is true.

    Raises:
        ValueError: If the total is negative or not finite.

    Example:
        >>> mean = MeanChange({"b": torch.zeros(1)}, total_weight=4)
        >>> mean.add({"b": torch.tensor([1.0])}, weight=1)
        >>> mean.add({"b": torch.tensor([4.0])}, weight=3)
        >>> dict(mean.finish())
        {'b': tensor([3.2500], dtype=torch.float64)}
    """

    def __init__(
        self, before: Tensors, total_weight: float, absolute: bool = False, always_divided: Collection[str] = ()
    ) -> None:
        self.before = dict(before)
        self.names = tuple(before)
        self.weights = Weights(total_weight)
        self._divided = frozenset(always_divided if absolute else before)
        magnitudes = largest_magnitudes(before)
        self._blocks = ChangeBlocks(before, {name: unit_for(magnitude) for name, magnitude in magnitudes.items()})
        device = next((tensor.device for tensor in before.values()), None)
        self._fine = torch.zeros(self._blocks.size, dtype=torch.float64, device=device)
        self._sums = {name: ExactSum(self._fine[self._blocks.ranges[name]], magnitudes[name]) for name in before}

    @property
    def sums(self) -> list[ExactSum]:
        """One sum for each tensor."""
        return list(self._sums.values())

    @property
    def totals(self) -> list[Tensor]:
        """The fine sums of all tensors, as one vector."""
        return [self._fine]

    @torch.no_grad()
    def add(self, after: Tensors, weight: float, magnitudes: Mapping[str, float] | None = None) -> None:
        """Add one client's tensors, as it returned them, with its weight.

        Args:
            after: At least the tensors of ``before``.
            weight: The client's weight.
            magnitudes: `largest_magnitudes` of the tensors, if already known.

        Raises:
            OverflowError: If a value is not finite or too large, or there are too many clients.
            ValueError: If weights are negative or sum to more than their total.
        """
        known = largest_magnitudes({name: after[name] for name in self.names}) if magnitudes is None else magnitudes
        for name, total in self._sums.items():
            total.check(name, known[name])
        wide = {name for name, total in self._sums.items() if total.is_wide(known[name])}
        in_float64 = {
            name for name, total in self._sums.items() if total.overflows(known[name], self.before[name].dtype)
        }
        steps = float(self.weights.add(weight))
        for block, change in self._blocks.changes(after, in_float64):
            change.mul_(self._sums[block.pieces[0].name].factor(steps))
            for piece in block.pieces if wide else ():
                if piece.name in wide:
                    run = slice(piece.start - block.where.start, piece.stop - block.where.start)
                    self._add_coarse(piece.name, piece.start, cut(change[run]))
            self._fine[block.where].add_(change.round_())

    def _add_coarse(self, name: str, start: int, coarse: Tensor) -> None:
        offset = start - self._blocks.ranges[name].start
        self._sums[name].widen()[offset : offset + len(coarse)].add_(coarse)

    def merge(self, other: MeanChange) -> None:
        """Add another sum over the same tensors."""
        merge(self, other)

    def finish(self) -> Iterator[tuple[str, Tensor]]:
        """Yield each tensor's name and mean change, float64, one after another; zero if no client contributed."""
        mean = float(max(self.weights.sum, 1))
        for name, total in self._sums.items():
            divisor = mean if name in self._divided else self.weights.one
            yield name, total.total().div_(total.factor(divisor)).view(self.before[name].shape)


class MeanTermChange:
    r"""Weighted mean, term by term, of the change of the vectors of one layer's singular terms.

    Term i averages over the clients that held it, :math:`\sum_c D_c \Delta u_i^c / \sum_c D_c`; terms held by no
    client do not change (Korzhenkov & Louizos 2024, section 3.1, step 3). The sums are exact, as in `MeanChange`.

    Args:
        u: Left vectors before training, shape ``(c_out, N)``.
        v: Right vectors before training, shape ``(N, c_in k)``.
        total_weight: Sum of the weights of all clients asked.
        absolute: Whether weights are the coefficients of an unbiased estimate: each term's mean is then multiplied by
            the sum of the weights of all clients that reported, whether they held it or not.
    """

    def __init__(self, u: Tensor, v: Tensor, total_weight: float, absolute: bool = False) -> None:
        self.weights = Weights(total_weight)
        self.weight = torch.zeros(u.shape[1], dtype=torch.float64, device=u.device)  # of each term's holders, in steps
        self._absolute = absolute
        magnitudes = largest_magnitudes({"u": u, "v": v})
        self._u = TermSum("u", u, dim=1, magnitude=magnitudes["u"])
        self._v = TermSum("v", v, dim=0, magnitude=magnitudes["v"])

    @property
    def sums(self) -> list[ExactSum]:
        """The sums of the left and of the right vectors."""
        return [self._u.sum, self._v.sum]

    @property
    def totals(self) -> list[Tensor]:
        """Both fine sums, and the terms' weights."""
        return [*(total.fine for total in self.sums), self.weight]

    @torch.no_grad()
    def add(
        self,
        terms: Tensor,
        u_after: Tensor,
        v_after: Tensor,
        weight: float,
        magnitudes: tuple[float, float] | None = None,
    ) -> None:
        """Add one client.

        Args:
            terms: Indices of the terms it held, distinct, shape ``(n,)``.
            u_after: Its left vectors after training, shape ``(c_out, n)``.
            v_after: Its right vectors after training, shape ``(n, c_in k)``.
            weight: The client's weight.
            magnitudes: The largest magnitudes of both, if already known.

        Raises:
            OverflowError: If a value is not finite or too large, or there are too many clients.
            ValueError: If weights are negative or sum to more than their total.
        """
        u_largest, v_largest = magnitudes or largest_magnitudes({"u": u_after, "v": v_after}).values()
        self._u.check(u_largest)
        self._v.check(v_largest)
        steps = float(self.weights.add(weight))
        self.weight.index_add_(0, terms, torch.ones_like(terms, dtype=torch.float64), alpha=steps)
        self._u.add(terms, u_after, u_largest, steps)
        self._v.add(terms, v_after, v_largest, steps)

    def merge(self, other: MeanTermChange) -> None:
        """Add another sum over the same layer."""
        merge(self, other)

    def finish(self) -> tuple[Tensor, Tensor, Tensor]:
        """Visited terms, shape ``(m,)``, and the mean change of their vectors, ``(c_out, m)`` and ``(m, c_in k)``."""
        visited = self.weight.nonzero().squeeze(1)
        weight, scale = self.weight[visited], self.weights.value if self._absolute else 1.0
        return visited, self._u.mean(visited, weight).mul_(scale), self._v.mean(visited, weight).mul_(scale)
