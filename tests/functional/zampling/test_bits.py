"""Packed bits against numpy's, levels against their own variance, and entropy against a slow loop."""

import math

import numpy as np
import pytest
import torch

from lightning_spectral.functional.zampling import bit_entropy, pack_bits, pack_levels, unpack_bits, unpack_levels


def random_bits(n: int) -> torch.Tensor:
    return torch.rand(n, generator=torch.Generator().manual_seed(n)) < 0.5


@pytest.mark.parametrize("n", [*range(21), 1000, 4099])
def test_bits_come_back_and_travel_as_those_of_numpy(n: int) -> None:
    for bits in (random_bits(n), torch.zeros(n, dtype=torch.bool), torch.ones(n, dtype=torch.bool)):
        packed = pack_bits(bits)
        assert packed.dtype == torch.uint8
        assert packed.tolist() == np.packbits(bits.numpy()).tolist()
        assert torch.equal(unpack_bits(packed, n), bits)
        for dtype in (torch.uint8, torch.int64, torch.float32):
            assert torch.equal(pack_bits(bits.to(dtype)), packed)


@pytest.mark.parametrize("num_bits", [0, 7, 8, 17, 24])
def test_bytes_that_are_not_those_of_so_many_bits_are_refused(num_bits: int) -> None:
    packed = pack_bits(random_bits(12))
    with pytest.raises(ValueError, match=rf"{num_bits} bits travel as {-(-num_bits // 8)} bytes, got shape \(2,\)"):
        unpack_bits(packed, num_bits)
    for wrong in (packed.to(torch.int8), packed.float(), packed[None]):
        with pytest.raises(ValueError, match="12 bits travel as 2 bytes, got shape"):
            unpack_bits(wrong, 12)


@pytest.mark.parametrize("k", [1, 2, 3, 8, 16])
def test_levels_are_unbiased_and_next_to_the_probability(k: int) -> None:
    n, repeats, top = 67, 400, 2**k - 1
    probs = torch.linspace(0, 1, n, dtype=torch.float64)
    generator = torch.Generator().manual_seed(k)
    sent = [pack_levels(probs, k, generator) for _ in range(repeats)]
    assert {tuple(planes.shape) for planes in sent} == {(k, math.ceil(n / 8))}
    levels = torch.stack([unpack_levels(planes, n, k) for planes in sent])
    steps = levels * top
    assert ((steps - steps.round()).abs() <= top * torch.finfo(torch.float64).eps).all()
    assert ((levels - probs).abs() < 1 / top + 1e-15).all()
    # a level is the lower one or the upper one, with a variance of f (1 - f) steps for the fraction f between them
    fraction = probs * top - (probs * top).floor()
    bound = 5 * (fraction * (1 - fraction) / repeats).sqrt() / top
    assert ((levels.mean(0) - probs).abs() <= bound + 1e-15).all()


@pytest.mark.parametrize("k", range(1, 17))
def test_every_level_arrives_as_it_is_and_0_and_1_are_among_them(k: int) -> None:
    top = 2**k - 1
    chosen = torch.tensor(sorted({0, 1, top // 3, top // 2, top - 1, top}), dtype=torch.float64)
    for seed in range(20):
        planes = pack_levels(chosen / top, k, torch.Generator().manual_seed(seed))
        arrived = unpack_levels(planes, len(chosen), k)
        assert arrived[0] == 0.0
        assert arrived[-1] == 1.0
        # a quotient times `top` may fall short of a whole number by its rounding, so may end one level below
        assert ((arrived * top).round() == chosen).all()


@pytest.mark.parametrize("k", [1, 8, 16])
def test_the_largest_uniform_does_not_carry_1_beyond_the_highest_level(k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """1 - 2^-53 plus a whole number rounds to the next one, which k binary digits do not hold."""
    largest = 1 - 2.0**-53
    assert math.floor(2**k - 1 + largest) == 2**k
    monkeypatch.setattr(torch, "rand", lambda n, **_: torch.full((n,), largest, dtype=torch.float64))
    assert unpack_levels(pack_levels(torch.ones(3), k), 3, k).tolist() == [1.0] * 3


def test_the_same_generator_rounds_alike() -> None:
    probs = torch.rand(50, generator=torch.Generator().manual_seed(0))
    first, again, other = (pack_levels(probs, 4, torch.Generator().manual_seed(seed)) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_entropy_is_that_of_a_slow_loop() -> None:
    probs = torch.cat([torch.linspace(0, 1, 33), torch.tensor([1e-30, 1e-7])])
    expected = []
    for p in probs.tolist():
        expected.append(-sum(q * math.log2(q) for q in (p, 1 - p) if q > 0))
    entropy = bit_entropy(probs)
    assert entropy.dtype == torch.float64
    assert entropy.tolist() == pytest.approx(expected, rel=8 * torch.finfo(torch.float64).eps, abs=0)
    assert bit_entropy(probs[:4].view(2, 2)).shape == (2, 2)
    assert bit_entropy(torch.tensor([0.0, 0.5, 1.0])).tolist() == [0.0, 1.0, 0.0]


def test_another_number_of_digits_is_refused() -> None:
    with pytest.raises(ValueError, match="3 digits travel as 3 rows of bytes, got 1"):
        unpack_levels(torch.zeros(1, 1, dtype=torch.uint8), num_probs=8, num_bits=3)
