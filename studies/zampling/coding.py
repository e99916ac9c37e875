"""How few bytes the uploaded bits need: entropy, an arithmetic coder, zlib, and leaving out settled bits.

    python studies/zampling/coding.py     # three minutes on one core; prints a table

Ten clients train MNISTFC at compression 32, as published, for ten rounds. Both ends know the probabilities p that were
sent to a client, so a coder may use them. p is kept a hundredth away from 0 and 1, because a client draws its bits from
its own, trained probabilities. The decoded bits equal those that were sent.
"""

from __future__ import annotations

import sys
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import lightning.pytorch as pl
import torch
from tasks import NUM_CLIENTS, TASKS, Classifier, deal
from torch import Tensor

sys.path.append(str(Path(__file__).parents[1]))  # code that the studies share
from quiet import quiet_trainer

import lightning_spectral as ls
from lightning_spectral.functional.zampling import pack_bits, unpack_bits

ROUNDS = (0, 1, 2, 4, 9)
MARGIN = 0.01
TOP, HALF = 2**32 - 1, 2**12  # top of the coder's range; denominator of its probabilities


def encode(bits: Sequence[int], ones: Sequence[int]) -> bytes:
    """Binary arithmetic coding: each bit narrows an interval in proportion to its probability.

    Args:
        bits: Zeros and ones.
        ones: For each bit, the probability of a one, in units of 1 / HALF, from 1 to HALF - 1.
    """
    low, high, out = 0, TOP, bytearray()
    for bit, one in zip(bits, ones, strict=True):
        middle = low + (high - low) * one // HALF
        low, high = (low, middle) if bit else (middle + 1, high)
        while (low ^ high) >> 24 == 0:  # the first byte is decided
            out.append(high >> 24)
            low, high = (low << 8) & TOP, ((high << 8) & TOP) | 255
    return bytes(out) + (high >> 24).to_bytes(1, "big") + b"\0\0\0"


def decode(data: bytes, ones: Sequence[int]) -> list[int]:
    """Undo `encode`."""
    source = iter(data + b"\0\0\0\0")
    low, high, code, bits = 0, TOP, int.from_bytes(bytes(next(source) for _ in range(4)), "big"), []
    for one in ones:
        middle = low + (high - low) * one // HALF
        bits.append(int(code <= middle))
        low, high = (low, middle) if bits[-1] else (middle + 1, high)
        while (low ^ high) >> 24 == 0:
            low, high = (low << 8) & TOP, ((high << 8) & TOP) | 255
            code = ((code << 8) & TOP) | next(source)
    return bits


class Uploads(ls.RoundCallback):
    """Keeps the uploaded bits, with the probabilities from which training started."""

    def __init__(self) -> None:
        self.found: dict[int, list[tuple[Tensor, Tensor]]] = {}

    def on_client_end(self, trainer: pl.Trainer, pl_module: Any, turn: Any) -> None:
        probs = turn.download.tensors["zampling.probs"].clone()
        bits = unpack_bits(turn.upload.tensors["zampling.bits"], len(probs))
        self.found.setdefault(turn.round_idx, []).append((probs, bits))


def sizes(probs: Tensor, bits: Tensor) -> Iterator[float]:
    """Yield the bytes of one upload: packed, unsettled bits alone, zlib, entropy given p, arithmetic coder given p."""
    packed = pack_bits(bits).numpy().tobytes()
    yield len(packed)
    yield -(-int(((probs > 0) & (probs < 1)).sum()) // 8)
    yield len(zlib.compress(packed, 9))
    p = probs.double().clamp(MARGIN, 1 - MARGIN)
    yield float(-torch.where(bits, p, 1 - p).log2().sum()) / 8
    ones = (p * HALF).round().long().tolist()
    coded = encode(bits.long().tolist(), ones)
    assert decode(coded, ones) == bits.long().tolist()
    yield len(coded)


def main() -> None:
    torch.set_num_threads(1)
    task, uploads = TASKS["MNISTFC"], Uploads()
    model = ls.FederatedModule(
        Classifier(task.net(), lr=0.1), algorithm=ls.Zampling(32, init="paper"), clients_per_round=NUM_CLIENTS
    )
    quiet_trainer(ROUNDS[-1] + 1, [uploads]).fit(model, deal(task))
    print("| round | packed | settled left out | zlib | entropy | arithmetic coder |")
    print("| --- " * 6 + "|")
    for round_idx in ROUNDS:
        columns = zip(*(sizes(*upload) for upload in uploads.found[round_idx]), strict=True)
        print(f"| {round_idx + 1} | " + " | ".join(f"{mean(column):.0f}" for column in columns) + " |")


if __name__ == "__main__":
    main()
