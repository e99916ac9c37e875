"""Bits: drawn, coordinated between clients, packed for sending, eight to a byte; and their entropy."""

from __future__ import annotations

import math
from itertools import count

import torch
from torch import Tensor

BELOW_ONE = 1.0 - 2.0**-53


def draw_bits(probs: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Draw one bit for each probability, on the CPU and in float32, so that the bits do not depend on the device."""
    uniforms = torch.rand(len(probs), dtype=torch.float32, generator=generator)
    return _sent(uniforms, probs.device) < probs


def coordinated_uniforms(
    num_entries: int, place: int, num_places: int, shared: torch.Generator, own: torch.Generator
) -> Tensor:
    r"""Draw numbers in [0, 1) for one of K clients, such that no two clients' numbers for an entry share a stratum.

    There are P strata, where P is the least prime that is at least K. The k-th client's stratum for an entry is
    a + s k modulo P, where a and s > 0 are random and the same for all clients. So each number is uniform on its own,
    and the strata of two clients are uniform over all pairs of distinct strata. This takes two random integers per
    entry, whatever K is. ``place`` is the client's number k from 0 to K - 1; the generator ``shared`` has the same
    state for all clients of a round, ``own`` is the client's. The numbers are float64, on the CPU.

    Let the bit of client k be 1 if its number is below :math:`p_k`. The bits of two clients then have covariance
    :math:`-\mathrm{cov}(m_k, m_l) / (P - 1)`, where :math:`m_k` is the mean of the bit in a stratum drawn at random.
    For every client these means fall from stratum to stratum, so no covariance of bits is positive: the variance of the
    mean of the bits is never larger than with independent draws. With equal p and K = P it is
    :math:`f(1 - f)/K^2`, where f is the fractional part of K p, as opposed to :math:`p(1 - p)/K` for independent draws.

    Reference:
        McKay, Beckman & Conover (1979), Latin hypercube sampling, whose strata are drawn by a random permutation.
    """
    strata = _prime_from(num_places)
    first = torch.randint(strata, (num_entries,), generator=shared)
    step = torch.randint(1, strata, (num_entries,), generator=shared)
    within = torch.rand(num_entries, generator=own, dtype=torch.float64)
    numbers = (((first + step * place) % strata) + within) / strata
    return numbers.clamp(max=BELOW_ONE)  # the last stratum may round up


def _prime_from(least: int) -> int:
    return next(n for n in count(max(least, 2)) if all(n % divisor for divisor in range(2, math.isqrt(n) + 1)))


def pack_bits(bits: Tensor) -> Tensor:
    """Pack booleans, or zeros and ones, into bytes, the first bit highest, as ``numpy.packbits`` does."""
    padded = torch.nn.functional.pad(bits.to(torch.uint8), (0, -len(bits) % 8)).view(-1, 8)
    packed: Tensor = (padded << _shifts(bits.device)).sum(1, dtype=torch.uint8)
    return packed


def unpack_bits(packed: Tensor, num_bits: int) -> Tensor:
    """Undo `pack_bits`, given the number of bits."""
    if packed.shape != (-(-num_bits // 8),) or packed.dtype != torch.uint8:
        raise ValueError(
            f"{num_bits} bits travel as {-(-num_bits // 8)} bytes, got shape {tuple(packed.shape)} of {packed.dtype}."
        )
    return ((packed[:, None] >> _shifts(packed.device)) & 1).view(-1)[:num_bits].bool()


def pack_levels(probs: Tensor, num_bits: int, generator: torch.Generator | None = None) -> Tensor:
    """Round probabilities to 2**k levels, at random and without bias, and pack the k bits of each.

    0 and 1 are levels. The result has one row of `pack_bits` for each of the k <= 16 binary digits, highest first.
    """
    uniforms = torch.rand(len(probs), dtype=torch.float64, generator=generator)
    top = 2**num_bits - 1
    scaled = probs.double() * top + _sent(uniforms, probs.device)
    levels = scaled.floor().clamp(max=top).long()  # the sum may round up to the next whole
    return torch.stack([pack_bits((levels >> k) & 1) for k in reversed(range(num_bits))])


def unpack_levels(packed: Tensor, num_probs: int, num_bits: int) -> Tensor:
    """Undo `pack_levels`, up to its rounding."""
    if len(packed) != num_bits:
        raise ValueError(f"{num_bits} digits travel as {num_bits} rows of bytes, got {len(packed)}.")
    digits = torch.stack([unpack_bits(row, num_probs) for row in packed])
    values = 2 ** torch.arange(num_bits - 1, -1, -1, dtype=torch.float64, device=packed.device)
    levels: Tensor = (digits * values[:, None]).sum(0) / (2**num_bits - 1)
    return levels


def bit_entropy(probs: Tensor) -> Tensor:
    """Entropy of a bit that is 1 with probability p, in bits, float64: the least that it costs to send."""
    p = probs.double()
    nats: Tensor = torch.special.entr(p) + torch.special.entr(1 - p)
    return nats / math.log(2)


def _sent(values: Tensor, device: torch.device) -> Tensor:
    """Values of the CPU on a device, without waiting until it has finished its work: local steps draw bits, too."""
    return values.to(device, non_blocking=device.type != "mps")  # which would not wait for the values either


def _shifts(device: torch.device) -> Tensor:
    return torch.arange(7, -1, -1, dtype=torch.uint8, device=device)
