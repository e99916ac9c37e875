"""Shamir's secret sharing: any t of n shares determine the secret, and fewer say nothing about it.

The secret is the value at 0 of a random polynomial of degree t - 1 over a prime field; shares are values elsewhere.

Reference:
    Shamir (1979), "How to share a secret".
"""

from __future__ import annotations

import secrets
from collections.abc import Collection, Mapping

PRIME = 2**256 + 297  # the smallest prime above all secrets
SECRET_BYTES = 32
SHARE_BYTES = 33


def split(secret: bytes, places: Collection[int], threshold: int) -> dict[int, bytes]:
    """Split a secret into shares, of which any ``threshold`` recover it.

    Args:
        secret: 32 bytes.
        places: Where the polynomial is evaluated, one place for each share: distinct, positive, below the prime.
        threshold: Number of shares that `join` needs.

    Returns:
        For each place a share of 33 bytes; drawn anew by the system's generator at each call.

    Example:
        >>> shares = split(b"a secret of thirty-two bytes....", places=[1, 2, 3], threshold=2)
        >>> join({place: shares[place] for place in (3, 1)})
        b'a secret of thirty-two bytes....'
    """
    if len(secret) != SECRET_BYTES or not 1 <= threshold <= len(places) or not all(0 < x < PRIME for x in places):
        raise ValueError(
            f"A secret has {SECRET_BYTES} bytes, and `threshold` is from 1 to the number of `places`, which are "
            f"positive; got {len(secret)} bytes and {threshold} of {len(places)}."
        )
    coefficients = [int.from_bytes(secret, "big"), *(secrets.randbelow(PRIME) for _ in range(threshold - 1))]
    shares = {}
    for place in places:
        value = 0
        for coefficient in reversed(coefficients):
            value = (value * place + coefficient) % PRIME
        shares[place] = value.to_bytes(SHARE_BYTES, "big")
    return shares


def join(shares: Mapping[int, bytes]) -> bytes:
    """The secret behind some shares, given by place: Lagrange interpolation at 0.

    Shares that are too few, or wrong, give another secret, or none: check it against something public.

    Raises:
        ValueError: If they give none.
    """
    value = 0
    for place, share in shares.items():
        above, below = 1, 1
        for other in shares.keys() - {place}:
            above, below = above * other % PRIME, below * (other - place) % PRIME
        value += int.from_bytes(share, "big") * above * pow(below, -1, PRIME)
    if (value := value % PRIME) >> 8 * SECRET_BYTES:
        raise ValueError("These shares belong to no secret.")
    return value.to_bytes(SECRET_BYTES, "big")
