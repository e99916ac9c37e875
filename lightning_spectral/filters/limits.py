"""Buffers that follow the smallest or largest values among clients, entry by entry."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from lightning_spectral.algorithms.filter import Arrival, Opened, ServerEnd, Unusable
from lightning_spectral.protocol.buffer_rules import BufferRules
from lightning_spectral.protocol.exchange import load_tensors, select_tensors
from lightning_spectral.protocol.records import ClientOutcome
from lightning_spectral.sums.exact_mean import Peers


class Limits(ServerEnd):
    """Combines buffers that follow the clients' smallest or largest values, so that no average sees them.

    Each entry is on its own, and nothing is rounded: floating-point numbers, integers and booleans stay what they are,
    and neither the order of the clients nor their processes change a bit. A zero has no sign afterwards. Entries that
    no client returned keep the server's value, which does not count among those of the clients.
    """

    def __init__(self, rules: BufferRules, server: nn.Module) -> None:
        self.rules, self.server = rules, server

    def begin(self, opened: Opened) -> None:
        self._round = opened.round
        self._before = {name: tensor.clone() for name, tensor in select_tensors(self.server, self.rules.limits).items()}
        self._values = dict(self._before)
        self._held = {name: torch.zeros_like(tensor, dtype=torch.bool) for name, tensor in self._before.items()}

    def arrive(self, arrival: Arrival) -> Arrival:
        returned = arrival.upload.tensors
        if names := [name for name in self._before if bool(returned[name].isnan().any())]:
            raise Unusable("not_finite", f"NaN in {', '.join(names)}")  # which is neither small nor large
        places = self._round.positions(arrival.receipt)
        self._arrived = {name: returned[name] for name in self._before}, places
        averaged = partial(self.rules.averaged, where=places)
        sent = replace(arrival.sent, tensors=averaged(arrival.sent.tensors))
        return replace(arrival, sent=sent, upload=replace(arrival.upload, tensors=averaged(returned)))

    @torch.no_grad()
    def added(self, arrival: Arrival) -> None:
        after, where = self._arrived
        for name, before in self._before.items():
            values, held = before.flatten().clone(), torch.zeros(before.numel(), dtype=torch.bool, device=before.device)
            places = where[name].flatten().to(before.device) if name in where else slice(None)
            values[places], held[places] = after[name].to(values).flatten(), True
            self._merge(name, values.view(before.shape), held.view(before.shape))

    def gather(self, processes: Peers) -> Iterable[Arrival]:
        if processes.size > 1 and self._before:
            mine = [(name, self._values[name].cpu(), self._held[name].cpu()) for name in self._before]
            for name, values, held in (entry for entries in processes.gather(mine) for entry in entries):
                self._merge(name, values.to(self._before[name].device), held.to(self._before[name].device))
        return ()

    def close(self, outcomes: Sequence[ClientOutcome]) -> Mapping[str, float]:
        follows = {name: self._held[name] & (signs != 0) for name, signs in self.rules.limits.items()}
        ended = {name: torch.where(follows[name], self._values[name], own) for name, own in self._before.items()}
        load_tensors(self.server, ended)
        return {}

    def _merge(self, name: str, values: Tensor, held: Tensor) -> None:
        """Merge other clients' values, where they hold any."""
        own, is_held = self._values[name], self._held[name]
        if values.is_floating_point():
            values = values + 0.0  # of the two zeros, which one counts as smaller depends on the order
        largest, smallest = torch.maximum(own, values), torch.minimum(own, values)
        extreme = torch.where(self.rules.limits[name] > 0, largest, smallest)
        self._values[name] = torch.where(held, torch.where(is_held, extreme, values), own)
        self._held[name] = is_held | held
