"""The held-out part of each client's examples."""

import pytest
import torch
from torch import Generator

from lightning_spectral.partition import Partition, hold_out


def seeded(seed: int = 0) -> Generator:
    return torch.Generator().manual_seed(seed)


@pytest.fixture
def whole() -> Partition:
    """Clients with 0 to 60 examples whose ids are scattered."""
    sizes = [0, 1, 2, 3, 10, 25, 60]
    return Partition.from_lists(list(torch.randperm(sum(sizes), generator=seeded()).split(sizes)))


@pytest.mark.parametrize(("fraction", "expected"), [(0.1, [0, 0, 1, 1, 1, 2, 6]), (0.9, [0, 0, 1, 2, 9, 22, 54])])
def test_every_example_is_trained_on_or_held_out(fraction: float, expected: list[int], whole: Partition) -> None:
    training, held_out = hold_out(whole, fraction, seeded())
    assert held_out.sizes.tolist() == expected
    for mine, kept, out in zip(whole, training, held_out, strict=True):
        assert sorted([*kept.tolist(), *out.tolist()]) == sorted(mine.tolist())
        places = [mine.tolist().index(example) for example in kept.tolist()]
        assert places == sorted(places)  # in their original order


def test_every_example_of_a_client_is_as_likely_to_be_held_out(whole: Partition) -> None:
    generator, draws = seeded(), 500
    counts = torch.zeros(whole.num_assigned)
    for _ in range(draws):
        counts[hold_out(whole, 0.2, generator)[1].indices] += 1
    for examples, expected in zip(whole, (0, 0, 1 / 2, 1 / 3, 2 / 10, 5 / 25, 12 / 60), strict=True):
        five_sigma = 5 * (expected * (1 - expected) / draws) ** 0.5
        assert ((counts[examples] / draws - expected).abs() <= five_sigma).all()


def test_nothing_held_out_leaves_the_partition_and_the_generator_as_they_are(whole: Partition) -> None:
    generator = seeded()
    training, held_out = hold_out(whole, 0.0, generator)
    assert training is whole
    assert held_out.sizes.tolist() == [0] * 7
    assert torch.equal(generator.get_state(), seeded().get_state())


@pytest.mark.parametrize("fraction", [-0.1, 1.0, float("nan")])
def test_a_share_that_leaves_nothing_is_refused(fraction: float, whole: Partition) -> None:
    with pytest.raises(ValueError, match=r"must be in \[0, 1\), got"):
        hold_out(whole, fraction, seeded())
