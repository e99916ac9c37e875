"""BatchNorm's running averages for each width of ordered dropout: where the server has them, and how they travel."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from lightning_spectral.nn.torch_modules import names_of_averages
from lightning_spectral.nn.width.plan import WidthPlan, take
from lightning_spectral.protocol.buffer_rules import Rules, buffer_rules
from lightning_spectral.protocol.exchange import travelling_tensors
from lightning_spectral.protocol.records import Upload

Tensors = Mapping[str, Tensor]
STEP_COUNTS = "steps@widths"  # sent back by a client, because averages are taken over clients that took steps


def at_width(name: str, width: float) -> str:
    """The name under which a width's own version of a tensor travels.

    Example:
        >>> at_width("net.1.running_mean", 0.5)
        'net.1.running_mean@0.5'
    """
    return f"{name}@{width}"


def running_averages(server: nn.Module, buffers: Rules) -> tuple[str, ...]:
    """Names of all running averages; raise ``ValueError`` if one of them is not averaged over clients."""
    names = names_of_averages(server)
    rules = buffer_rules(server, buffers)
    if other := set(names) - (rules.mean - rules.limits.keys()):
        raise ValueError(
            f"`averages_per_width` needs averages that clients send back, but {', '.join(sorted(other))} are not "
            "averaged: `buffers` says so, or they are not finite. Leave either out."
        )
    return tuple(names)


class WidthAverages(nn.Module):
    """The server's running averages at each width below that of the widest clients, whose own are in its module.

    Each width starts from the first entries of the module's averages.

    Attributes:
        has_begun: Whether they are the run's own, and no longer those that the module was built with.
    """

    has_begun: Tensor

    def __init__(self, server: nn.Module, plan: WidthPlan, names: Sequence[str], widths: Sequence[float]) -> None:
        super().__init__()
        self._plan, self._names, self._widths = plan, tuple(names), tuple(widths)
        self.register_buffer("has_begun", torch.tensor(False))
        for width in widths:
            for name, tensor in first_entries(travelling_tensors(server), plan, names, width).items():
                self.register_buffer(_key(name, width), tensor.clone())

    @property
    def widths(self) -> dict[float, dict[str, Tensor]]:
        """The averages of each width, by their names in the server's module."""
        return {width: {name: self.get_buffer(_key(name, width)) for name in self._names} for width in self._widths}

    @torch.no_grad()
    def begin(self, server: nn.Module) -> None:
        """Before the first round, take the first entries of the averages that the module then has."""
        if not self.has_begun:
            tensors = travelling_tensors(server)
            for width, own in self.widths.items():
                for name, tensor in first_entries(tensors, self._plan, self._names, width).items():
                    own[name].copy_(tensor)
            self.has_begun.fill_(True)

    @torch.no_grad()
    def add(self, changes: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Add the changes that belong to a width's own averages, and pass on the others."""
        own = by_width(self.widths)
        for name, change in changes:
            if name in own:
                own[name].add_(change.to(own[name].dtype))
            else:
                yield name, change


def by_width(averages: Mapping[float, Tensors]) -> dict[str, Tensor]:
    """All averages of some widths, by the names under which they travel."""
    return {at_width(name, width): tensor for width, own in averages.items() for name, tensor in own.items()}


def first_entries(tensors: Tensors, plan: WidthPlan, names: Iterable[str], width: float) -> dict[str, Tensor]:
    """The parts of some of a module's tensors that remain at a width."""
    indices = plan.indices(plan.first(width))
    return {name: take(tensors[name], indices.get(name, ())) for name in names}


def arrange(
    upload: Upload, positions: Tensors, names: Iterable[str], capacity: float, widths: Sequence[float]
) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, float]]:
    """Put each width's averages in their place; a client holds no entries for a width at which it took no step.

    ``widths`` have averages of their own on the server; those of wider clients are in its module. Returns tensors,
    positions and largest magnitudes for `MeanChange.add`.
    """
    tensors, places, largest = dict(upload.tensors), dict(positions), dict(upload.largest)
    none = next(iter(upload.tensors.values())).new_empty(0)  # on the device of the sums
    used = {capacity}  # the widths at which the client took steps; if it has no narrower ones, its own
    if STEP_COUNTS in upload.tensors:
        own = [*(width for width in widths if width < capacity), capacity]
        used = {w for w, count in zip(own, upload.tensors[STEP_COUNTS].tolist(), strict=True) if count}
    for name in names:
        places_of = {width: at_width(name, width) for width in widths}
        sources = {key: name if width == capacity else key for width, key in places_of.items() if width in used}
        if capacity in used and capacity not in widths:
            sources[name] = name
        for place in (*places_of.values(), name):
            if place in sources:
                tensors[place], largest[place] = upload.tensors[sources[place]], upload.largest[sources[place]]
            else:
                tensors[place], largest[place], places[place] = none, 0.0, torch.empty(0, dtype=torch.int64)
    return tensors, places, largest


def without_rows(after: Tensors, positions: Tensors, rows: Tensors) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """A client's tensors and their places for `MeanChange.add`, without some rows of some tensors.

    ``positions`` are as ``where`` in `MeanChange.add`, for single entries; ``rows`` are indices along the first
    dimension of each tensor.
    """
    left, where = dict(after), dict(positions)
    for name in rows.keys() & after.keys():
        tensor = after[name]
        all_positions = positions.get(name, torch.arange(tensor.numel()).view(tensor.shape))
        stays = torch.ones(len(tensor), dtype=torch.bool).index_fill_(0, rows[name].cpu(), False)
        left[name], where[name] = tensor[stays.to(tensor.device)], all_positions[stays.to(all_positions.device)]
    return left, where


def _key(name: str, width: float) -> str:
    return at_width(name, width).replace(".", ":")
