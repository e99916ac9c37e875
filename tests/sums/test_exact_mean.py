"""Exact weights, sums and means: the oracle is rational arithmetic, written from the docstrings."""

import itertools
import math
from collections.abc import Iterable
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peers import in_processes, merge
from torch import Tensor

from lightning_spectral.algorithms.zampling import MeanBits
from lightning_spectral.protocol.records import Upload, WorkUnit
from lightning_spectral.sums.exact_mean import (
    COARSE_BITS,
    FINE,
    LARGEST,
    MOST_TERMS,
    NEAR,
    ONE,
    MeanChange,
    Weights,
    can_be_summed,
    cut,
    join,
    largest_magnitudes,
)


def total_of(weights: list[float], total: float) -> Weights:
    added = Weights(total)
    for weight in weights:
        added.add(weight)
    return added


@given(st.lists(st.integers(0, 2**40), min_size=1, max_size=20))
def test_numbers_of_examples_stay_exact(sizes: list[int]) -> None:
    weights = total_of([float(size) for size in sizes], sum(sizes))
    assert weights.value == sum(sizes)
    assert weights.sum == Fraction(sum(sizes)) * Fraction(weights.one)


@given(st.lists(st.floats(0, 1e12), min_size=1, max_size=20))
def test_a_weight_is_rounded_by_at_most_2_to_the_minus_52_of_the_total(coefficients: list[float]) -> None:
    total = math.fsum(coefficients)
    weights = Weights(total)
    scale = Fraction(2) ** math.frexp(total)[1] / Fraction(ONE)
    for coefficient in coefficients:
        assert abs(weights.add(coefficient) * scale - Fraction(coefficient)) <= Fraction(total) / 2**52


@pytest.mark.parametrize("order", [sorted, lambda values: sorted(values, reverse=True)])
def test_a_total_that_was_itself_rounded_is_large_enough(order: Any) -> None:
    coefficients = [0.1 + i / 7 for i in range(10_000)]
    assert total_of(coefficients, sum(order(coefficients))).num_terms == 10_000


def test_more_weight_than_was_announced_is_refused() -> None:
    with pytest.raises(ValueError, match="sum to more than `total_weight`=10; give the sum of all"):
        total_of([6, 6], 10)
    for weight in (-1.0, 11.0, math.nan):
        with pytest.raises(ValueError, match="must be between 0 and the total of 10, got"):
            Weights(10).add(weight)
    for total in (-1.0, math.inf, math.nan):
        with pytest.raises(ValueError, match="`total_weight` must be finite and at least 0, got"):
            Weights(total)


def test_more_clients_than_there_is_room_for_are_refused() -> None:
    weights = total_of([0.0], 0)
    weights.count(0, MOST_TERMS - 1)
    with pytest.raises(OverflowError, match="room for 1048576 terms; ask fewer clients"):
        weights.add(0.0)


DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
COARSE = 2**COARSE_BITS


@given(st.floats(-(2.0**91), 2.0**91))
def test_cut_splits_a_number_without_loss_into_whole_coarse_steps_and_less_than_one(steps: float) -> None:
    rest = torch.tensor([steps], dtype=torch.float64)
    coarse = cut(rest)
    assert float(coarse) == round(Fraction(steps) / COARSE)
    assert Fraction(float(coarse)) * COARSE + Fraction(float(rest)) == Fraction(steps)
    assert abs(float(rest)) <= COARSE / 2


def test_both_sums_have_room_for_the_worst_round() -> None:
    """Weights sum to 1, plus a step of 2^-52 for each; the coarse sum must also be exact in float64."""
    weights = 1 + Fraction(MOST_TERMS, 2**52)
    near, rests, rounding = Fraction(NEAR * FINE), Fraction(COARSE, 2) * MOST_TERMS, Fraction(1, 2) * MOST_TERMS
    assert weights * near + rests + rounding < 2**63
    assert weights * Fraction(2 * LARGEST * FINE) / COARSE + rounding + Fraction(2**63, COARSE) <= 2**53


@given(st.integers(-(2**63), 2**63 - 1), st.integers(-(2**52), 2**52))
def test_sums_are_joined_with_one_rounding(steps: int, coarse: int) -> None:
    assert join(torch.tensor([steps]), torch.tensor([coarse])).tolist() == [float(steps + coarse * COARSE)]
    assert join(torch.tensor([steps])).tolist() == [float(steps)]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 2 * LARGEST])
def test_what_cannot_be_summed_is_refused_by_rule_and_value(value: float) -> None:
    one = {"w": torch.ones(1)}
    with pytest.raises(OverflowError, match=r"at most 1\.09951e\+12 in magnitude; 'w' has .* after local training"):
        MeanChange(one, 1).add({"w": torch.tensor([value])}, 1)
    with pytest.raises(OverflowError, match=r"'w' has .* before local training"):
        MeanChange({"w": torch.tensor([value])}, 1).add(one, 1)
    MeanChange({"w": torch.tensor([LARGEST])}, 1).add({"w": torch.tensor([LARGEST])}, 1)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.int64, torch.int8, torch.bool])
def test_largest_magnitude_of_every_type_is_exact(dtype: torch.dtype) -> None:
    tensors = {"a": torch.tensor([[0, -1], [1, 1]]).to(dtype), "none": torch.zeros(0, 3, dtype=dtype)}
    tensors["scalar"] = torch.tensor(1).to(dtype)
    others = {"large": torch.tensor(-70_000), "fine": torch.tensor([1 + 2**-50], dtype=torch.float64)}
    expected = {"a": 1.0, "none": 0.0, "scalar": 1.0, "large": 70_000.0, "fine": 1 + 2**-50}
    assert largest_magnitudes({**tensors, **others}) == expected


def test_largest_magnitude_of_not_a_number_is_not_a_number() -> None:
    found = largest_magnitudes({"bad": torch.tensor([1.0, float("nan"), 2.0]), "good": torch.tensor([-2.0])})
    assert str(found) == "{'bad': nan, 'good': 2.0}"
    assert largest_magnitudes({}) == {}


Client = tuple[dict[str, Tensor], float]


def mean_of(
    before: dict[str, Tensor], clients: list[Client], total: float, absolute: bool = False, **options: Any
) -> MeanChange:
    mean = MeanChange(before, total, absolute, **options)
    for after, weight in clients:
        mean.add(after, weight)
    return mean


def bits(mean: MeanChange) -> dict[str, list[str]]:
    return {name: [value.hex() for value in change.view(-1).tolist()] for name, change in mean.finish()}


def unit(before: Tensor) -> Fraction:
    """The power of two above the largest magnitude, at least 1."""
    found = Fraction(1)
    while before.numel() and found <= Fraction(float(before.abs().max())):
        found *= 2
    return found


def scale(total: float) -> Fraction:
    """The power of two above the total."""
    found = Fraction(1)
    while total > 0 and found > Fraction(total):
        found /= 2
    while found <= Fraction(total):
        found *= 2
    return found


def change_of(before: Tensor, after: Tensor) -> Tensor:
    """The change in the tensors' own type, unless that could overflow."""
    farthest = sum(float(tensor.double().abs().max()) for tensor in (before, after) if tensor.numel())
    return (after - before).double() if farthest <= torch.finfo(before.dtype).max else after.double() - before.double()


def exact_mean(before: Tensor, clients: list[tuple[Tensor, float]], total: float, absolute: bool) -> list[Fraction]:
    """The mean with weights cut to 2^-52 of their scale and weighted changes, rounded as products, to 2^-50 units."""
    cut_weights = [round(Fraction(weight) / scale(total) * 2**52) for _, weight in clients]
    sums = [Fraction(0)] * before.numel()
    for (after, _), steps in zip(clients, cut_weights, strict=True):
        for i, change in enumerate(change_of(before, after).reshape(-1).tolist()):
            product = change * float(Fraction(steps, 4) / unit(before))  # in fine steps, float64
            sums[i] += round(Fraction(product)) * unit(before) / 2**50
    divisor = 1 / scale(total) if absolute else Fraction(max(sum(cut_weights), 1), 2**52)
    return [value / divisor for value in sums]


def magnitudes(largest: float) -> st.SearchStrategy[float]:
    """Both signs, from 1e-12 to the largest, and zero."""
    exponents = st.floats(-40, math.log2(largest), exclude_max=True)
    return st.just(0.0) | st.builds(lambda e, sign: sign * 2.0**e, exponents, st.sampled_from([-1.0, 1.0]))


WEIGHTS = st.integers(0, 1000).map(float) | st.floats(0, 1000)


@st.composite
def rounds(draw: st.DrawFn) -> tuple[dict[str, Tensor], list[Client], float]:
    """Starting tensors of one type, the returned tensors with their weights, and the total."""
    dtype = draw(st.sampled_from(DTYPES))
    largest = draw(st.sampled_from([1.0, 100.0, 60_000.0 if dtype == torch.float16 else LARGEST * 0.99]))
    shapes = {"matrix": (2, 3), "scalar": (), "none": (0, 2), "one": (1,)}

    def tensors() -> dict[str, Tensor]:
        size = st.lists(magnitudes(largest), min_size=6, max_size=6)
        return {
            name: torch.tensor(draw(size)[: math.prod(shape)], dtype=torch.float64).view(shape).to(dtype)
            for name, shape in shapes.items()
        }

    clients = [(tensors(), draw(WEIGHTS)) for _ in range(draw(st.integers(1, 5)))]
    for after, _ in clients:
        after["matrix"] = after["matrix"].T.contiguous().T  # another order in memory
    return tensors(), clients, sum(weight for _, weight in clients) * draw(st.sampled_from([1.0, 1.5, 10.0]))


@settings(max_examples=20, deadline=None)
@given(rounds(), st.booleans())
def test_mean_is_the_exact_one_of_cut_values_rounded_twice(case, absolute):
    before, clients, total = case
    for name, mean in mean_of(before, clients, total, absolute).finish():
        exact = exact_mean(before[name], [(after[name], weight) for after, weight in clients], total, absolute)
        for value, expected in zip(mean.view(-1).tolist(), exact, strict=True):
            assert abs(Fraction(value) - expected) <= abs(expected) * (Fraction(2) ** -52)  # join, then divide


@settings(max_examples=20, deadline=None)
@given(rounds())
def test_mean_is_within_the_bound_of_the_docstring(case: tuple[dict[str, Tensor], list[Client], float]) -> None:
    """Against weights and changes that were not cut."""
    before, clients, total = case
    weights = [Fraction(weight) for _, weight in clients]
    if sum(weights) * 2**40 < Fraction(total) or not sum(weights):
        return
    share = len(clients) * Fraction(total) / sum(weights)
    for name, mean in mean_of(before, clients, total).finish():
        changes = [change_of(before[name], after[name]).reshape(-1).tolist() for after, _ in clients]
        for i, value in enumerate(mean.view(-1).tolist()):
            own = [Fraction(change[i]) for change in changes]
            true = sum(weight * change for weight, change in zip(weights, own, strict=True)) / sum(weights)
            bound = share * unit(before[name]) / 2**50 + (1 + share) * max(map(abs, own)) / 2**51
            assert abs(Fraction(value) - true) <= bound


@settings(max_examples=20, deadline=None)
@given(rounds(), st.randoms(use_true_random=False), st.booleans())
def test_bits_depend_neither_on_order_nor_on_grouping(case, random, absolute):
    before, clients, total = case
    expected = bits(mean_of(before, clients, total, absolute))
    shuffled = list(clients)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    cut = random.randint(0, len(clients))  # type: ignore[attr-defined]
    left, right = (mean_of(before, part, total, absolute) for part in (shuffled[:cut], shuffled[cut:]))
    merge(left, right)
    assert bits(left) == expected


def test_a_mean_exists_where_a_weight_of_one_would_be_too_many_steps() -> None:
    before = {"w": torch.zeros(2)}
    clients = [({"w": torch.ones(2)}, 2.0**-980), ({"w": -torch.ones(2)}, 3 * 2.0**-980)]
    ((_, mean),) = mean_of(before, clients, 2.0**-978).finish()
    assert mean.tolist() == [-0.5, -0.5]


BLOCK = 2**16


@pytest.mark.parametrize("shape", [(0, 2), (), (BLOCK,), (BLOCK + 1,), (300, 500), (2, BLOCK, 2)])
@pytest.mark.parametrize("is_transposed", [(False, False), (True, False), (False, True), (True, True)])
def test_large_tensors_come_in_blocks_whatever_their_order_in_memory(shape, is_transposed):
    generator = torch.Generator().manual_seed(0)
    before, after = (
        torch.randn(shape[::-1], generator=generator).permute(list(range(len(shape)))[::-1])
        if transposed
        else torch.randn(shape, generator=generator)
        for transposed in is_transposed
    )
    ((_, mean),) = mean_of({"w": before}, [({"w": after}, 1.0)], 1.0).finish()
    assert mean.shape == before.shape
    assert float((mean - (after - before).double()).abs().max() if mean.numel() else 0.0) <= 2.0**-47


@pytest.mark.parametrize("far", [1e3, 1e5, 1e9])
def test_only_a_change_of_more_than_4096_units_needs_a_coarse_sum(far: float) -> None:
    """In any order, and where a sum of near clients has more digits than float64."""
    before = {"w": torch.tensor([0.5, 0.5]).double()}
    near = [({"w": torch.tensor([4095.0 - 0.1 * i, 0.1]).double()}, 1 + i / 3) for i in range(4)]
    clients = [*near, ({"w": torch.tensor([-far, far]).double()}, 3.0)]
    means = [mean_of(before, order, 20.0) for order in (clients, clients[::-1])]
    assert [set(mean.coarse) for mean in means] == [{"w"} if far > 4096 else set()] * 2
    assert bits(means[0]) == bits(means[1])
    exact = exact_mean(before["w"], [(after["w"], weight) for after, weight in clients], 20.0, False)
    for value, expected in zip(next(means[0].finish())[1].tolist(), exact, strict=True):
        assert abs(Fraction(value) - expected) <= abs(expected) * Fraction(2) ** -52


def spread_out(count: int) -> tuple[dict[str, Tensor], list[Client]]:
    """Changes of very different sizes, so that plain sums lose different digits in different orders."""
    generator = torch.Generator().manual_seed(0)
    before, clients = {"w": torch.zeros(500, dtype=torch.float64), "b": torch.randn(3, generator=generator)}, []
    for i in range(count):
        w = 10.0 ** (4 - 3 * (i % 4)) * torch.randn(500, generator=generator, dtype=torch.float64)
        clients.append(({"w": w, "b": torch.randn(3, generator=generator)}, 1.0 + i / 3))
    return before, clients


@pytest.mark.parametrize(
    "groups", [[[0, 1, 2, 3, 4]], [[0, 1], [4, 3, 2]], [[], [4, 0, 1, 2, 3]], [[1], [2, 3], [0, 4]]]
)
def test_processes_end_with_the_bits_of_one(groups: list[list[int]]) -> None:
    """One of them may have met no client that needed a coarse sum, or no client at all."""
    before, clients = spread_out(5)
    expected = bits(mean_of(before, clients, 20.0))
    for mean in in_processes(groups, lambda group: mean_of(before, [clients[i] for i in group], 20.0)):
        assert isinstance(mean, MeanChange)
        assert bits(mean) == expected
        assert mean.weights.num_terms == 5


def test_more_clients_than_there_is_room_for_fail_in_every_process() -> None:
    def many(weight: float) -> MeanChange:
        mean = MeanChange({"w": torch.zeros(1)}, 1.0)
        mean.weights.count(0, MOST_TERMS // 2 + 1)
        return mean

    with pytest.raises(OverflowError, match="room for 1048576 terms"):
        in_processes([0.0, 0.0], many)


def test_largest_uploads_of_the_largest_round_are_summed_exactly() -> None:
    """The largest possible sums, all of one sign, for as many terms as there is room for; weights sum to almost 1."""
    before = {"far": torch.zeros(4).double() - 0.999, "near": torch.tensor([-0.999]).double()}
    after = {
        "far": torch.tensor([LARGEST, LARGEST * 0.7, 2.0**-12 * 0.999, -LARGEST]).double(),
        "near": torch.tensor([3.0]).double(),
    }
    total = MOST_TERMS - 1.0
    weight = total / MOST_TERMS
    mean = mean_of(before, [(after, weight)], total)
    while mean.weights.num_terms < MOST_TERMS:
        merge(mean, mean)  # twice as many
    for name, change in mean.finish():
        # all add the same: the exact sum is a multiple of one's
        once = exact_mean(before[name], [(after[name], weight)], total, absolute=True)
        in_all = [value * MOST_TERMS / Fraction(total) for value in once]
        for value, expected in zip(change.tolist(), in_all, strict=True):
            assert abs(Fraction(value) - expected) <= abs(expected) * Fraction(2) ** -52
    assert set(mean.coarse) == {"far"}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [1.0, 60_000.0, LARGEST, LARGEST * (1 + 2**-7), 1e300, math.inf, math.nan])
def test_an_upload_can_be_averaged_exactly_if_it_can_be_added(value: float, dtype: torch.dtype) -> None:
    tensors = {"w": torch.tensor([1.0, -value], dtype=torch.float64).to(dtype), "n": torch.zeros(0, dtype=dtype)}
    before = {"w": torch.tensor([-1.0, min(value, 60_000.0)]).to(dtype), "n": torch.zeros(0, dtype=dtype)}
    upload, mean = Upload(WorkUnit(0), tensors), MeanChange(before, 3)
    if all(map(can_be_summed, upload.largest.values())):
        mean.add(tensors, 3, upload.largest)
        assert all(bool(change.isfinite().all()) for _, change in mean.finish())
    else:
        with pytest.raises(OverflowError, match=r"values must be finite and at most 1\.09951e\+12 in magnitude; 'w'"):
            mean.add(tensors, 3, upload.largest)
        assert bits(mean) == bits(MeanChange(before, 3))  # it left no trace
        assert mean.weights.num_terms == 0


def test_nobody_and_nothing_changed_are_exact_zeros() -> None:
    before = {"w": torch.randn(3, 2, generator=torch.Generator().manual_seed(0)), "far": torch.full((2,), 1e9)}
    zeros = bits(MeanChange({name: torch.zeros_like(tensor) for name, tensor in before.items()}, 17))
    for absolute, total in itertools.product([False, True], [0, 17]):
        assert bits(MeanChange(before, total, absolute)) == zeros
        assert bits(mean_of(before, [(before, total)], total, absolute)) == zeros
    assert bits(mean_of({}, [({}, 1)], 1)) == {}


def test_add_leaves_its_arguments_as_they_are() -> None:
    before = {"w": torch.zeros(3).double(), "h": torch.zeros(3).half()}
    after = {"w": torch.tensor([1e6, 0.1, 0.2]).double(), "h": torch.tensor([60_000.0, 0.1, 0.2]).half()}
    copies = [{name: tensor.clone() for name, tensor in some.items()} for some in (before, after)]
    mean_of(before, [(after, 3)], 3)
    assert all(
        torch.equal(some[name], copy[name]) for some, copy in zip((before, after), copies, strict=True) for name in copy
    )


TermClient = tuple[Tensor, Tensor, Tensor, float]


def term_clients(count: int, far: float = 1.0) -> tuple[Tensor, Tensor, list[TermClient]]:
    """``u``, ``v`` and (terms, u_after, v_after, weight) of clients that hold 3 of 7 terms of a 5 x 4 weight."""
    generator = torch.Generator().manual_seed(0)
    u, v = torch.randn(5, 7, generator=generator), torch.randn(7, 4, generator=generator)
    clients = []
    for i in range(count):
        terms = torch.randperm(6, generator=generator)[:3].sort().values
        u_after = (far if i == 1 else 1.0) * torch.randn(5, 3, generator=generator)
        v_after = torch.randn(3, 4, generator=generator)
        clients.append((terms, u_after, v_after, float(torch.randint(1, 50, (), generator=generator))))
    return u, v, clients


def term_mean_of(u: Tensor, v: Tensor, clients: list[TermClient], total: float, absolute: bool = False) -> MeanChange:
    mean = MeanChange({"u": u, "v": v}, total, absolute, by_index={"u": 1, "v": 0})
    for terms, u_after, v_after, weight in clients:
        mean.add({"u": u_after, "v": v_after}, weight, where={"u": terms, "v": terms})
    return mean


def of_visited(mean: MeanChange) -> tuple[Tensor, Tensor, Tensor]:
    """Visited terms, shape ``(m,)``, and the mean change of their vectors, ``(c_out, m)`` and ``(m, c_in k)``."""
    visited = mean.visited("u")
    assert torch.equal(visited, mean.visited("v"))
    return visited, mean.change("u", visited), mean.change("v", visited)


@pytest.mark.parametrize("far", [1.0, 1e6])
@pytest.mark.parametrize("absolute", [False, True])
def test_each_term_is_the_weighted_mean_of_the_clients_that_held_it(far: float, absolute: bool) -> None:
    u, v, clients = term_clients(4, far)
    mean_of_terms = term_mean_of(u, v, clients, 200.0, absolute)
    visited, u_change, v_change = of_visited(mean_of_terms)
    for name, change in mean_of_terms.finish():
        assert not change.select(1 if name == "u" else 0, 6).any()
    assert set(visited.tolist()) == {term for terms, *_ in clients for term in terms.tolist()}
    assert 6 not in visited
    reported = Fraction(sum(weight for *_, weight in clients) if absolute else 1)
    for position, term in enumerate(visited.tolist()):
        holders = [(a, b, d, terms.tolist().index(term)) for terms, a, b, d in clients if term in terms]
        weight = sum(Fraction(d) for _, _, d, _ in holders) / 256  # 256 is the power of two above the total
        for axis, before, mean in ((1, u, u_change), (0, v, v_change)):
            start = before.select(axis, term)
            sums = [Fraction(0)] * len(start)
            for *factors, d, i in holders:
                for j, value in enumerate((factors[1 - axis].select(axis, i) - start).tolist()):
                    sums[j] += round(Fraction(value) * Fraction(d) / 256 * 2**50 / unit(before)) * unit(before) / 2**50
            for value, total in zip(mean.select(axis, position).tolist(), sums, strict=True):
                expected = total / weight * reported
                assert abs(Fraction(value) - expected) <= abs(expected) * 3 * Fraction(2) ** -53 * (
                    1 + Fraction(2) ** -50
                )


@pytest.mark.parametrize("absolute", [False, True])
def test_bits_of_terms_depend_neither_on_order_nor_on_processes(absolute: bool) -> None:
    u, v, clients = term_clients(5, far=1e6)
    expected = of_visited(term_mean_of(u, v, clients, 250.0, absolute))
    for order in itertools.permutations(clients):
        found = of_visited(term_mean_of(u, v, list(order), 250.0, absolute))
        assert all(torch.equal(mine, other) for mine, other in zip(found, expected, strict=True))
    for mean in in_processes([clients[3:], [], clients[:3]], lambda group: term_mean_of(u, v, group, 250.0, absolute)):
        assert isinstance(mean, MeanChange)
        assert all(torch.equal(mine, other) for mine, other in zip(of_visited(mean), expected, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
def test_large_factors_come_in_blocks_and_sum_like_dense_tensors(dtype: torch.dtype) -> None:
    """Like one client that holds every term; the trained factors have another memory layout."""
    generator = torch.Generator().manual_seed(0)
    u, v = (torch.randn(shape, generator=generator).to(dtype) for shape in ((700, 300), (300, 500)))
    u_after, v_after = (torch.randn(tensor.T.shape, generator=generator).to(dtype).T * 3 for tensor in (u, v))
    order = torch.randperm(300, generator=generator)
    visited, *changes = of_visited(term_mean_of(u, v, [(order, u_after[:, order], v_after[order], 7.0)], 7.0))
    dense = mean_of({"u": u, "v": v}, [({"u": u_after, "v": v_after}, 7.0)], 7.0)
    assert torch.equal(visited, torch.arange(300))
    assert all(torch.equal(mine, other) for mine, (_, other) in zip(changes, dense.finish(), strict=True))


def test_a_client_without_terms_or_weight_changes_nothing() -> None:
    u, v = torch.randn(5, 7), torch.randn(7, 4)
    none = torch.tensor([], dtype=torch.long), torch.zeros(5, 0), torch.zeros(0, 4), 3.0
    weightless = torch.tensor([2]), u[:, [2]] + 1, v[[2]] + 1, 0.0
    visited, u_change, v_change = of_visited(term_mean_of(u, v, [none, weightless], 3.0))
    assert [tuple(tensor.shape) for tensor in (visited, u_change, v_change)] == [(0,), (5, 0), (0, 4)]


@pytest.mark.parametrize("absolute", [False, True])
@pytest.mark.parametrize("far", [1.0, 1e6])
@pytest.mark.parametrize("transposed", [False, True])
def test_single_entries_are_the_means_of_their_holders(absolute: bool, far: float, transposed: bool) -> None:
    """Each entry is a mean of its own: that of a tensor with one value which its holders trained whole."""
    generator = torch.Generator().manual_seed(0)
    w = torch.randn(4, 3, generator=generator)
    w = w.T.contiguous().T if transposed else w
    b = torch.randn(2, generator=generator)
    parts = [torch.randperm(11, generator=generator)[:6].view(2, 3) for _ in range(3)]
    clients = [(far * torch.randn(2, 3, generator=generator), where, 1.0 + i) for i, where in enumerate(parts)]
    mean = MeanChange({"w": w, "b": b}, 20.0, absolute, always_divided=["b"], by_index={"w": None, "b": None})
    for after, where, weight in clients:
        mean.add({"w": after, "b": b + 1}, weight, where={"w": where})
    mean.add({"w": w + 1, "b": b + 1}, 8.0)  # holds all
    changes = dict(mean.finish())
    for entry, (start, change) in enumerate(zip(w.flatten(), changes["w"].flatten(), strict=True)):
        held = [(after[where == entry], d) for after, where, d in clients if bool((where == entry).any())]
        own: list[tuple[Tensor, float]] = [*held, ((start + 1)[None], 8.0)]
        exact = sum(d * (after - start).double() for after, d in own) / sum(d for _, d in own)
        # coarse and fine parts join and are divided: changes of size `far` keep 50 bits
        assert float(change) == pytest.approx(float(exact * (14.0 if absolute else 1.0)), abs=far * 1e-13, rel=1e-14)
    assert torch.equal(changes["b"], dict(mean_of({"b": b}, [({"b": b + 1}, 1.0)], 1.0).finish())["b"])


def test_a_tensor_that_all_clients_hold_whole_has_the_bits_of_one_without_index() -> None:
    before, clients = spread_out(4)
    assert bits(mean_of(before, clients, 20.0, by_index={"w": 0})) == bits(mean_of(before, clients, 20.0))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_given_changes_are_summed_exactly_and_in_any_order(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    before = {"weight": 1e4 * torch.randn(70_000, 2, generator=generator), "bias": torch.randn(3, generator=generator)}
    changes = [
        {name: (scale * torch.randn(tensor.shape, generator=generator)).to(dtype) for name, tensor in before.items()}
        for scale in (1e-3, 1.0, 1e6)  # the last one is far off
    ]
    means = []
    for order in ((0, 1, 2), (2, 0, 1)):
        mean = MeanChange(before, total_weight=4)
        for client in order:
            mean.add_change(changes[client], weight=(1, 2, 1)[client])
        means.append(dict(mean.finish()))
    for name, tensor in before.items():
        exact = sum(weight * change[name].double() for weight, change in zip((1, 2, 1), changes, strict=True)) / 4
        assert torch.equal(means[0][name], means[1][name])
        unit = 2.0 ** (float(tensor.abs().max()).__ceil__().bit_length())
        bound = 2.0**-50 * 3 * unit + 2.0**-50 * 4 * max(float(c[name].abs().max()) for c in changes)
        assert float((means[0][name] - exact).abs().max()) <= bound


def test_a_given_change_is_that_of_the_values_and_too_large_a_one_is_refused() -> None:
    before = {"weight": torch.tensor([0.5, 0.25]), "parts": torch.tensor([1.0, 2.0])}
    ours, theirs = (MeanChange(before, total_weight=3, by_index={"parts": 0}) for _ in range(2))
    change = {"weight": torch.tensor([0.125, 0.0]), "parts": torch.tensor([0.5, -1.0])}
    ours.add_change(change, weight=2)
    theirs.add({name: before[name] + change[name] for name in before}, weight=2)
    assert {n: t.tolist() for n, t in ours.finish()} == {n: t.tolist() for n, t in theirs.finish()}
    with pytest.raises(OverflowError, match="'weight' has 2e"):
        ours.add_change({**change, "weight": torch.tensor([2e12, 0.0])}, weight=1)


N = 37


def random_bits(weights: Iterable[float]) -> list[tuple[Tensor, float]]:
    generator = torch.Generator().manual_seed(0)
    return [(torch.rand(N, generator=generator) < 0.5, weight) for weight in weights]


def bits_of(added: Iterable[tuple[Tensor, float]], total: float) -> MeanBits:
    mean = MeanBits(torch.zeros(N), total)
    for bits, weight in added:
        mean.add(bits, weight)
    return mean


def test_the_mean_does_not_depend_on_the_order_where_a_plain_sum_does() -> None:
    weights, total = (0.1, 0.2, 0.3, 0.7), 1.3
    orders = list(itertools.permutations(random_bits(weights)))
    means = [bits_of(order, total).finish() for order in orders]
    assert all(torch.equal(mean, means[0]) for mean in means)
    plain = {tuple(sum(w * bits.double() for bits, w in order).tolist()) for order in orders}
    assert len(plain) > 1  # or the test would show nothing


def test_a_mean_of_bits_does_not_depend_on_how_clients_are_split_over_processes() -> None:
    added = random_bits((0.1, 0.2, 0.3, 0.7, 0.0))
    whole = bits_of(added, 1.3)
    for split in range(len(added) + 1):
        mine, theirs = bits_of(added[:split], 1.3), bits_of(added[split:], 1.3)
        merge(mine, theirs)
        assert torch.equal(mine.finish(), whole.finish())
        assert torch.equal(mine.finish(prior=1.0), whole.finish(prior=1.0))
        assert (mine.weights.sum, mine.weights.num_terms) == (whole.weights.sum, whole.weights.num_terms)


@pytest.mark.parametrize("weights", [(1,), (1, 1, 1), (3, 0, 5, 11), (2**40, 1, 2**52 - 2**41, 7), (0, 0)], ids=str)
def test_the_mean_of_whole_weights_is_the_nearest_number_to_the_fraction(weights: tuple[int, ...]) -> None:
    added = random_bits(map(float, weights))
    expected = []
    for i in range(N):
        ones = sum((w for (bits, _), w in zip(added, weights, strict=True) if bits[i]), start=0)
        expected.append(float(Fraction(ones, max(1, sum(weights)))))
    assert bits_of(added, float(sum(weights))).finish().tolist() == expected


@pytest.mark.parametrize("prior", [0.5, 1.0, 10.0])
def test_smoothing_adds_pseudo_counts_of_both_outcomes(prior: float) -> None:
    added = random_bits([1.0] * 6)
    added = [(bits.index_fill(0, torch.tensor([0]), True), weight) for bits, weight in added]
    mean = bits_of(added, 6.0)
    counts = [sum(int(bits[i]) for bits, _ in added) for i in range(N)]
    assert mean.finish().tolist() == [count / 6 for count in counts]
    assert mean.finish(prior).tolist() == pytest.approx([(count + prior) / (6 + 2 * prior) for count in counts])
    assert mean.finish()[0] == 1.0
    assert (mean.finish(prior) < 1).all()
    # unequal weights: K times the weighted mean takes the place of the count
    weighted = bits_of(random_bits([1.0, 2.0, 5.0]), 8.0)
    expected = [(3 * z + prior) / (3 + 2 * prior) for z in weighted.finish().tolist()]
    assert weighted.finish(prior).tolist() == pytest.approx(expected)


def test_without_clients_the_mean_is_0_and_the_smoothed_one_a_half() -> None:
    assert MeanBits(torch.zeros(2), total_weight=3.0).finish().tolist() == [0.0, 0.0]
    assert MeanBits(torch.zeros(2), total_weight=3.0).finish(prior=1.0).tolist() == [0.5, 0.5]


def test_one_bit_is_not_broadcast_to_all() -> None:
    with pytest.raises(ValueError, match=r"Bits of shape \(3,\) are averaged, got \(1,\)"):
        MeanBits(torch.zeros(3), total_weight=1).add(torch.tensor([True]), weight=1)
