"""What server and devices say to each other: questions and answers, as named parts of bytes.

| question | parts | answer |
| --- | --- | --- |
| `WHO` | none | who the device is: `Identity` |
| `TRAIN` | the digest of a `Start`, the start itself if the device may lack it, a `Download` | an `Upload` |
| `EVALUATE` | the model's name, the precision, a `Download` of the server's weights | an `Upload` without tensors |

A `Download` and an `Upload` are divided into a head and the values of their tensors, so that values which all clients
get are one part that can be sent once. Instead of its answer, a device may say that it lacks the start (`LACKS`), or
why it refuses (`REFUSED`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from lightning_spectral.client.local_hooks import LocalHook
from lightning_spectral.client.side import ClientSide
from lightning_spectral.errors import RecordError
from lightning_spectral.protocol.codec import VERSION, decode, decode_plain, encode, encode_plain, head_and_values
from lightning_spectral.protocol.object_codec import from_plain, to_plain
from lightning_spectral.protocol.records import Download, Upload

Parts = Mapping[str, bytes]

WHO, TRAIN, EVALUATE = "query", "train", "evaluate"
MODEL, PRECISION = "model", "precision"
START, DIGEST, HEAD, VALUES, IDENTITY, LACKS, REFUSED = (
    "start",
    "digest",
    "head",
    "values",
    "identity",
    "lacks",
    "refused",
)

Record = TypeVar("Record", Download, Upload)
Sent = TypeVar("Sent", "Identity", "Start")


@dataclass(frozen=True)
class Holding:
    """What a device has for one model.

    Attributes:
        num_examples: Number of its training examples.
        examples_per_epoch: How many of them it trains on in a local epoch.
        keep_ratio: What it can hold; ``None`` to leave that to the algorithm.
        num_held_out: Number of examples on which it does not train, for `ClientEvaluation`.
        budget_bytes: Bytes that it may get and send in a round; ``None`` for any number.
    """

    num_examples: int
    examples_per_epoch: int
    keep_ratio: float | None = None
    num_held_out: int = 0
    budget_bytes: float | None = None


@dataclass(frozen=True)
class Identity:
    """Who a device is.

    Attributes:
        client: The client whose data it has; a name that stays the same when the device is switched off and on.
        holdings: What it has for each model, by name; an only model has an empty one.
        version: Version of the format of records on the device.
    """

    client: str
    holdings: Mapping[str, Holding]
    version: int = VERSION


@dataclass(frozen=True, eq=False)
class Start:
    """What a device needs once in a run, besides the user's module, of which it has the code.

    Attributes:
        model: The model's name; empty if there is only one.
        side: The device half of the algorithm.
        local_hooks: Hooks that act while clients train.
        measures: Whether clients only measure their loss.
        precision: Precision of the server's Trainer, in which devices train too.
        num_rounds: Number of rounds of the run; ``None`` if it goes on until it is stopped.
    """

    model: str
    side: ClientSide
    local_hooks: tuple[LocalHook, ...] = ()
    measures: bool = False
    precision: str = "32-true"
    num_rounds: int | None = None


def encode_object(value: Identity | Start) -> bytes:
    """Write who a device is, or what it needs once, as bytes.

    Example:
        >>> decode_object(encode_object(Identity("ward 7", {"": Holding(80, 64)})), Identity).holdings
        {'': Holding(num_examples=80, examples_per_epoch=64, keep_ratio=None, num_held_out=0, budget_bytes=None)}
    """
    name = type(value).__name__
    return encode_plain(to_plain(value, name), name)


def decode_object(data: bytes, kind: type[Sent], trusted: Collection[str] = ()) -> Sent:
    """Read what `encode_object` wrote.

    Args:
        data: The bytes.
        kind: What they must be.
        trusted: Packages whose dataclasses may be made, besides this one.

    Raises:
        RecordError: If they are anything else.
    """
    found: Any = from_plain(decode_plain(data, kind.__name__), trusted, kind.__name__)
    if not isinstance(found, kind):
        raise RecordError(f"Expected an object of type {kind.__name__}, got a {type(found).__name__}.")
    return found


def record_parts(record: Download | Upload) -> dict[str, bytes]:
    """A record as two parts."""
    head, values = head_and_values(encode(record))
    return {HEAD: bytes(head), VALUES: bytes(values)}


def record_of(parts: Parts, kind: type[Record]) -> Record:
    """The record in a message.

    Raises:
        RecordError: If it is not there, or damaged.
    """
    if not {HEAD, VALUES} <= parts.keys():
        raise RecordError(f"The message holds no {kind.__name__}.")
    return decode(parts[HEAD] + parts[VALUES], kind)


@dataclass(frozen=True)
class Starting:
    """A `Start` as bytes, and its digest, by which devices that have it know it."""

    data: bytes
    digest: bytes = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "digest", hashlib.sha256(self.data).hexdigest().encode())
