"""Sub-models under unbiased samplers: expected steps over all outcomes of the draw of clients, computed exactly."""

import itertools
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lightning_spectral as ls
from lightning_spectral.protocol.cohort import Cohort
from lightning_spectral.protocol.records import Upload, WorkUnit

SHARES = [0.1, 0.3, 0.6]  # of all examples
PROBS = [0.5, 0.25, 0.8]  # of taking part, independently
CHANGES = [1.0, -2.0, 4.0]  # of every entry that the client holds
RATIOS = [0.25, 0.5, 0.75]
SUB_MODELS = [ls.WidthSharding(keep_ratio=RATIOS), ls.FIARSE(keep_ratio=RATIOS)]


def network() -> nn.Module:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3)).double()
    net.example_input_array = torch.zeros(2, 4, dtype=torch.float64)
    return net


def step(algorithm: Any, coefficients: dict[int, float]) -> dict[str, Tensor]:
    """The server's step in a round, by name, if clients contribute with these coefficients."""
    server = network()
    units = [WorkUnit(client, coefficient=coefficient) for client, coefficient in coefficients.items()]
    if isinstance(algorithm, ls.FedAvg):
        groups = {1.0: tuple(units)}
    else:
        groups = {RATIOS[unit.client_id]: (unit,) for unit in units}
    opened = algorithm.bind(server).open(Cohort(0, 0, groups, absolute=True))
    for unit in units:
        download, receipt = opened.send(unit)
        own = {name: download.tensors[name] + CHANGES[unit.client_id] for name, _ in server.named_parameters()}
        opened.add(receipt, Upload(unit, own))
    opened.close()
    return {name: -p.grad if p.grad is not None else torch.zeros_like(p) for name, p in server.named_parameters()}


def outcomes() -> Iterator[tuple[float, dict[int, float]]]:
    """Every set of clients that may take part, with its chance and the coefficients d / p of an unbiased sampler."""
    for drawn in itertools.product([False, True], repeat=3):
        chance = math.prod(p if there else 1 - p for p, there in zip(PROBS, drawn, strict=True))
        yield chance, {c: SHARES[c] / PROBS[c] for c in range(3) if drawn[c]}


def expected_step(algorithm: Any) -> dict[str, Tensor]:
    total = {name: torch.zeros_like(p) for name, p in network().named_parameters()}
    for chance, coefficients in outcomes():
        for name, own in step(algorithm, coefficients).items() if coefficients else ():
            total[name] += chance * own
    return total


def ratio(coefficients: dict[int, float], holders: range) -> float:
    """The mean change of the holders that take part, times the sum of all coefficients; zero if none does."""
    held = {client: c for client, c in coefficients.items() if client in holders}
    if not held:
        return 0.0
    return sum(coefficients.values()) * sum(c * CHANGES[client] for client, c in held.items()) / sum(held.values())


def test_whole_models_have_the_expected_step_of_full_participation() -> None:
    whole = step(ls.FedAvg(), dict(enumerate(SHARES)))
    torch.testing.assert_close(expected_step(ls.FedAvg()), whole, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("algorithm", SUB_MODELS, ids=["width", "FIARSE"])
def test_the_expected_step_of_entries_that_some_lack_is_that_of_a_ratio(algorithm: Any) -> None:
    whole, ours = step(algorithm, dict(enumerate(SHARES))), expected_step(algorithm)
    each = [step(algorithm, {client: 1.0}) for client in range(3)]
    held = {name: torch.stack([own[name] != 0 for own in each]).sum(0) for name in each[0]}  # by how many clients
    for count in range(4):
        holders = range(3 - count, 3)  # the clients of the largest keep ratios
        full = ratio(dict(enumerate(SHARES)), holders)
        expected = sum(chance * ratio(coefficients, holders) for chance, coefficients in outcomes())
        assert (expected == pytest.approx(full)) == (count in (0, 3))  # unbiased if all clients hold an entry
        for values, wanted in ((whole, full), (ours, expected)):
            entries = torch.cat([values[name][own == count] for name, own in held.items()])
            assert len(entries) > 0
            torch.testing.assert_close(entries, torch.full_like(entries, wanted), rtol=1e-6, atol=1e-7)
