"""Masks that hide what clients add to a sum modulo 2^64 and cancel in it; those of clients that drop out are removed.

Every two parties derive a mask from a common secret; one adds it, the other subtracts it. Each party also adds a mask
of its own, and gives the others shares of both secrets, by which the server removes what did not cancel: of a party
whose values arrived, its own mask; of one whose values did not, those that it has in common with others. It never
learns both of the same party, so that values which arrive too late stay hidden.

A `Party` speaks four times, in this order: `Party.keys`, `Party.shares`, `Party.mask`, `Party.reveal`. What it says
and hears is a mapping from parties, which are numbered from 0, to bytes.

Needs cryptography, the extra ``secure``. Secrets are drawn by the system's generator; nothing follows from a seed.

Reference:
    Bonawitz et al. (2017), "Practical secure aggregation for privacy-preserving machine learning", Figure 4, without
    the signatures of its active model.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Collection, Mapping
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
# Bytes of each thing that a party says: two public keys and a digest; two shares and the tag that authenticates them.
SIZES = MappingProxyType({"keys": 3 * KEY_BYTES, "shares": 2 * SHARE_BYTES + 16, "reveal": SHARE_BYTES})
ONCE = bytes(12)  # a nonce; every key encrypts one message
FEWEST = 2  # parties of a sum that hides anything
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
        >>> total = torch.zeros(2, dtype=torch.int64)
        >>> for number, value in ((0, 5), (2, 7)):  # party 1 drops out
        ...     values = torch.tensor([value, -value])
        ...     parties[number].mask(values, {other: sealed[other][number] for other in keys if other != number})
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
        self._shares: dict[int, tuple[bytes, bytes]] = {}  # by party: of its own mask's key and its masking key
        self._due = ["reveal", "mask", "shares", "keys"]  # the last is next

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
        """Shares of its secrets, sealed for each of the others.

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
        places = [party + 1 for party in keys]
        both = [split(key, places, self.threshold) for key in (self._own, self._masks.private_bytes_raw())]
        mine = {party: (both[0][party + 1], both[1][party + 1]) for party in keys}
        self._shares = {self.me: mine[self.me]}
        return {
            other: ChaCha20Poly1305(self._sealing_key(self.me, other)).encrypt(ONCE, b"".join(mine[other]), None)
            for other in keys
            if other != self.me
        }

    def _sealing_key(self, sender: int, receiver: int) -> bytes:
        """The key of the one message from a party to another, of which this one is either."""
        other = self._keys[receiver if sender == self.me else sender][:KEY_BYTES]
        return _agreed(self._seals, other, b"shares", self.context, sender, receiver)

    def mask(self, values: Tensor, sealed: Said) -> None:
        """Hide its values, in place: its own mask, and one with each of the others whose shares have arrived.

        Args:
            values: int64, contiguous, on the CPU, one dimension.
            sealed: What the others have sealed for this one.

        Raises:
            ValueError: If too few shares have arrived, or any was changed on its way.
        """
        self._take("mask")
        others = sealed.keys() - {self.me}
        if not others <= self._keys.keys() or len(others) + 1 < self.threshold:
            raise ValueError(
                f"A secure sum needs the shares of {self.threshold} of its {len(self._keys)} parties, got those of "
                f"{len(others) + 1}."
            )
        for other in others:
            try:
                opened = ChaCha20Poly1305(self._sealing_key(other, self.me)).decrypt(ONCE, sealed[other], None)
            except InvalidTag:
                raise ValueError(f"Party {other}'s shares for party {self.me} were changed on their way.") from None
            self._shares[other] = opened[:SHARE_BYTES], opened[SHARE_BYTES:]
        add_mask(values, self._own, 1)
        for other in others:
            key = _common_key(self._masks, self._keys[other], self.context, self.me, other)
            add_mask(values, key, _sign(self.me, other))

    def reveal(self, arrived: Collection[int]) -> dict[int, bytes]:
        """Its share of one secret of each party: of its own mask if its values arrived, or else of the common ones.

        Raises:
            ValueError: If fewer arrived than the threshold, or this party's values are not among them.
        """
        self._take("reveal")
        if self.me not in arrived or not self._shares.keys() >= set(arrived) or len(set(arrived)) < self.threshold:
            raise ValueError(
                f"A party of a secure sum reveals shares once its values, and those of {self.threshold} of the parties "
                f"{sorted(self._shares)}, have arrived; got {sorted(arrived)}."
            )
        return {party: own if party in arrived else common for party, (own, common) in self._shares.items()}


def remove_masks(
    total: Tensor, context: bytes, threshold: int, keys: Said, arrived: Collection[int], revealed: Mapping[int, Said]
) -> None:
    """Remove all masks from the sum of the values that arrived, in place.

    Args:
        total: The sum modulo 2^64, int64, contiguous, on the CPU, one dimension.
        context: As for `Party`.
        threshold: Likewise.
        keys: What the parties said whose shares all others got.
        arrived: Whose values are in the sum.
        revealed: What at least as many of these as the threshold have revealed.

    Raises:
        ValueError: If what was revealed does not give the secrets.
    """
    answered = sorted(revealed)[:threshold]
    for party in keys:
        shares = {other + 1: revealed[other][party] for other in answered}
        try:
            secret = join(shares)
            if party in arrived:
                is_right = hashlib.sha256(secret).digest() == keys[party][2 * KEY_BYTES :]
            else:
                private = X25519PrivateKey.from_private_bytes(secret)
                is_right = private.public_key().public_bytes_raw() == _masking_key(keys[party])
        except ValueError:
            is_right = False
        if not is_right:
            raise ValueError(f"The shares of party {party} that others revealed do not belong together.")
        if party in arrived:
            add_mask(total, secret, -1)
        else:
            for other in arrived:
                add_mask(total, _common_key(private, keys[other], context, party, other), -_sign(other, party))


def add_mask(values: Tensor, key: bytes, sign: int) -> None:
    """Add the mask that follows from a key, or subtract it: int64, uniform, modulo 2^64, in place.

    It is ChaCha20's key stream, read as little-endian numbers.
    """
    stream, whole = Cipher(ChaCha20(key, bytes(16)), mode=None).encryptor(), values.numpy()
    for begin in range(0, len(whole), _BLOCK):
        block = whole[begin : begin + _BLOCK]
        mask = np.frombuffer(stream.update(bytes(block.nbytes)), "<i8")
        (np.add if sign > 0 else np.subtract)(block, mask, out=block)


def _sign(me: int, other: int) -> int:
    return 1 if me < other else -1


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
