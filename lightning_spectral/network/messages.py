"""What server and devices say to each other: questions and answers, as named parts of bytes.

| question | parts | answer |
| --- | --- | --- |
| `WHO` | none | who the device is: `Identity` |
| `AGREE` | a `Handshake` of secure sums | what this client says in it |
| `TRAIN` | the digest of a `Start`, the start itself if the device may lack it, a `Download` | an `Upload` |
| `EVALUATE` | the model's name, the precision, a `Download` of the server's weights | an `Upload` without tensors |

A `Download` and an `Upload` are two parts, a head and the values of their tensors, so that values which all clients get
can be sent once. Instead of its answer, a device may say that it lacks the start (`Part.LACKS`), or why it refuses
(`Part.REFUSED`). The server reads answers in `gate`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, TypeVar

from lightning_spectral.client.device import Instructions
from lightning_spectral.client.local_hooks import LocalHook
from lightning_spectral.errors import RecordError, from_extra
from lightning_spectral.protocol.codec import VERSION, decode, encode
from lightning_spectral.protocol.records import Download, Handshake, Upload

with from_extra("network"):
    from msgspec import Meta, MsgspecError, msgpack

Parts = Mapping[str, bytes]
Record = TypeVar("Record", Download, Upload)
Count = Annotated[int, Meta(ge=0, lt=2**40)]


class Kind:
    """What a question asks."""

    WHO, AGREE, TRAIN, EVALUATE = "query", "query.agree", "train", "evaluate"


class Part:
    """The names of a message's parts."""

    MODEL, PRECISION, START, DIGEST, HEAD, VALUES = "model", "precision", "start", "digest", "head", "values"
    HANDSHAKE, IDENTITY, LACKS, REFUSED = "handshake", "identity", "lacks", "refused"


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

    num_examples: Count
    examples_per_epoch: Count
    keep_ratio: Annotated[float, Meta(gt=0, le=1)] | None = None
    num_held_out: Count = 0
    budget_bytes: Annotated[float, Meta(gt=0)] | None = None


@dataclass(frozen=True)
class Identity:
    """Who a device is.

    Attributes:
        client: The client whose data it has; a name that stays the same when the device is switched off and on.
        holdings: What it has for each model, by name; a single model has an empty name.
        version: Version of the format of records on the device.
    """

    client: Annotated[str, Meta(max_length=1000)]
    holdings: Mapping[str, Holding]
    version: int = VERSION


@dataclass(frozen=True, eq=False)
class Start:
    """What a device needs once in a run, besides the user's module, of which it has the code.

    Attributes:
        model: The model's name; empty if there is only one.
        instructions: The device half of the algorithm, and the filters that act on devices.
        local_hooks: Hooks that act while clients train.
        measures: Whether clients only measure their loss.
        precision: Precision of the server's Trainer, in which devices train too.
        num_rounds: Number of rounds of the run; ``None`` if it continues until it is stopped.
    """

    model: str
    instructions: Instructions
    local_hooks: tuple[LocalHook, ...] = ()
    measures: bool = False
    precision: str = "32-true"
    num_rounds: int | None = None


def identity_parts(identity: Identity) -> dict[str, bytes]:
    """The answer to `Kind.WHO`."""
    return {Part.IDENTITY: msgpack.encode(identity)}


def handshake_parts(handshake: Handshake) -> dict[str, bytes]:
    """A question of secure sums, or its answer."""
    return {Part.HANDSHAKE: msgpack.encode(handshake)}


def handshake_of(parts: Parts) -> Handshake:
    """The handshake in a message; `RecordError` if there is none."""
    try:
        return msgpack.decode(parts.get(Part.HANDSHAKE, b""), type=Handshake)
    except (MsgspecError, ValueError, RecursionError) as error:
        raise RecordError(f"The message holds no step of secure sums: {error}.") from error


def record_parts(record: Download | Upload) -> dict[str, bytes]:
    """A record as two parts."""
    return dict(zip((Part.HEAD, Part.VALUES), encode(record), strict=True))


def record_of(parts: Parts, kind: type[Record]) -> Record:
    """The record in a message; `RecordError` if it is not there, or damaged."""
    if not {Part.HEAD, Part.VALUES} <= parts.keys():
        raise RecordError(f"The message holds no {kind.__name__}.")
    return decode(parts[Part.HEAD], parts[Part.VALUES], kind)


def digest_of(start: bytes) -> bytes:
    """The digest of an encoded `Start`, by which devices that have it know it."""
    return hashlib.sha256(start).hexdigest().encode()
