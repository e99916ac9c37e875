"""Aggregations of adapters against means of dense products in float64; folded terms against the whole network."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import pytest
import torch
from aggregations import AGGREGATIONS
from federation import Fit, same_state, seeded
from one_client import client_of
from test_third_party_models import gpt2, tokens
from torch import Tensor
from toy_models import LitMLP

import lightning_spectral as ls
from lightning_spectral.algorithms.lora.aggregation import (
    Adapter,
    AdapterRound,
    OpenAdapter,
    balanced_factors,
    compact_svd,
)
from lightning_spectral.algorithms.lora.algorithm import LoRAHalf
from lightning_spectral.nn.adapters import AdaptedLayer
from lightning_spectral.protocol.cohort import Cohort
from lightning_spectral.protocol.records import WorkUnit
from lightning_spectral.protocol.rng import derived_generator
from lightning_spectral.sums.exact_mean import largest_magnitudes

C_OUT, C_IN, R, SCALE = 9, 7, 4, 1.5
WEIGHTS = {0: 3.0, 1: 1.0, 2: 2.0, 3: 2.0}  # number of examples of each client
ALL_FULL, MIXED = (R, R, R, R), (R, 1, 2, 2)


class OneLayer:
    """A round of one layer whose clients add noise of their own to each factor they train."""

    def __init__(
        self,
        aggregation: ls.algorithms.AdapterAggregation,
        ranks: Sequence[int],
        round_idx: int = 0,
        absolute: bool = False,
    ) -> None:
        generator = torch.Generator().manual_seed(0)
        b, a, base = (
            torch.randn(*shape, generator=generator, dtype=torch.float64)
            for shape in ((C_OUT, R), (R, C_IN), (C_OUT, C_IN))
        )
        if isinstance(aggregation, ls.SampledTerms):
            b, a = balanced_factors(b, a, R, 1.0, 1e-12)  # as the round before left them
        if isinstance(aggregation, ls.StackedProducts):
            b.zero_()
        self.adapter = Adapter(base, b, a)
        groups: dict[float, tuple[WorkUnit, ...]] = {}
        for client, rank in enumerate(ranks):
            groups[rank / R] = (*groups.get(rank / R, ()), WorkUnit(client, coefficient=WEIGHTS[client]))
        cohort = Cohort(0, round_idx, groups, absolute=absolute)
        by_ratio = {ratio: round(ratio * R) for ratio in groups}
        layer = AdaptedLayer("fc", C_OUT, C_IN, scale=SCALE)
        self.trained = aggregation.trained(round_idx)
        self.opened = OpenAdapter(layer, b.clone(), a.clone(), cohort, by_ratio, len(set(ranks)) > 1, self.trained)
        self.round: AdapterRound = aggregation.open(self.opened)
        self.units = [unit for units in groups.values() for unit in units]

    def play(self, noise: float = 1.0, left_out: Sequence[int] = ()) -> dict[int, tuple[Tensor, dict[str, Tensor]]]:
        """Train all clients and close with a plain averaging step; return each client's terms and all parts."""
        uploads = {}
        for unit in self.units:
            terms, sent = self.round.draw(unit)
            generator = derived_generator(0, "noise", *unit.ids)
            parts = {name: sent[name].clone() for name in ("A", "B")}
            for name in self.trained:
                parts[name] += noise * torch.randn(parts[name].shape, generator=generator, dtype=torch.float64)
            if unit.client_id not in left_out:
                back = {name: parts[name] for name in self.trained}
                self.round.add(unit, terms, back, largest_magnitudes(back))
            uploads[unit.client_id] = terms, {**sent, **parts}
        self.round.close(self.adapter)
        with torch.no_grad():
            for part in self.adapter.parameters():
                part.sub_(part.grad if part.grad is not None else torch.zeros(()))
        return uploads

    @property
    def weight(self) -> Tensor:
        return (self.adapter.base + SCALE * self.adapter.B @ self.adapter.A).detach()


def mean(values: Mapping[int, Tensor]) -> Tensor:
    total = sum(WEIGHTS[client] for client in values)
    return sum((WEIGHTS[client] / total * value for client, value in values.items()), torch.zeros(()))


def mean_product(uploads: Mapping[int, tuple[Tensor, dict[str, Tensor]]]) -> Tensor:
    """The slow way: a full matrix for every client."""
    return mean({client: parts["B"] @ parts["A"] for client, (_, parts) in uploads.items()})


@pytest.mark.parametrize(
    ("aggregation", "ranks", "round_idx"),
    [
        (ls.FrozenA(), ALL_FULL, 0),
        (ls.algorithms.OrthonormalA(), ALL_FULL, 0),
        (ls.AlternatingFactors(), ALL_FULL, 0),
        (ls.AlternatingFactors(), ALL_FULL, 1),
        (ls.StackedProducts(), ALL_FULL, 0),
        (ls.StackedProducts(), MIXED, 3),
    ],
    ids=repr,
)
def test_what_is_exact_is_the_mean_of_the_products(aggregation: Any, ranks: Any, round_idx: int) -> None:
    layer = OneLayer(aggregation, ranks, round_idx)
    expected = layer.adapter.base.clone() + SCALE * mean_product(layer.play())
    assert torch.allclose(layer.weight, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("absolute", [False, True])
def test_truncated_products_are_the_best_terms_of_the_mean(absolute: bool) -> None:
    layer = OneLayer(ls.TruncatedProducts(), MIXED, absolute=absolute)
    before = layer.opened.B @ layer.opened.A
    dense = mean_product(layer.play())
    if absolute:  # coefficients sum to 8: the change counts eight times
        dense = before + sum(WEIGHTS.values()) * (dense - before)
    U, s, Vh = torch.linalg.svd(dense)
    expected = U[:, :R] @ torch.diag(s[:R]) @ Vh[:R]
    b, a = layer.adapter.B.detach(), layer.adapter.A.detach()
    assert torch.allclose(b @ a, expected, rtol=0, atol=1e-12 * max(1.0, float(s[0])))
    assert torch.allclose(b.T @ b, torch.diag(s[:R]), rtol=0, atol=1e-11 * max(1.0, float(s[0])))


@pytest.mark.parametrize("absolute", [False, True])
@pytest.mark.parametrize("left_out", [(), (0,), (1, 3)], ids=str)
def test_by_rank_each_place_is_averaged_over_the_clients_that_have_it(left_out: Any, absolute: bool) -> None:
    layer = OneLayer(ls.algorithms.RankedProducts(), MIXED, absolute=absolute)
    before = layer.opened.B @ layer.opened.A
    uploads = {client: own for client, own in layer.play(left_out=left_out).items() if client not in left_out}
    dense = torch.zeros(C_OUT, C_IN, dtype=torch.float64)
    for place in range(R):
        kept = torch.outer(layer.opened.B[:, place], layer.opened.A[place])
        reach = {
            client: torch.outer(parts["B"][:, place], parts["A"][place])
            for client, (terms, parts) in uploads.items()
            if place < len(terms)
        }
        step = sum(WEIGHTS[client] for client in uploads) if absolute else 1.0
        dense += kept + step * (mean(reach) - kept) if reach else kept
    U, s, Vh = torch.linalg.svd(dense)
    expected = U[:, :R] @ torch.diag(s[:R]) @ Vh[:R]
    assert not torch.allclose(expected, before, rtol=0, atol=0.1)
    assert torch.allclose(layer.adapter.B @ layer.adapter.A, expected, rtol=0, atol=1e-11 * float(s[0]))


def test_an_orthonormal_a_and_its_b_are_the_singular_terms_of_the_mean() -> None:
    layer = OneLayer(ls.algorithms.OrthonormalA(), ALL_FULL)
    U, s, Vh = torch.linalg.svd(mean_product(layer.play()))
    b, a = layer.adapter.B.detach(), layer.adapter.A.detach()
    assert torch.allclose(b @ a, U[:, :R] @ torch.diag(s[:R]) @ Vh[:R], rtol=0, atol=1e-12)
    assert torch.allclose(a @ a.T, torch.eye(R, dtype=torch.float64), rtol=0, atol=1e-13)
    assert torch.allclose(b.T @ b, torch.diag(s[:R] ** 2), rtol=0, atol=1e-11)


def test_a_zero_term_keeps_an_orthonormal_row_on_which_b_can_train() -> None:
    layer = OneLayer(ls.algorithms.OrthonormalA(), (1, 2, 1, 2))  # nobody trains the last two terms
    layer.opened.B.zero_()
    layer.round = ls.algorithms.OrthonormalA().open(layer.opened)
    layer.play()
    b, a = layer.adapter.B.detach(), layer.adapter.A.detach()
    assert torch.linalg.matrix_rank(b @ a) == 2
    assert torch.allclose(a @ a.T, torch.eye(R, dtype=torch.float64), rtol=0, atol=1e-13)


def test_padded_factors_are_means_with_zeros() -> None:
    layer = OneLayer(ls.PaddedFactors(), MIXED)
    uploads = layer.play()
    for name, shape in (("A", (R, C_IN)), ("B", (C_OUT, R))):
        padded = {}
        for client, (terms, parts) in uploads.items():
            padded[client] = torch.zeros(shape, dtype=torch.float64)
            rows = padded[client] if name == "A" else padded[client].T
            rows[terms] = parts[name] if name == "A" else parts[name].T
        assert torch.allclose(layer.adapter.get_parameter(name), mean(padded), rtol=0, atol=1e-13)


@pytest.mark.parametrize(
    "aggregation",
    [
        ls.SampledTerms(ls.Unbiased()),
        ls.algorithms.FoldedTerms(ls.Unbiased()),
        ls.algorithms.ParallelTerms(),
        ls.FrozenA(),
        ls.algorithms.OrthonormalA(),
    ],
    ids=repr,
)
def test_each_term_is_the_mean_over_its_holders_and_stays_without_any(aggregation: Any) -> None:
    layer = OneLayer(aggregation, (1, 2, 1, 2))
    expected = {"A": layer.opened.A.clone(), "B": layer.opened.B.clone()}
    uploads = layer.play()
    held = {term: [c for c, (terms, _) in uploads.items() if term in terms] for term in range(R)}
    assert not all(held.values()), "some term should be held by nobody"
    for term, holders in held.items():
        if holders:
            places = {client: int((uploads[client][0] == term).nonzero()) for client in holders}
            expected["A"][term] = mean({c: uploads[c][1]["A"][place] for c, place in places.items()})
            expected["B"][:, term] = mean({c: uploads[c][1]["B"][:, place] for c, place in places.items()})
    assert torch.allclose(layer.weight, layer.adapter.base + SCALE * expected["B"] @ expected["A"], rtol=0, atol=1e-12)


def test_sampled_terms_leave_singular_terms_behind() -> None:
    layer = OneLayer(ls.SampledTerms(), MIXED)
    layer.play()
    b, a = layer.adapter.B.detach(), layer.adapter.A.detach()
    s = torch.linalg.svdvals(b @ a)[:R]
    assert torch.allclose(b.T @ b, torch.diag(s), rtol=0, atol=1e-12)
    assert torch.allclose(a @ a.T, torch.diag(s), rtol=0, atol=1e-12)


def test_all_terms_for_everybody_are_plain_federated_lora() -> None:
    ours, plain = OneLayer(ls.SampledTerms(), ALL_FULL), OneLayer(ls.SampledTerms(), ALL_FULL)
    plain.round = ls.PaddedFactors().open(plain.opened)
    uploads = ours.play()
    plain.play()
    assert all("omega" not in parts and torch.equal(terms, torch.arange(R)) for terms, parts in uploads.values())
    assert torch.equal(ours.adapter.A, plain.adapter.A)
    assert torch.equal(ours.adapter.B, plain.adapter.B)


@pytest.mark.parametrize("aggregation", AGGREGATIONS, ids=repr)
def test_clients_that_change_nothing_change_nothing(aggregation: Any) -> None:
    """Except where small ranks count as zeros: there, each round without training loses part of the adapter."""
    equal, mixed = OneLayer(aggregation, ALL_FULL), OneLayer(aggregation, MIXED)
    before = equal.weight, mixed.weight
    equal.play(noise=0.0)
    mixed.play(noise=0.0)
    assert torch.allclose(equal.weight, before[0], rtol=0, atol=1e-12)
    shrinks = aggregation in (ls.PaddedFactors(), ls.TruncatedProducts())
    assert torch.equal(mixed.weight, before[1]) is not shrinks


@pytest.mark.parametrize("shape", [(9, 3, 7), (4, 6, 11), (5, 8, 3)], ids=str)
def test_a_compact_decomposition_is_that_of_the_full_matrix(shape: tuple[int, int, int]) -> None:
    rows, inner, columns = shape
    generator = torch.Generator().manual_seed(1)
    left = torch.randn(rows, inner, generator=generator, dtype=torch.float64)
    right = torch.randn(inner, columns, generator=generator, dtype=torch.float64)
    U, s, Vh = compact_svd(left, right)
    assert len(s) == min(shape)
    assert torch.allclose(U @ torch.diag(s) @ Vh, left @ right, rtol=0, atol=1e-12)
    assert torch.allclose(s, torch.linalg.svdvals(left @ right)[: len(s)], rtol=0, atol=1e-12)


def test_a_term_that_is_zero_can_still_be_trained() -> None:
    generator = torch.Generator().manual_seed(2)
    left = torch.randn(6, 4, generator=generator, dtype=torch.float64)
    left[:, 2:] = 0
    right = torch.randn(4, 5, generator=generator, dtype=torch.float64)
    b, a = balanced_factors(left, right, 4, spare=0.5, eps=1e-15)
    assert torch.allclose(b @ a, left @ right, rtol=0, atol=1e-12)
    assert not b[:, 2:].any()
    assert torch.allclose(a[2:].norm(dim=1), torch.full((2,), 0.5, dtype=torch.float64))


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
    client = client_of(half.client_side, half.server, download.capacity)
    half.client_side.load(client, download)
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
    opened, side = half.open(COHORT), half.client_side
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
        upload = half.client_side.collect(client, download)
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
