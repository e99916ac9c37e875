"""`check_filter` passes what keeps the contract, and says what is wrong with what does not."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
import torch
from ternary import Ternary, TernaryEnd
from torch import nn

import lightning_spectral as ls
from lightning_spectral.filters import Arrival, DeviceEnd, Filter, ServerEnd
from lightning_spectral.testing import check_filter

BATCH = torch.randn(6, 5, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))

    def forward(self, x: torch.Tensor) -> Any:
        return self.net(x)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self(batch).square().mean()


OWN: dict[str, tuple[Filter, dict[str, Any]]] = {
    "Personal": (ls.Personal(["net.4.*"]), {}),
    "Personal, sharded": (ls.Personal(["net.4.*"]), {"algorithm": ls.SpectralSharding.published(keep_ratio=0.5)}),
    "Personal, trained first": (ls.Personal(["net.4.*"], epochs=1), {}),
    "Personal, packed": (ls.Personal(["net.4.*"]), {"beside": [ls.Int8()], "rests": False}),
    "TopK": (ls.TopK(0.2), {"rests": False}),
    "TopK of stale updates": (ls.TopK(0.2), {"algorithm": ls.StaleUpdates()}),
    "Int8 of q-FedAvg": (ls.Int8(), {"algorithm": ls.QFedAvg(q=2.0)}),
    "Int8 of Scaffold": (ls.Int8(), {"rests": False, "algorithm": ls.Scaffold()}),
    "bounds": (ls.UsualUpdateNorm(0.9), {"beside": [ls.Int8()], "rests": False}),
    "SecureSums": (ls.SecureSums(), {}),
    "of a stranger": (Ternary(0.5), {}),
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", OWN)
def test_what_keeps_the_contract_passes(name: str) -> None:
    own, options = OWN[name]
    check_filter(own, Net(), BATCH, **options)


def with_end(kind: type[ServerEnd | DeviceEnd]) -> Filter:
    place = "server" if issubclass(kind, ServerEnd) else "device"
    return dataclass(frozen=True)(type(f"With{kind.__name__}", (Filter,), {place: lambda self, fit: kind()}))()


class CountingEnd(ServerEnd):
    """Shortens every update to a length that shrinks with the number of rounds, which no checkpoint remembers."""

    rounds = 0

    def arrive(self, arrival: Arrival) -> Arrival:
        sent, upload = arrival.sent.tensors, arrival.upload
        short = {n: sent[n].lerp(t, 0.5**self.rounds) for n, t in upload.tensors.items()}
        return replace(arrival, upload=replace(upload, tensors=short))

    def close(self, outcomes: Any) -> Any:
        self.rounds += 1
        return {}


class InOrderEnd(ServerEnd):
    """Trusts each client less than the one before."""

    def begin(self, opened: Any) -> None:
        self.trust = 1.0

    def arrive(self, arrival: Arrival) -> Arrival:
        sent, upload, self.trust = arrival.sent.tensors, arrival.upload, 0.5 * self.trust
        less = {n: sent[n].lerp(t, self.trust) for n, t in upload.tensors.items()}
        return replace(arrival, upload=replace(upload, tensors=less))


class LongestEnd(ServerEnd):
    """Passes on the longest update alone, of those that this process has seen."""

    def begin(self, opened: Any) -> None:
        self.held: list[Arrival] = []

    def arrive(self, arrival: Arrival) -> Arrival:
        tensors = {name: tensor.clone() for name, tensor in arrival.upload.tensors.items()}
        self.held.append(replace(arrival, upload=replace(arrival.upload, tensors=tensors)))
        return replace(arrival, is_held=True)

    def gather(self, processes: Any) -> Any:
        def length(arrival: Arrival) -> float:
            sent = arrival.sent.tensors
            return sum(float((t - sent[n]).square().sum()) for n, t in arrival.upload.tensors.items())

        return sorted(self.held, key=lambda one: (length(one), one.receipt.unit))[-1:]


@dataclass(frozen=True)
class ShrinkingEnd(DeviceEnd):
    """Shrinks values, not their changes."""

    def leave(self, turn: Any, upload: Any) -> Any:
        return replace(upload, tensors={name: 0.99 * tensor for name, tensor in upload.tensors.items()}), {}


@dataclass(frozen=True)
class LooseEnd(TernaryEnd):
    """Says that it sends what it gets."""

    def sized(self, turn: Any, upload: Any) -> Any:
        return upload


@dataclass(frozen=True)
class Loose(Ternary):
    def device(self, half: Any) -> LooseEnd:
        return LooseEnd(self.clip)


@dataclass(frozen=True)
class GreedyEnd(DeviceEnd):
    """Expects every upload to have tensors."""

    def leave(self, turn: Any, upload: Any) -> Any:
        largest = max(float(tensor.abs().max()) for tensor in upload.tensors.values())
        return (upload if largest < 1e9 else replace(upload, tensors={})), {}


def halved(change: torch.Tensor) -> torch.Tensor:
    return 0.5 * change


@dataclass(frozen=True)
class CallingEnd(DeviceEnd):
    """Is given a function, which cannot be sent to a device."""

    shorten: Callable[[torch.Tensor], torch.Tensor] = halved

    def leave(self, turn: Any, upload: Any) -> Any:
        sent = turn.download.tensors
        moved = {name: sent[name] + self.shorten(tensor - sent[name]) for name, tensor in upload.tensors.items()}
        return replace(upload, tensors=moved), {}


@dataclass(frozen=True)
class RememberingEnd(DeviceEnd):
    """Remembers clients in the process of the device, not in what it returns to keep."""

    seen: ClassVar[dict[int, int]] = {}

    def leave(self, turn: Any, upload: Any) -> Any:
        client, sent = turn.download.unit.client_id, turn.download.tensors
        turns = self.seen[client] = self.seen.get(client, 0) + 1
        less = {name: sent[name].lerp(tensor, 1.0 / turns) for name, tensor in upload.tensors.items()}
        return replace(upload, tensors=less), {}


@dataclass(frozen=True)
class KeepingEnd(DeviceEnd):
    """Keeps something without saying so."""

    def leave(self, turn: Any, upload: Any) -> Any:
        return upload, {"turns": turn.kept.get("turns", torch.zeros(1)) + 1}


@dataclass(frozen=True)
class Unchecked(Ternary):
    def __post_init__(self) -> None:
        pass


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (
            with_end(CountingEnd),
            "not the uninterrupted run; what lasts belongs in the `state_dict` of the server's end",
        ),
        (with_end(InOrderEnd), "clients in reverse: their order made a difference"),
        (with_end(LongestEnd), "process [01] of 2: grouping made a difference"),
        (with_end(ShrinkingEnd), "nobody trained, but the server's weights changed"),
        (Loose(), "and `sized` says .*; a server over a network would refuse it"),
        (with_end(GreedyEnd), r"an upload that is left out \(error\) does not pass `leave`: ValueError"),
        (with_end(CallingEnd), "its half cannot be sent there: RecordError: .*shorten cannot be sent to devices"),
        (with_end(RememberingEnd), "not the uninterrupted run"),
        (with_end(KeepingEnd), "KeepingEnd keeps turns for the next turn; set `keeps = True`"),
        (Unchecked(), "it was not refused; call `lightning_spectral.arguments.check_fields`"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Filter) else "",
)
def test_what_breaks_a_rule_is_told_which(wrong: Filter, said: str) -> None:
    RememberingEnd.seen.clear()
    with pytest.raises((AssertionError, TypeError), match=said):
        check_filter(wrong, Net(), BATCH)
