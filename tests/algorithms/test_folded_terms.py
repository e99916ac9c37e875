"""Terms that a client does not train are part of its frozen weight: against autograd on the server's whole network."""

from dataclasses import replace
from itertools import chain
from typing import Any

import pytest
import torch
from federation import Fit, same_state, seeded
from one_client import client_of
from test_third_party_models import gpt2, tokens
from torch import Tensor
from toy_models import LitMLP

import lightning_spectral as ls
from lightning_spectral.algorithms.lora.algorithm import LoRAHalf
from lightning_spectral.protocol.cohort import Cohort
from lightning_spectral.protocol.records import WorkUnit

FOLDED = ls.algorithms.FoldedTerms(ls.Unbiased())
UNITS = {1 / 3: (WorkUnit(0, coefficient=3.0), WorkUnit(1, coefficient=1.0)), 1.0: (WorkUnit(2, coefficient=2.0),)}
COHORT = Cohort(0, 1, UNITS)


def bound(lit: Any, aggregation: Any = FOLDED, layers: Any = ("*",)) -> LoRAHalf:
    """The server half in the middle of a run: its factors are balanced, and far from zero."""
    algorithm = ls.LoRA([1, 1, 3], aggregation=aggregation, layers=layers)
    half = algorithm.bind(lit, algorithm.new_state(lit, 0))
    half.settle()
    generator = torch.Generator().manual_seed(1)
    for _, adapter in half.state.pairs:
        left = 0.2 * torch.randn(adapter.B.shape, generator=generator)
        U, s, Vh = torch.linalg.svd(left @ adapter.A.detach(), full_matrices=False)
        root = s[:3].sqrt()
        with torch.no_grad():
            adapter.B.copy_(U[:, :3] * root)
            adapter.A.copy_(root[:, None] * Vh[:3])
    half.settle()
    return half


def loaded(half: LoRAHalf, unit: WorkUnit, opened: Any) -> tuple[Any, Any, Any]:
    download, receipt = opened.send(unit)
    download = replace(download, round_idx=COHORT.round_idx)
    client = client_of(half.device_half, half.server, download.capacity)
    half.device_half.load(client, download)
    return client, download, receipt


def logits(net: Any) -> Tensor:
    """Of a small network: a transformer, whose weights are transposed, or a stack of layers."""
    if isinstance(net, LitMLP):
        return net.eval()(torch.randn(4, 6, generator=torch.Generator().manual_seed(0)))
    return net.eval()(input_ids=tokens().tensors[0][:4]).logits


@pytest.mark.parametrize("make", [LitMLP, gpt2])
def test_every_client_starts_from_the_servers_network_whatever_its_rank(make: Any) -> None:
    layers = ["*.c_*" if make is gpt2 else "*"]
    for aggregation, is_same in ((FOLDED, True), (ls.algorithms.ParallelTerms(), True), (ls.SampledTerms(), False)):
        half = bound(seeded(make), aggregation, layers)
        opened, expected = half.open(COHORT), logits(half.server)
        assert not torch.allclose(logits(seeded(make)), expected, rtol=1e-2, atol=1e-2)
        for unit in UNITS[1 / 3]:
            client, _, _ = loaded(half, unit, opened)
            assert torch.allclose(logits(client), expected, rtol=1e-4, atol=1e-4) is is_same


def test_a_device_that_trains_one_client_after_another_folds_into_the_base_each_time() -> None:
    half = bound(seeded(LitMLP))
    opened, side = half.open(COHORT), half.device_half
    download, _ = opened.send(UNITS[1 / 3][0])
    client = client_of(side, half.server, download.capacity)
    side.load(client, download)
    once = {name: tensor.clone() for name, tensor in client.state_dict().items()}
    side.load(client, download)
    assert same_state(client.state_dict(), once)


def stepped_whole(half: LoRAHalf, opened: Any, x: Tensor, lr: float) -> dict[Any, tuple[Tensor, Tensor]]:
    """The slow way: a client with dense weights, which steps the factors of all terms."""
    factors, weights = {}, {}
    for layer, adapter in half.state.pairs:
        ordered = opened.adapters[layer].opened  # by size
        B, A = factors[layer] = [factor.clone().requires_grad_() for factor in (ordered.B, ordered.A)]
        weights[layer.weight.removeprefix("net.")] = adapter.base.detach() + layer.scale * B @ A
    torch.func.functional_call(half.server.net, weights, (x,)).square().mean().backward()
    return {layer: ((B - lr * B.grad).detach(), (A - lr * A.grad).detach()) for layer, (B, A) in factors.items()}


@pytest.mark.parametrize("aggregation", [FOLDED, ls.algorithms.ParallelTerms()], ids=repr)
def test_a_step_is_that_of_the_whole_network_in_the_clients_own_terms(aggregation: Any) -> None:
    """Which are then averaged over their holders; all other terms are unchanged."""
    half, lr = bound(seeded(LitMLP, dropout=0.0), aggregation), 0.05
    opened, generator = half.open(COHORT), torch.Generator().manual_seed(2)
    by_size = {layer: opened.adapters[layer].opened for layer in half.state.layers}
    before = {layer: (own.B.clone(), own.A.clone()) for layer, own in by_size.items()}
    steps: dict[Any, list[Any]] = {layer: [] for layer in half.state.layers}
    for unit in chain(*UNITS.values()):
        x = torch.randn(5, 6, generator=generator)
        client, download, receipt = loaded(half, unit, opened)
        client.net(x).square().mean().backward()
        torch.optim.SGD([p for p in client.parameters() if p.requires_grad], lr=lr).step()
        upload = half.device_half.collect(client, download)
        assert upload.tensors.keys() == {name for layer in before for name in layer.factors.values()}
        opened.add(receipt, upload)
        for layer, factors in stepped_whole(half, opened, x, lr).items():
            terms = receipt.drawn[layer.name]
            assert len(terms) == round(3 * COHORT.capacity_of(unit))
            steps[layer].append((unit.coefficient, terms, *factors))
    opened.close()
    if aggregation.steps(half.is_mixed):
        torch.optim.SGD(half.state.parameters(), lr=1.0).step()
    for layer, adapter in half.state.pairs:
        B, A = (factor.clone() for factor in before[layer])
        for term in range(3):
            holders = [(weight, b, a) for weight, terms, b, a in steps[layer] if term in terms]
            total = sum(weight for weight, _, _ in holders)
            B[:, term] = sum(weight / total * b[:, term] for weight, b, _ in holders)
            A[term] = sum(weight / total * a[term] for weight, _, a in holders)
        assert torch.allclose(adapter.B @ adapter.A, B @ A, rtol=0, atol=1e-5)
        assert not torch.allclose(B @ A, before[layer][0] @ before[layer][1], rtol=0, atol=1e-2)


def test_equal_ranks_fold_nothing(data: Any, fit: Fit) -> None:
    algorithms = (ls.LoRA(2, aggregation=own) for own in (FOLDED, ls.SampledTerms()))
    folded, sampled = (fit(seeded(LitMLP), data, algorithm=algorithm, max_epochs=2) for algorithm in algorithms)
    assert same_state(folded.state, sampled.state)
    assert folded.ledger.rows == sampled.ledger.rows
