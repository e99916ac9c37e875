"""Masks cancel whoever drops out; what one party uploads is noise; and no party says what would uncover another."""

import hashlib
import os
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import chi2
from torch import Tensor

pytest.importorskip("cryptography", reason="masks need the extra `secure`")
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20

from lightning_spectral.sums import masks
from lightning_spectral.sums.masks import SIZES, Party, _common_key, add_mask, are_safe, digests, half, remove_masks

CONTEXT = b"round 3"
SIZE = 100_003  # of a vector: some blocks and a part of one


def vector(number: int, size: int = SIZE) -> Tensor:
    return torch.randint(-(2**62), 2**62, (size,), generator=torch.Generator().manual_seed(number))


@dataclass
class Sum:
    """One sum of some parties; those in ``never`` send no shares."""

    number: int
    threshold: int
    never: Collection[int] = ()
    masked: dict[int, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.parties = {number: Party(number, CONTEXT, self.threshold) for number in range(self.number)}
        self.all_keys = {number: party.keys() for number, party in self.parties.items()}
        said = {n: party.shares(self.all_keys) for n, party in self.parties.items() if n not in self.never}
        self.keys = {number: self.all_keys[number] for number in said}
        self.sealed = {to: {by: boxes[to] for by, boxes in said.items()} for to in said}
        self.opened = {to: party.open(self.sealed[to]) for to, party in self.parties.items() if to in said}

    def mask(self, number: int, values: Tensor) -> Tensor:
        self.masked[number] = values.clone()
        self.parties[number].mask(self.masked[number], self.keys)
        return self.masked[number]

    def revealed(self, arrived: Collection[int]) -> dict[int, dict[int, bytes]]:
        return {number: self.parties[number].reveal(arrived) for number in arrived}

    def total(self, arrived: Collection[int], revealed: Any) -> Tensor:
        total = torch.stack([self.masked[number] for number in arrived]).sum(0)
        remove_masks(total, CONTEXT, self.threshold, self.keys, arrived, revealed)
        return total


@pytest.mark.parametrize(
    ("never", "arrived", "silent"),
    [
        ([], [0, 1, 2, 3, 4], []),
        ([1], [0, 2, 3, 4], []),
        ([], [0, 2, 4], []),
        ([], [0, 1, 2, 3, 4], [0, 3]),
        ([2], [0, 3, 4], []),
        ([2], [0, 1, 3, 4], [4]),
    ],
    ids=["everybody", "without shares", "without values", "without reveal", "first and second", "first and last"],
)
def test_masks_are_removed_whoever_drops_out(never: list[int], arrived: list[int], silent: list[int]) -> None:
    run = Sum(5, threshold=3, never=never)
    for number in run.keys:  # also those whose values arrive too late
        run.mask(number, vector(number))
    revealed = {number: said for number, said in run.revealed(arrived).items() if number not in silent}
    assert torch.equal(run.total(arrived, revealed), torch.stack([vector(number) for number in arrived]).sum(0))


def test_a_mask_is_the_key_stream_of_chacha20() -> None:
    """Read by Python's own integers, number by number; subtracting it gives the values back."""
    key = hashlib.sha256(b"a key").digest()
    stream = Cipher(ChaCha20(key, bytes(16)), mode=None).encryptor().update(bytes(8 * SIZE))
    expected = [int.from_bytes(stream[8 * i : 8 * i + 8], "little", signed=True) for i in range(SIZE)]
    values = torch.zeros(SIZE, dtype=torch.int64)
    add_mask(values, key, 1)
    assert values.tolist() == expected
    values += vector(0)
    add_mask(values, key, -1)
    assert torch.equal(values, vector(0))


def looks_uniform(values: Tensor) -> bool:
    """A chi-square test of the 256 bytes, which a uniform one fails once in a billion."""
    counts = np.bincount(np.frombuffer(values.numpy().tobytes(), np.uint8), minlength=256)
    expected = counts.sum() / 256
    return float(((counts - expected) ** 2 / expected).sum()) < chi2.isf(1e-9, df=255)


def test_what_a_party_uploads_is_noise_and_without_masks_it_is_not() -> None:
    run, values = Sum(3, threshold=2), torch.arange(SIZE) - SIZE // 2
    assert not looks_uniform(values)
    assert looks_uniform(run.mask(0, values))
    assert looks_uniform(run.mask(1, values) + run.masked[0])  # the third's values are missing
    partly = run.masked[0].clone()
    partly[: SIZE // 8] = values[: SIZE // 8]
    assert not looks_uniform(partly)


def test_values_that_arrive_too_late_stay_hidden_although_all_common_masks_are_known() -> None:
    run, values = Sum(3, threshold=2), torch.arange(SIZE)
    for number in range(3):
        run.mask(number, values)
    shares = run.revealed([0, 1])
    total = run.masked[2].clone()  # what the server has of party 2, late; it has its common masks removed
    own = run.parties[2]._own
    for other in (0, 1):
        add_mask(total, _common_key(run.parties[2]._masks, run.keys[other], CONTEXT, 2, other), -1 if other > 2 else 1)
    assert looks_uniform(total)
    add_mask(total, own, -1)
    assert torch.equal(total, values)  # so its own mask was all that hid it
    assert all(len(share) == SIZES["reveal"] for said in shares.values() for share in said.values())


def test_no_party_reveals_both_secrets_of_another_and_none_answers_twice() -> None:
    run = Sum(4, threshold=3)
    for number in range(4):
        run.mask(number, vector(number))
    party = run.parties[0]
    said = party.reveal([0, 1, 2])
    own, common = (half(party._shares[3], is_own) for is_own in (True, False))
    assert said[3] == common != own
    assert all(said[number] == half(party._shares[number], True) for number in (0, 1, 2))
    with pytest.raises(ValueError, match="takes each step once; 'nothing' is due, not 'reveal'"):
        party.reveal([0, 1, 3])


def test_a_server_that_asks_two_groups_differently_gets_one_secret_at_most() -> None:
    """With a threshold above half, no two disjoint groups reach it."""
    for number in range(2, 9):
        for threshold in range(2, number + 1):
            parties = {i: Party(i, CONTEXT, threshold) for i in range(number)}
            keys = {i: party.keys() for i, party in parties.items()}
            if 2 * threshold > number:
                parties[0].shares(keys)
                continue
            with pytest.raises(ValueError, match=f"above half .* got {threshold} of {number}"):
                parties[0].shares(keys)


def test_steps_out_of_order_or_repeated_are_refused() -> None:
    run = Sum(3, threshold=2)
    party = run.parties[0]
    with pytest.raises(ValueError, match="'mask' is due, not 'shares'"):
        party.shares(run.all_keys)
    with pytest.raises(ValueError, match="'mask' is due, not 'open'"):
        party.open(run.sealed[0])
    late = Sum(3, threshold=2)
    late.mask(0, vector(0))
    with pytest.raises(ValueError, match="'reveal' is due, not 'mask'"):  # a second update under the same masks
        late.mask(0, vector(1))
    with pytest.raises(ValueError, match="'keys' is due, not 'shares'"):
        Party(0, CONTEXT, 2).shares(run.all_keys)


@pytest.mark.parametrize(
    ("arrived", "message"),
    [([0, 1], "of 3 of the parties"), ([1, 2, 3], "its values"), ([0, 1, 9], "got \\[0, 1, 9\\]"), ([0, 0, 0], "of 3")],
    ids=["too few", "without itself", "a stranger", "one thrice"],
)
def test_reveals_that_would_uncover_more_are_refused(arrived: list[int], message: str) -> None:
    run = Sum(4, threshold=3)
    for number in range(4):
        run.mask(number, vector(number))
    with pytest.raises(ValueError, match=message):
        run.parties[0].reveal(arrived)


def test_keys_that_are_not_those_of_the_parties_are_refused() -> None:
    one, two = (Party(number, CONTEXT, 2).keys() for number in (1, 2))
    for others in ({1: one, 2: two}, {0: two, 1: one}, {1: two, 2: two}):
        party = Party(0, CONTEXT, 2)
        own = party.keys()
        wrong = {0: own, **others} if others[1] == two else others
        with pytest.raises(ValueError, match="must be those of different parties, this one among them"):
            party.shares(wrong)
    alone = Party(0, CONTEXT, 1)
    keys = {0: alone.keys()}
    with pytest.raises(ValueError, match="threshold of 2 or more"):
        alone.shares(keys)


def flipped(said: bytes, at: int) -> bytes:
    return bytes(byte ^ (place == at % len(said)) for place, byte in enumerate(said))


@pytest.mark.parametrize(
    "change",
    [
        lambda run: flipped(run.sealed[0][1], 40),
        lambda run: flipped(run.sealed[0][1], -40),  # the digest of its own mask's share
        lambda run: flipped(run.sealed[0][1], -1),
        lambda run: run.sealed[0][2],
        lambda run: run.sealed[2][1],  # meant for another
        lambda run: run.sealed[1][0],  # sent back to its sender
        lambda run: Sum(3, threshold=2).sealed[0][1],  # of another round
    ],
)
def test_shares_that_were_changed_replayed_or_swapped_are_not_opened(change: Callable[[Sum], bytes]) -> None:
    run = Sum(3, threshold=2)
    party = Party(0, CONTEXT, 2)
    party.__dict__.update({**vars(run.parties[0]), "_shares": {}, "_due": ["reveal", "mask", "open"]})
    assert run.opened[0].keys() == {0, 1, 2}
    assert party.open({**run.sealed[0], 1: change(run)}).keys() == {0, 2}


def test_a_sum_without_enough_parties_or_with_strangers_is_refused() -> None:
    for members in ([0, 1], [1, 2, 3], [0, 1, 2, 9]):
        with pytest.raises(ValueError, match="needs 3 parties, this one among them, got "):
            Sum(4, threshold=3).parties[0].mask(vector(0), members)


def test_dealers_show_fewer_shares_than_give_their_secrets_and_once() -> None:
    run, words = Sum(5, threshold=3), "publishes once, before it masks, fewer of its shares than 3, not"
    shown = run.parties[0].publish([1, 4])
    assert {to: digests(shares) for to, shares in shown.items()} == {to: run.sealed[to][0][-64:] for to in (1, 4)}
    run.mask(2, vector(2))
    for party, receivers in ((0, [2]), (1, [0, 2, 3]), (2, [0]), (3, [9])):
        with pytest.raises(ValueError, match=words):
            run.parties[party].publish(receivers)


# the points of order 1, 2, 4 and 8 of the curve, and of its twist (RFC 7748, section 5; Bernstein, "Validate", 2014)
SMALL_ORDER = [
    *(0, 1, 2**255 - 19 - 1, 2**255 - 19, 2**255 - 19 + 1),
    325606250916557431795983626356110631294008115727848805560023387167927233504,
    39382357235489614581723060781553021112529911719440698176882885853963445705823,
]


def test_keys_of_small_order_are_not_safe_and_those_of_a_party_are() -> None:
    keys = Party(0, CONTEXT, 2).keys()
    assert are_safe(keys)
    for number in SMALL_ORDER:
        point = number.to_bytes(32, "little")
        assert not are_safe(point + keys[32:])
        assert not are_safe(keys[:32] + point + keys[64:])


@pytest.mark.parametrize("wrong", [1, 2, 3])
@pytest.mark.parametrize("lost", [2, 7], ids=["own mask", "common masks"])
def test_some_of_the_shares_give_a_secret_of_which_a_dealer_dealt_wrong_ones(
    lost: int, wrong: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five are needed, and eight parties hold seven: up to two wrong ones leave enough, and three name the dealer."""
    deal = masks.split
    run = Sum(8, threshold=5, never=range(8))
    for number, party in run.parties.items():

        def dealt(secret: bytes, places: Any, threshold: int, number: int = number) -> dict[int, bytes]:
            shares = deal(secret, places, threshold)
            is_wrong = {x: number == lost and x <= wrong for x in places}
            return {x: b"\0" + os.urandom(32) if is_wrong[x] else share for x, share in shares.items()}

        monkeypatch.setattr(masks, "split", dealt)
        run.sealed[number] = party.shares(run.all_keys)
    run.keys = run.all_keys
    arrived = list(range(7))
    for number, party in run.parties.items():
        assert len(party.open({by: said[number] for by, said in run.sealed.items()})) == 8  # nobody sees it before
        run.mask(number, vector(number))
    if wrong < 3:
        expected = torch.stack([vector(number) for number in arrived]).sum(0)
        assert torch.equal(run.total(arrived, run.revealed(arrived)), expected)
        return
    with pytest.raises(ValueError, match=f"The shares that party {lost} dealt do not give its secret"):
        run.total(arrived, run.revealed(arrived))
