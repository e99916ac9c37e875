import torch

from lightning_spectral.protocol.statistics import MeanChange, MeanTermChange


def clients(count: int, seed: int = 0) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]]:
    """(terms, u_change, v_change, num_examples) of clients that hold 3 of 7 terms of a 5 x 4 weight."""
    generator = torch.Generator().manual_seed(seed)
    return [
        (
            torch.randperm(6, generator=generator)[:3].sort().values,
            torch.randn(5, 3, generator=generator),
            torch.randn(3, 4, generator=generator),
            int(torch.randint(1, 50, (), generator=generator)),
        )
        for _ in range(count)
    ]


def test_each_term_is_the_weighted_mean_of_the_clients_that_held_it() -> None:
    mean = MeanTermChange(torch.zeros(5, 7), torch.zeros(7, 4))
    cohort = clients(4)
    for client in cohort:
        mean.add(*client)
    visited, u_change, v_change = mean.finish()
    for position, term in enumerate(visited.tolist()):
        holders = [(u, v, d, terms.tolist().index(term)) for terms, u, v, d in cohort if term in terms]
        weight = sum(d for _, _, d, _ in holders)
        slow_u = sum(d * u[:, i].double() for u, _, d, i in holders) / weight
        slow_v = sum(d * v[i].double() for _, v, d, i in holders) / weight
        torch.testing.assert_close(u_change[:, position], slow_u, rtol=1e-14, atol=1e-14)
        torch.testing.assert_close(v_change[position], slow_v, rtol=1e-14, atol=1e-14)
    held = {term for terms, *_ in cohort for term in terms.tolist()}
    assert set(visited.tolist()) == held
    assert 6 not in held


def test_merged_sums_equal_one_sum_up_to_rounding() -> None:
    cohort = clients(6)
    whole, left, right = (MeanTermChange(torch.zeros(5, 7), torch.zeros(7, 4)) for _ in range(3))
    for i, client in enumerate(cohort):
        whole.add(*client)
        (left if i < 2 else right).add(*client)
    left.merge(right)
    for merged, expected in zip(left.finish(), whole.finish(), strict=True):
        torch.testing.assert_close(merged, expected, rtol=1e-14, atol=1e-14)


def test_dense_mean_is_weighted_by_examples_and_merges() -> None:
    generator = torch.Generator().manual_seed(0)
    before = {"w": torch.randn(3, 2, generator=generator), "b": torch.randn(2, generator=generator)}
    cohort = [({name: torch.randn(t.shape, generator=generator) for name, t in before.items()}, d) for d in (1, 7, 30)]
    whole, part, rest = MeanChange(before), MeanChange(before), MeanChange(before)
    for i, (after, weight) in enumerate(cohort):
        whole.add(after, weight)
        (part if i == 0 else rest).add(after, weight)
    part.merge(rest)
    for name, change in whole.finish().items():
        slow = sum(d * (after[name] - before[name]).double() for after, d in cohort) / 38
        torch.testing.assert_close(change, slow, rtol=1e-14, atol=1e-14)
        torch.testing.assert_close(part.finish()[name], change, rtol=1e-14, atol=1e-14)


def test_nobody_and_nothing_changed_are_exact_zeros() -> None:
    before = {"w": torch.randn(3, 2, generator=torch.Generator().manual_seed(0))}
    nobody, idle = MeanChange(before), MeanChange(before)
    idle.add(before, 17)
    assert torch.equal(nobody.finish()["w"], torch.zeros(3, 2).double())
    assert torch.equal(idle.finish()["w"], torch.zeros(3, 2).double())
    MeanChange({}).add({}, 1)
