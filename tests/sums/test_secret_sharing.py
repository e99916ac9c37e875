"""Every t of n shares give the secret, and t - 1 leave every secret as likely as before."""

from itertools import combinations

import pytest
import sympy
from hypothesis import given
from hypothesis import strategies as st

from lightning_spectral.sums import secret_sharing
from lightning_spectral.sums.secret_sharing import PRIME, SECRET_BYTES, SHARE_BYTES, join, split

SECRETS = st.binary(min_size=SECRET_BYTES, max_size=SECRET_BYTES)


def test_the_field_is_the_smallest_that_holds_all_secrets() -> None:
    assert sympy.nextprime(2 ** (8 * SECRET_BYTES) - 1) == PRIME
    assert PRIME < 2 ** (8 * SHARE_BYTES)


@given(SECRETS, st.integers(1, 5), st.integers(0, 2), st.integers(1, 10**6))
def test_every_subset_of_the_threshold_gives_the_secret(secret: bytes, threshold: int, more: int, first: int) -> None:
    places = [first + 7 * number for number in range(threshold + more)]
    shares = split(secret, places, threshold)
    assert {len(share) for share in shares.values()} == {SHARE_BYTES}
    for subset in combinations(places, threshold):
        assert join({place: shares[place] for place in subset}) == secret


@pytest.mark.parametrize("threshold", [1, 2, 3])
def test_fewer_shares_than_the_threshold_are_uniform_whatever_the_secret_is(
    threshold: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By enumeration of all polynomials over a small field, in which secrets are numbers of one byte."""
    prime = 11
    monkeypatch.setattr(secret_sharing, "PRIME", prime)
    monkeypatch.setattr(secret_sharing, "SECRET_BYTES", 1)
    seen = []
    for secret in (0, 4, prime - 1):
        found: dict[tuple[bytes, ...], int] = {}
        for number in range(prime ** (threshold - 1)):
            coefficients = iter([number // prime**power % prime for power in range(threshold - 1)])
            monkeypatch.setattr(secret_sharing.secrets, "randbelow", lambda below, drawn=coefficients: next(drawn))
            shares = split(bytes([secret]), [1, 2, 5], threshold)
            few = tuple(shares[place] for place in (5, 2)[: threshold - 1])
            found[few] = found.get(few, 0) + 1
        seen.append(found)
    assert len(seen[0]) == prime ** (threshold - 1)
    assert seen[0] == seen[1] == seen[2]


def test_two_calls_give_different_shares() -> None:
    secret = bytes(SECRET_BYTES)
    assert split(secret, [1, 2, 3], 2) != split(secret, [1, 2, 3], 2)


def test_shares_beyond_all_secrets_give_none() -> None:
    with pytest.raises(ValueError, match="These shares belong to no secret"):
        join({1: (PRIME - 1).to_bytes(SHARE_BYTES, "big")})


@pytest.mark.parametrize(
    ("secret", "places", "threshold"),
    [(bytes(31), [1, 2], 2), (bytes(32), [1, 2], 3), (bytes(32), [0, 1], 2), (bytes(32), [1, 2], 0)],
    ids=["short secret", "threshold above all", "the place of the secret", "no threshold"],
)
def test_what_cannot_be_split_is_refused(secret: bytes, places: list[int], threshold: int) -> None:
    with pytest.raises(ValueError, match="A secret has 32 bytes, and `threshold` is from 1"):
        split(secret, places, threshold)
