"""Noise hides what one client adds to the sums: its contribution is bounded, and noise is on every coordinate."""

import math
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from functools import partial
from statistics import NormalDist

import pytest
import torch
from torch import Tensor

from lightning_spectral.filters.private_sums import PrivateSums
from lightning_spectral.protocol.rng import SecretNormals
from lightning_spectral.sums import MeanChange
from lightning_spectral.testing.trial import Peer

WEIGHT, TOTAL = 0.25, 2.5  # of a client; of all ten that may take part
SHAPES = {"w": (3, 4), "b": (5,)}
NO_NOISE = partial(torch.zeros, dtype=torch.float64)
Change = dict[str, Tensor]


def opened(clip: float = 1.0, multiplier: float = 1.0, large: float = 0.0) -> PrivateSums:
    """The sums of two groups of tensors; of the matrix ``v`` in the second, clients hold rows 0 and 2."""
    dense = MeanChange({name: torch.full(shape, large) for name, shape in SHAPES.items()}, TOTAL, absolute=True)
    terms = MeanChange({"v": torch.zeros(3, 2)}, TOTAL, absolute=True, by_index={"v": 0})
    rows = {"v": torch.tensor([0, 2])}
    dense.add(dense.before, weight=1.0)
    terms.add({"v": torch.zeros(2, 2)}, weight=1.0, where=rows)
    dense.fix()
    terms.fix()
    return PrivateSums([dense, terms], WEIGHT, clip, multiplier)


def add(private: PrivateSums, change: Change) -> None:
    dense, terms = private.sums
    dense.add_change({name: change[name] for name in SHAPES}, WEIGHT)
    terms.add({"v": change["v"]}, WEIGHT, where={"v": torch.tensor([0, 2])})
    private.take()


def released(clients: Sequence[Change], normals: Callable[[int], Tensor] = NO_NOISE, **options: float) -> Tensor:
    """All the sums as one vector, in units of a change times its weight."""
    private = opened(**options)
    for change in clients:
        add(private, change)
    private.release(normals=normals)
    return torch.cat([value.flatten() for mean in private.sums for _, value in mean.finish()])


def drawn(scale: float, seed: int) -> Change:
    generator = torch.Generator().manual_seed(seed)
    return {name: scale * torch.randn(shape, generator=generator) for name, shape in {**SHAPES, "v": (2, 2)}.items()}


def as_vector(change: Change) -> Tensor:
    whole = torch.zeros(3, 2)
    whole[[0, 2]] = change["v"]
    return torch.cat([change["w"].flatten(), change["b"], whole.flatten()]).double()


OTHERS = [drawn(scale, seed) for seed, scale in enumerate((0.01, 1.0, 30.0))]


@pytest.mark.parametrize("scale", [1e-8, 0.1, 1.0, 1e4, 1e11])
@pytest.mark.parametrize("clip", [1e-3, 1.0, 1000.0])
def test_one_client_more_moves_the_sums_by_at_most_the_clip(scale: float, clip: float) -> None:
    """Exactly, in whole steps, whichever of the sums it aims at."""
    one_sided = {name: scale * torch.ones_like(value) for name, value in OTHERS[0].items()}
    for planted in (drawn(scale, 7), one_sided, *({**one_sided, name: 0 * one_sided[name]} for name in one_sided)):
        private, steps = opened(clip), list[Fraction]()
        add(private, planted)
        for mean, name, total in private._totals:
            steps += [Fraction(int(value)) * Fraction(mean.step(name)) for value in total.flatten()]
        assert sum(step**2 for step in steps) <= (Fraction(clip) * Fraction(WEIGHT)) ** 2
        moved = released([*OTHERS, planted], clip=clip) - released(OTHERS, clip=clip)
        assert float(moved.norm()) <= clip * WEIGHT * (1 + 2**-40)


def test_sums_are_those_of_shortened_changes() -> None:
    expected = torch.zeros(23, dtype=torch.float64)
    for change in OTHERS:
        vector = as_vector(change)
        expected += WEIGHT * vector * min(1.0, 1.5 / float(vector.norm()))
    assert float((released(OTHERS, clip=1.5) - expected).abs().max()) < 1e-9
    assert len({round(float(as_vector(change).norm()), 1) for change in OTHERS}) == 3


def test_divisors_do_not_depend_on_who_takes_part() -> None:
    """Nobody, one or three: without noise the result is linear in the clients, where a mean would not be."""
    alone = [released([change]) for change in OTHERS]
    assert float((released(OTHERS) - sum(alone)).abs().max()) < 1e-12
    assert not released([]).any()
    assert released([], SecretNormals(b"key")).any()


@pytest.mark.slow
def test_noise_has_its_deviation_in_every_coordinate_that_clients_reach() -> None:
    """Five deviations of the estimates themselves; coordinates are independent, and unreached rows have none."""
    count, std = 4000, 0.7 * 2.0 * WEIGHT
    normals = SecretNormals(b"key")
    noise = torch.stack([released([], normals, clip=2.0, multiplier=0.7) for _ in range(count)])
    unreached = torch.zeros(23, dtype=torch.bool)
    unreached[17 + 2 : 17 + 4] = True
    assert not noise[:, unreached].any()
    noise = noise[:, ~unreached] / std
    assert float(noise.mean(0).abs().max()) < 5 / math.sqrt(count)
    assert float((noise.square().mean(0) - 1).abs().max()) < 5 * math.sqrt(2 / count)
    assert float((noise.T @ noise / count).fill_diagonal_(0).abs().max()) < 5 / math.sqrt(count)


def test_numbers_are_normal_and_none_is_drawn_twice() -> None:
    """Kolmogorov's distance, whose square root law has 1.95 as its quantile of 0.999."""
    normals = SecretNormals(b"key")
    first, second = normals(50_001), normals(50_001)
    for numbers in (first, second):
        ordered = numbers.sort().values
        ideal = torch.tensor([NormalDist().cdf(float(value)) for value in ordered])
        places = torch.arange(1, len(ordered) + 1) / len(ordered)
        assert float((ideal - places).abs().max()) < 1.95 / math.sqrt(len(ordered))
    assert len(torch.cat([first, second]).unique()) == 100_002
    assert not torch.equal(SecretNormals(b"another")(50_001), first)


def test_order_and_processes_do_not_change_a_bit() -> None:
    alone = released(OTHERS, SecretNormals(b"key"))
    assert torch.equal(released(OTHERS[::-1], SecretNormals(b"key")), alone)
    board, barrier = [None] * 3, threading.Barrier(3, timeout=30)

    def run(rank: int) -> tuple[Tensor, float]:
        private = opened()
        for change in OTHERS[rank::3]:
            add(private, change)
        private.release(Peer(rank, board, barrier), SecretNormals(b"key") if rank == 0 else None, vote_noise=1.0)
        return torch.cat([v.flatten() for mean in private.sums for _, v in mean.finish()]), private.votes

    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(run, range(3)))
    assert all(torch.equal(vector, alone) for vector, _ in found)
    assert len({votes for _, votes in found}) == 1


def test_votes_say_how_many_are_within_the_bound() -> None:
    private = opened(clip=1.5)
    for change in OTHERS:
        add(private, change)
    private.release()
    assert private.votes == sum(float(as_vector(change).norm()) <= 1.5 for change in OTHERS) - 1.5


def test_noise_that_sums_have_no_room_for_is_refused() -> None:
    with pytest.raises(OverflowError, match="lower one of them"):
        opened(clip=1000.0, multiplier=1000.0)
    assert released([], SecretNormals(b"key"), clip=1000.0, multiplier=5.0).abs().max() > 1000


def test_rounding_makes_no_contribution_longer_than_the_bound() -> None:
    """The bound is of eight steps of the sum, and each of a hundred entries of four fifths of one."""
    clip = 2.0**-46
    mean = MeanChange({"b": torch.zeros(100)}, total_weight=1)
    mean.add({"b": torch.zeros(100)}, weight=1)
    mean.fix()
    private = PrivateSums([mean], weight=1.0, clip=clip, multiplier=0.0)
    for _ in range(2):
        mean.add({"b": torch.ones(100)}, weight=1.0)
        private.take()
    private.release(normals=SecretNormals(b"no secret"))
    ((_, change),) = mean.finish()
    assert float(change.norm()) <= 2 * clip
