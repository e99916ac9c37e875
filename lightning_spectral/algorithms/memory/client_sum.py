"""The sum over all clients of what the server stores for each, kept up to date without reading them all."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from math import prod

import torch
from torch import Tensor, nn

from lightning_spectral.algorithms.dense_mean import sum_of
from lightning_spectral.nn.own_types import keeping_type
from lightning_spectral.protocol.cohort import Cohort
from lightning_spectral.sums import MeanChange

Tensors = Mapping[str, Tensor]


class ClientSum(nn.Module):
    r"""The sum over all clients, :math:`V = \sum_i d_i v_i`, of the tensors v that the server's store holds for each.

    Here d is a client's share of all examples, which must be the same in every round. Clients without an entry count as
    zeros. A round replaces only the entries of its own clients, so V changes by :math:`\sum_i d_i (v_i' - v_i)` over
    these, and the entries of the others are not read. Each round's change is an exact sum (`MeanChange`); adding it
    rounds V to float64.

    Attributes:
        values: All tensors of V in one vector, float64 whatever the Trainer's precision.

    Example:
        >>> total = ClientSum({"weight": (2, 3), "bias": (2,)})
        >>> total.values.shape, total.pieces()["bias"]
        (torch.Size([8]), tensor([0., 0.], dtype=torch.float64))
    """

    values: Tensor

    def __init__(self, shapes: Mapping[str, Iterable[int]]) -> None:
        super().__init__()
        self._shapes = {name: tuple(shape) for name, shape in shapes.items()}
        size = sum(map(prod, self._shapes.values()))
        self.register_buffer("values", torch.zeros(size, dtype=torch.float64))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> ClientSum:
        super()._apply(keeping_type(fn), recurse)  # type: ignore[no-untyped-call]
        return self

    def pieces(self) -> dict[str, Tensor]:
        """Each tensor of V by name: views."""
        parts = torch.split(self.values, [prod(shape) for shape in self._shapes.values()])
        return {name: part.view(shape) for (name, shape), part in zip(self._shapes.items(), parts, strict=True)}

    def change(self, names: Collection[str], cohort: Cohort) -> MeanChange:
        """The running sum, over the clients of one round, of the changes of some of the tensors."""
        pieces = self.pieces()
        return sum_of({name: pieces[name] for name in names}, by_share(cohort))

    @torch.no_grad()
    def add(self, change: MeanChange) -> None:
        pieces = self.pieces()
        for name, piece in change.finish():
            pieces[name].add_(piece)


def by_share(cohort: Cohort) -> Cohort:
    """The same cohort, with each client's share of all examples as its coefficient."""
    groups = {
        keep_ratio: tuple(unit._replace(coefficient=cohort.shares[unit.key]) for unit in units)
        for keep_ratio, units in cohort.groups.items()
    }
    return replace(cohort, groups=groups, absolute=True)
