"""Masks that hide what clients add to a sum modulo 2^64 and cancel in it; those of clients that drop out are removed.

Every two parties derive a mask from a common secret; one adds it, the other subtracts it. Each party also adds a mask
of its own, and gives the others shares of both secrets, by which the server removes what did not cancel: of a party
whose values arrived, its own mask; of one whose values did not, those that it has in common with others. It never
learns both of the same party, so that values which arrive too late stay hidden.

A `Party` takes its steps in this order: `Party.keys`, `Party.shares`, `Party.open`, perhaps `Party.publish`,
`Party.mask`, `Party.reveal`. What it says and hears is a mapping from parties, which are numbered from 0, to bytes.

Digests tell who lies: the server gets those of all shares from their dealers, so whoever reveals another share lies. If
a receiver says that a dealer's shares are not those of the digests, one of both lies; the dealer shows them to the
server, as in Ben-Or, Goldwasser and Wigderson (1988), which tells it no more than a receiver that lies might.

Needs cryptography, the extra ``secure``. Secrets are drawn by the system's generator; nothing follows from a seed.

Reference:
    Bonawitz et al. (2017), "Practical secure aggregation for privacy-preserving machine learning", Figure 4, without
    the signatures of its active model.
"""

from __future__ import annotations

import hashlib
import os
import random
from collections.abc import Collection, Mapping
from contextlib import suppress
from types import MappingProxyType

import numpy as np
from torch import Tensor

from lightning_spectral.errors import from_extra
from lightning_spectral.sums.secret_sharing import SHARE_BYTES, join, split

with from_extra("secure"):
    from cryptography.exceptions import InvalidTag
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
    from cryptography.hazmat.primitives.ciphers import Cipher
    from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
    from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

Said = Mapping[int, bytes]
KEY_BYTES = 32
BOX_BYTES = 2 * SHARE_BYTES + 16  # two shares and the tag that authenticates them
# Bytes of each thing that a party says: two public keys and a digest; a box and two digests; two shares; one share.
SIZES = MappingProxyType({"keys": 96, "shares": BOX_BYTES + 64, "open": 0, "publish": 66, "reveal": SHARE_BYTES})
ONCE = bytes(12)  # a nonce; every key encrypts one message
FEWEST = 2  # parties of a sum that hides anything
TRIES = 200  # of some of the shares of one secret, if a dealer has dealt wrong ones
_BLOCK = 2**16  # values at a time, which fit a CPU's cache


class Party:
    """One party of one sum. It takes each step once, so that a server which repeats itself learns nothing more.

    Args:
        me: Its number.
        context: What the sum is for; all its parties must have the same.
        threshold: Number of parties without which no secret is revealed, more than half of them.

    Example:
        >>> import torch
        >>> parties = {number: Party(number, b"round 0", threshold=2) for number in range(3)}
        >>> keys = {number: party.keys() for number, party in parties.items()}
        >>> sealed = {number: party.shares(keys) for number, party in parties.items()}
        >>> for number, party in parties.items():
        ...     assert party.open({other: said[number] for other, said in sealed.items()}).keys() == keys.keys()
        >>> total = torch.zeros(2, dtype=torch.int64)
        >>> for number, value in ((0, 5), (2, 7)):  # party 1 drops out
        ...     values = torch.tensor([value, -value])
        ...     parties[number].mask(values, keys)
        ...     total += values
        >>> revealed = {number: parties[number].reveal([0, 2]) for number in (0, 2)}
        >>> remove_masks(total, b"round 0", 2, keys, [0, 2], revealed)
        >>> total
        tensor([ 12, -12])
    """

    def __init__(self, me: int, context: bytes, threshold: int) -> None:
        self.me, self.context, self.threshold = me, context, threshold
        self._seals, self._masks = X25519PrivateKey.generate(), X25519PrivateKey.generate()
        self._own = os.urandom(KEY_BYTES)  # from which its own mask follows
        self._keys: Said = {}
        self._dealt: dict[int, bytes] = {}  # by receiver: shares of its own mask's key and its masking key
        self._shares: dict[int, bytes] = {}  # likewise by dealer
        self._members: set[int] = set()  # with whom it has masks in common
        self._due = ["reveal", "mask", "open", "shares", "keys"]  # the last is next

    def _take(self, step: str) -> None:
        if (due := self._due[-1] if self._due else "nothing") != step:
            raise ValueError(f"A party of a secure sum takes each step once; {due!r} is due, not {step!r}.")
        self._due.pop()

    def keys(self) -> bytes:
        """What others, and the server, must know of it: two public keys and the digest of a secret."""
        self._take("keys")
        public = [key.public_key().public_bytes_raw() for key in (self._seals, self._masks)]
        return b"".join([*public, hashlib.sha256(self._own).digest()])

    def shares(self, keys: Said) -> dict[int, bytes]:
        """Shares of its secrets, for each party sealed and followed by the digests of both.

        Args:
            keys: What all parties said, itself among them.

        Raises:
            ValueError: If these keys are not those of enough parties, of which more than half are the threshold.
        """
        self._take("shares")
        own = self._masks.public_key().public_bytes_raw()
        if _masking_key(keys.get(self.me, b"")) != own or len(set(keys.values())) < len(keys):
            raise ValueError("The keys of a secure sum must be those of different parties, this one among them.")
        if not FEWEST <= self.threshold <= len(keys) < 2 * self.threshold:
            raise ValueError(
                f"A secure sum needs a threshold of {FEWEST} or more that is above half of its parties and not above "
                f"all of them, got {self.threshold} of {len(keys)}."
            )
        self._keys = dict(keys)
        secrets = self._own, self._masks.private_bytes_raw()
        both = [split(secret, [party + 1 for party in keys], self.threshold) for secret in secrets]
        self._dealt = {party: both[0][party + 1] + both[1][party + 1] for party in keys}
        return {
            party: ChaCha20Poly1305(self._sealing_key(self.me, party)).encrypt(ONCE, shares, None) + digests(shares)
            for party, shares in self._dealt.items()
        }

    def _sealing_key(self, sender: int, receiver: int) -> bytes:
        """The key of the one message from a party to another, of which this one is either."""
        other = self._keys[receiver if sender == self.me else sender][:KEY_BYTES]
        return _agreed(self._seals, other, b"shares", self.context, sender, receiver)

    def open(self, sealed: Said) -> dict[int, bytes]:
        """Open what parties have sealed for this one; return those whose shares have the digests that they told."""
        self._take("open")
        for dealer, said in sealed.items():
            with suppress(InvalidTag):
                opened = ChaCha20Poly1305(self._sealing_key(dealer, self.me)).decrypt(ONCE, said[:BOX_BYTES], None)
                if digests(opened) == said[BOX_BYTES:]:
                    self._shares[dealer] = opened
        return dict.fromkeys(self._shares, b"")

    def publish(self, receivers: Collection[int]) -> dict[int, bytes]:
        """The shares that it dealt to parties which lack them; `ValueError` if so many would tell its secrets."""
        dealt, self._dealt = self._dealt, {}
        if self._due[-1:] != ["mask"] or not set(receivers) <= dealt.keys() or len(receivers) >= self.threshold:
            what = f"once, before it masks, fewer of its shares than {self.threshold}, not those of {sorted(receivers)}"
            raise ValueError(f"A party of a secure sum publishes {what}.")
        return {party: dealt[party] for party in receivers}

    def mask(self, values: Tensor, members: Collection[int]) -> None:
        """Hide its values, in place: its own mask, and one with each of the others that take part.

        Args:
            values: int64, contiguous, on the CPU, one dimension.
            members: Who takes part; `ValueError` if these are too few, or some are strangers.
        """
        self._take("mask")
        self._dealt, self._members = {}, set(members)
        if not {self.me} <= self._members <= self._keys.keys() or len(self._members) < self.threshold:
            raise ValueError(f"A sum needs {self.threshold} parties, this one among them, got {sorted(members)}.")
        add_mask(values, self._own, 1)
        for other in self._members - {self.me}:
            key = _common_key(self._masks, self._keys[other], self.context, self.me, other)
            add_mask(values, key, 1 if self.me < other else -1)

    def reveal(self, arrived: Collection[int]) -> dict[int, bytes]:
        """Its share of one secret of each party: of its own mask if its values arrived, or else of the common ones."""
        self._take("reveal")
        if self.me not in arrived or not self._members >= set(arrived) or len(set(arrived)) < self.threshold:
            raise ValueError(
                f"A party of a secure sum reveals shares once its values, and those of {self.threshold} of the parties "
                f"{sorted(self._members)}, have arrived; got {sorted(arrived)}."
            )
        return {party: half(self._shares[party], party in arrived) for party in self._members & self._shares.keys()}


def remove_masks(
    total: Tensor, context: bytes, threshold: int, keys: Said, arrived: Collection[int], revealed: Mapping[int, Said]
) -> None:
    """Remove all masks from the sum of the values that arrived, in place.

    Args:
        total: The sum modulo 2^64, int64, contiguous, on the CPU, one dimension.
        context: As for `Party`.
        threshold: Likewise.
        keys: What the parties said that take part.
        arrived: Whose values are in the sum.
        revealed: What parties have revealed, or the server knows of their shares, at least as many as the threshold.

    Raises:
        ValueError: If the shares that a party dealt do not give its secret.
    """
    draws = random.Random(0)
    for party in keys:
        shares = {holder + 1: said[party] for holder, said in revealed.items() if party in said}
        for _ in range(TRIES if len(shares) > threshold else 1):
            some = draws.sample(sorted(shares), min(threshold, len(shares)))
            with suppress(ValueError):
                secret = join({place: shares[place] for place in some})
                private = X25519PrivateKey.from_private_bytes(secret)
                public, digest = private.public_key().public_bytes_raw(), hashlib.sha256(secret).digest()
                if keys[party].endswith(digest) if party in arrived else _masking_key(keys[party]) == public:
                    break
        else:
            raise ValueError(f"The shares that party {party} dealt do not give its secret.")
        if party in arrived:
            add_mask(total, secret, -1)
            continue
        for other in arrived:
            key = _common_key(private, keys[other], context, party, other)
            add_mask(total, key, -1 if other < party else 1)


def are_safe(keys: bytes) -> bool:
    """Whether secrets follow from these public keys, as they do not from zeros and other points of small order."""
    with suppress(ValueError):
        for public in (keys[:KEY_BYTES], _masking_key(keys)):
            X25519PrivateKey.generate().exchange(X25519PublicKey.from_public_bytes(public))
        return True
    return False


def digests(shares: bytes) -> bytes:
    """The digests of the two shares that a party has of another; shares are too random to be found by them."""
    return b"".join(hashlib.sha256(half(shares, is_own)).digest() for is_own in (True, False))


def half(both: bytes, is_own: bool) -> bytes:
    """What is about a party's own mask, or else about its masking key."""
    return both[: len(both) // 2] if is_own else both[len(both) // 2 :]


def add_mask(values: Tensor, key: bytes, sign: int) -> None:
    """Add the mask that follows from a key, or subtract it: int64, uniform, modulo 2^64, in place.

    It is ChaCha20's key stream, read as little-endian numbers.
    """
    stream, whole = Cipher(ChaCha20(key, bytes(16)), mode=None).encryptor(), values.numpy()
    for begin in range(0, len(whole), _BLOCK):
        block = whole[begin : begin + _BLOCK]
        mask = np.frombuffer(stream.update(bytes(block.nbytes)), "<i8")
        (np.add if sign > 0 else np.subtract)(block, mask, out=block)


def _masking_key(keys: bytes) -> bytes:
    return keys[KEY_BYTES : 2 * KEY_BYTES]


def _common_key(private: X25519PrivateKey, keys: bytes, context: bytes, one: int, two: int) -> bytes:
    """The key of the mask that two parties have in common, from the secret of one and what the other said."""
    return _agreed(private, _masking_key(keys), b"mask", context, min(one, two), max(one, two))


def _agreed(private: X25519PrivateKey, public: bytes, purpose: bytes, context: bytes, one: int, two: int) -> bytes:
    """A key that two parties agree on, for one purpose."""
    info = b" ".join([b"lightning_spectral", purpose, b"%d %d" % (one, two), context])
    secret = private.exchange(X25519PublicKey.from_public_bytes(public))
    return HKDF(SHA256(), KEY_BYTES, salt=None, info=info).derive(secret)
