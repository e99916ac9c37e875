"""What a server keeps of its clients: their last updates, and sums over all of them without reading them all."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from itertools import chain
from math import prod

import torch
from torch import Tensor, nn

from lightning_spectral.algorithms.fed_avg import sum_of
from lightning_spectral.functional.spectra import singular_terms, weight_to_matrix
from lightning_spectral.nn.torch_modules import keeping_type
from lightning_spectral.protocol.cohort import Cohort
from lightning_spectral.protocol.exchange import wide
from lightning_spectral.protocol.records import Key, Tensors
from lightning_spectral.sums import MeanChange


class ClientSum(nn.Module):
    r"""The sum over all clients, :math:`V = \sum_i d_i v_i`, of tensors v that the server or a device keeps for each.

    Here d is a client's share of all examples, which must be the same in every round. Clients without any count as
    zeros. A round replaces only those of its own clients, so V changes by :math:`\sum_i d_i (v_i' - v_i)` over
    these, and those of the others are not read. Each round's change is an exact sum (`MeanChange`); adding it
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


def entries_of(cohort: Cohort) -> dict[Key, Tensors]:
    """What the server's store has of a round's clients when it opens, on the CPU; nothing of those that are new."""
    units = chain(*cohort.groups.values())
    return {unit.key: cohort.store.kept(unit) for unit in units if unit in cohort.store}


def by_share(cohort: Cohort) -> Cohort:
    """The same cohort, with each client's share of all examples as its coefficient."""
    groups = {
        keep_ratio: tuple(unit._replace(coefficient=cohort.shares[unit.key]) for unit in units)
        for keep_ratio, units in cohort.groups.items()
    }
    return replace(cohort, groups=groups, absolute=True)


@torch.no_grad()
def update_of(before: Tensors, after: Tensors) -> dict[str, Tensor]:
    """The change of each tensor of ``before``, in at least single precision."""
    return {name: wide(after[name]) - wide(tensor) for name, tensor in before.items()}


@torch.no_grad()
def compress(update: Tensors, num_terms: int | None) -> dict[str, Tensor]:
    """Compress a finite update for the server's store.

    Tensors of two dimensions or more, seen as matrices of shape ``(c_out, c_in k_1 ...)``, are stored as the factors u,
    shape ``(c_out, num_terms)``, and v of their leading singular terms. The others, those whose terms would be no
    smaller, and all of them if ``num_terms`` is ``None``, stay whole, under their own names.

    Example:
        >>> entry = compress({"weight": torch.ones(4, 3), "bias": torch.ones(4)}, num_terms=1)
        >>> {name: tuple(tensor.shape) for name, tensor in entry.items()}
        {'weight:u': (4, 1), 'weight:v': (1, 3), 'bias': (4,)}
    """
    entry: dict[str, Tensor] = {}
    for name, change in update.items():
        if num_terms is None or change.ndim < 2 or num_terms * sum(weight_to_matrix(change).shape) >= change.numel():
            entry[name] = change
        else:
            _, u, v = singular_terms(change)
            entry[f"{name}:u"], entry[f"{name}:v"] = u[:, :num_terms], v[:num_terms]
    return entry


@torch.no_grad()
def restore(entry: Tensors, like: Tensors) -> dict[str, Tensor]:
    """Restore the update that an entry of `compress` stands for, in float64 and bit for bit the same every time.

    Names, shapes and device are those of ``like``; the entry may be on another device.
    """

    def exact(name: str, tensor: Tensor) -> Tensor:
        return entry[name].to(tensor.device).double()

    return {
        name: exact(name, tensor)
        if name in entry
        else (exact(f"{name}:u", tensor) @ exact(f"{name}:v", tensor)).view(tensor.shape)
        for name, tensor in like.items()
    }
