"""Aggregations of adapters against the means of dense products, in float64; one layer, clients that are functions."""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from aggregations import AGGREGATIONS
from torch import Tensor

import lightning_spectral as ls
from lightning_spectral.algorithms.lora.aggregation import Adapter, AdapterRound, OpenAdapter
from lightning_spectral.functional.spectra import balanced_factors, compact_svd
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
        self.opened = OpenAdapter(layer, b.clone(), a.clone(), cohort, by_ratio, len(set(ranks)) > 1)
        self.round: AdapterRound = aggregation.open(self.opened)
        self.trained = aggregation.trained(round_idx)
        self.units = [unit for units in groups.values() for unit in units]

    def play(self, noise: float = 1.0, left_out: Sequence[int] = ()) -> dict[int, tuple[Tensor, dict[str, Tensor]]]:
        """Train all clients and close with a plain averaging step; return each client's terms and all parts."""
        uploads = {}
        for unit in self.units:
            terms, sent = self.round.draw(unit)
            generator = derived_generator(0, "noise", *unit.ids)
            parts = {name: sent[name].clone() for name in ("A", "B")}
            for name in self.trained:
                shape = parts[name].shape
                parts[name] += noise * torch.randn(shape, generator=generator, dtype=torch.float64)
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
    base = layer.adapter.base.clone()
    expected = base + SCALE * mean_product(layer.play())
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
    dense = mean_product(layer.play())
    U, s, Vh = torch.linalg.svd(dense)
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
