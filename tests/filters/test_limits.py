"""Extremes over clients against Python's own, in any order and over several processes."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peers import Peer, together
from torch import Tensor, nn

from lightning_spectral.algorithms.filter import Arrival, Opened, Unusable
from lightning_spectral.filters.limits import Limits
from lightning_spectral.protocol.buffer_rules import BufferRules
from lightning_spectral.protocol.records import Download, Receipt, Upload, WorkUnit

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int64, torch.uint8, torch.bool]
SIGNS = {"low": torch.tensor(-1), "high": torch.tensor(1), "mixed": torch.tensor([-1, 0, 1, -1, 0, 1])}


class Extremes(Limits):
    """Those of a server that has nothing but some buffers, in a round that has begun."""

    def __init__(self, before: dict[str, Tensor], signs: dict[str, Tensor]) -> None:
        server, opened = nn.Module(), SimpleNamespace(positions=lambda receipt: receipt.drawn)
        for name, tensor in before.items():
            server.register_buffer(name, tensor.clone())
        super().__init__(BufferRules(limits=signs), server)
        self.begin(Opened(opened, None))  # type: ignore[arg-type]

    def add(self, tensors: dict[str, Tensor], where: dict[str, Tensor] | None = None) -> None:
        unit = WorkUnit(0)
        arrival = Arrival(Receipt(unit, 1.0, where or {}), Download(unit, 1.0, {}), Upload(unit, tensors))
        self.arrive(arrival)
        self.added(arrival)

    def finish(self) -> dict[str, Tensor]:
        self.close(())
        return dict(self.server.named_buffers())


def clients(dtype: torch.dtype, number: int = 5) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [{name: (torch.randn(6, generator=generator) * 20).abs().to(dtype) for name in SIGNS} for _ in range(number)]


def extremes_of(added: list[dict[str, Tensor]], before: dict[str, Tensor]) -> Extremes:
    extremes = Extremes(before, SIGNS)
    for tensors in added:
        extremes.add(tensors)
    return extremes


def slowly(added: list[dict[str, Tensor]], before: dict[str, Tensor]) -> dict[str, list[Any]]:
    """Entry by entry, with Python's numbers."""
    choose = {-1: min, 1: max}
    return {
        name: [
            choose[sign]([tensors[name][i].item() for tensors in added]) if sign else before[name][i].item()
            for i, sign in enumerate(signs.expand(6).tolist())
        ]
        for name, signs in SIGNS.items()
    }


def gathered(extremes: Extremes, peer: Peer) -> dict[str, Tensor]:
    extremes.gather(peer)
    return extremes.finish()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_extremes_equal_pythons_in_any_order_and_over_any_processes(dtype: torch.dtype) -> None:
    added, before = clients(dtype), {name: torch.zeros(6, dtype=dtype) for name in SIGNS}
    expected = slowly(added, before)
    one = extremes_of(added, before).finish()
    assert {name: values.tolist() for name, values in one.items()} == expected
    assert all(values.dtype == dtype for values in one.values())
    for other in together([extremes_of(group, before) for group in (added[3:], [], added[:3][::-1])], gathered):
        assert all(torch.equal(other[name], one[name]) for name in SIGNS)


def test_integers_beyond_those_that_floating_point_numbers_can_hold_are_exact() -> None:
    large = 2**62
    extremes = Extremes({"count": torch.tensor(0)}, {"count": torch.tensor(1)})
    for value in (large + 1, large, -large):
        extremes.add({"count": torch.tensor(value)})
    assert extremes.finish()["count"].item() == large + 1


@pytest.mark.parametrize("sign", [-1, 1])
def test_the_sign_of_a_zero_does_not_depend_on_the_order(sign: int) -> None:
    zeros = [torch.tensor([0.0]), torch.tensor([-0.0])]
    bits = []
    for order in (zeros, zeros[::-1]):
        extremes = Extremes({"low": torch.tensor([1.0])}, {"low": torch.tensor(sign)})
        for zero in order:
            extremes.add({"low": zero})
        bits.append(extremes.finish()["low"].signbit().item())
    assert bits[0] == bits[1]


def test_infinite_values_stay_infinite() -> None:
    mask = torch.tensor([0.5, -torch.inf, torch.inf])
    extremes = Extremes({"mask": mask}, {"mask": torch.tensor([0, 1, -1])})
    extremes.add({"mask": mask})
    assert extremes.finish()["mask"].tolist() == mask.tolist()


def test_without_clients_nothing_changes() -> None:
    before = {"low": torch.tensor([3.0, torch.nan])}
    torch.testing.assert_close(Extremes(before, {"low": torch.tensor(-1)}).finish(), before, equal_nan=True)


def test_entries_that_no_client_holds_do_not_change() -> None:
    extremes = Extremes({"low": torch.tensor([[9, 9], [9, 9]])}, {"low": torch.tensor(-1)})
    extremes.add({"low": torch.tensor([[4], [20]])}, where={"low": torch.tensor([[0], [2]])})
    extremes.add({"low": torch.tensor([[5, 6]])}, where={"low": torch.tensor([[0, 1]])})
    assert extremes.finish()["low"].tolist() == [[4, 6], [20, 9]]


def test_tensors_with_nan_are_named() -> None:
    before = {"low": torch.zeros(2), "seen": torch.tensor(False)}
    extremes = Extremes(before, dict.fromkeys(before, SIGNS["high"]))
    extremes.add({"low": torch.tensor([0.0, torch.inf]), "seen": torch.tensor(True)})
    with pytest.raises(Unusable, match="NaN in low"):
        extremes.add({"low": torch.tensor([0.0, torch.nan]), "seen": torch.tensor(True)})
