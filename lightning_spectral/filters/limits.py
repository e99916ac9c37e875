"""Buffers that follow the smallest or largest values among clients, entry by entry."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from lightning_spectral.algorithms.filter import Arrival, Opened, ServerEnd, Unusable
from lightning_spectral.protocol.buffer_rules import BufferRules
from lightning_spectral.protocol.exchange import load_tensors, select_tensors
from lightning_spectral.protocol.records import ClientOutcome, Tensors
from lightning_spectral.sums.exact_mean import Peers


@dataclass(eq=False)
class Limits(ServerEnd):
    """Combines buffers that follow the clients' smallest or largest values, so that no average sees them."""

    rules: BufferRules
    server: nn.Module

    def begin(self, opened: Opened) -> None:
        self._extremes = Extremes(select_tensors(self.server, self.rules.limits), self.rules.limits)
        self._round = opened.round

    def arrive(self, arrival: Arrival) -> Arrival:
        returned = arrival.upload.tensors
        if names := self._extremes.not_numbers(returned):
            raise Unusable("not_finite", f"NaN in {', '.join(names)}")
        places = self._round.positions(arrival.receipt)
        self._arrived = {name: returned[name] for name in self.rules.limits}, places
        averaged = partial(self.rules.averaged, where=places)
        sent = replace(arrival.sent, tensors=averaged(arrival.sent.tensors))
        return replace(arrival, sent=sent, upload=replace(arrival.upload, tensors=averaged(returned)))

    def added(self, arrival: Arrival) -> None:
        self._extremes.add(*self._arrived)

    def gather(self, processes: Peers) -> Iterable[Arrival]:
        self._extremes.gather(processes)
        return ()

    def close(self, outcomes: Sequence[ClientOutcome]) -> Mapping[str, float]:
        load_tensors(self.server, dict(self._extremes.finish()))
        return {}


class Extremes:
    """The smallest or the largest of the values that clients return of a tensor, each entry on its own.

    Nothing is rounded: floating-point numbers, integers and booleans stay what they are, and neither the order of the
    clients nor their processes change a bit. A zero has no sign afterwards. Entries that no client returned keep the
    server's value, which does not count among those of the clients.

    Args:
        before: The server's tensors, by name.
        signs: For each of them -1 for the smallest value, 1 for the largest and 0 to leave the entry alone: a scalar,
            or a tensor of its shape.

    Example:
        >>> extremes = Extremes({"low": torch.tensor([9, 9])}, {"low": torch.tensor(-1)})
        >>> extremes.add({"low": torch.tensor([3, 5])})
        >>> extremes.add({"low": torch.tensor([4, 2])})
        >>> dict(extremes.finish())
        {'low': tensor([3, 2])}
    """

    def __init__(self, before: Tensors, signs: Tensors) -> None:
        self._before, self._signs = dict(before), dict(signs)
        self._values = {name: tensor.clone() for name, tensor in before.items()}
        self._held = {name: torch.zeros_like(tensor, dtype=torch.bool) for name, tensor in before.items()}

    @torch.no_grad()
    def add(self, after: Tensors, where: Tensors | None = None) -> None:
        """Take one client's tensors into account.

        Args:
            after: At least the tensors of ``before``, or the client's parts of them, without NaN.
            where: For each tensor of which the client held a part, the places of its entries in the flattened whole
                one.
        """
        for name, before in self._before.items():
            values, held = before.flatten().clone(), torch.zeros(before.numel(), dtype=torch.bool, device=before.device)
            places = where[name].flatten().to(before.device) if where and name in where else slice(None)
            values[places], held[places] = after[name].to(values).flatten(), True
            self._merge(name, values.view(before.shape), held.view(before.shape))

    def not_numbers(self, after: Tensors) -> Sequence[str]:
        """Names of the tensors in which a client returned NaN, which is neither small nor large."""
        return [name for name in self._before if bool(after[name].isnan().any())]

    def gather(self, processes: Peers) -> None:
        """Give every process the extremes over all processes, which call this together."""
        if processes.size == 1 or not self._before:
            return
        mine = [(name, self._values[name].cpu(), self._held[name].cpu()) for name in self._before]
        for name, values, held in (entry for entries in processes.gather(mine) for entry in entries):
            self._merge(name, values.to(self._before[name].device), held.to(self._before[name].device))

    def finish(self) -> Iterator[tuple[str, Tensor]]:
        """Yield each tensor's name and new value."""
        for name, before in self._before.items():
            yield name, torch.where(self._held[name] & (self._signs[name] != 0), self._values[name], before)

    def _merge(self, name: str, values: Tensor, held: Tensor) -> None:
        """Merge other clients' values, where they hold any."""
        own, is_held = self._values[name], self._held[name]
        if values.is_floating_point():
            values = values + 0.0  # of the two zeros, which one counts as smaller depends on the order
        extreme = torch.where(self._signs[name] > 0, torch.maximum(own, values), torch.minimum(own, values))
        self._values[name] = torch.where(held, torch.where(is_held, extreme, values), own)
        self._held[name] = is_held | held
