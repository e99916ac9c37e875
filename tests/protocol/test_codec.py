"""Records as bytes: what is read is what was written, bit for bit, and anything else is refused in our words."""

import hashlib
import math
import pickle
import random
import struct
from dataclasses import fields, replace
from typing import Any, get_args

import msgspec
import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from lightning_spectral.errors import RecordError
from lightning_spectral.protocol import codec
from lightning_spectral.protocol.codec import decode, encode, read_tensors, write_tensors
from lightning_spectral.protocol.exchange import digest
from lightning_spectral.protocol.records import (
    Download,
    ExclusionReason,
    Failure,
    LoggedValue,
    Masking,
    Upload,
    WorkUnit,
)

_WHOLE = (torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.int8, torch.int16, torch.int32)
DTYPES = [*_WHOLE, torch.int64, torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64]
NAMES = st.text(max_size=8)
FLOATS = st.floats(width=64)
NUMBERS = st.one_of(st.booleans(), st.integers(-(2**63), 2**64 - 1), FLOATS)
WHOLE = st.integers(0, 2**63 - 1)


@st.composite
def tensors(draw: Any) -> Tensor:
    """Any values, i.e. any bits, of any type and shape, also if they do not lie one after another in memory."""
    shape, dtype = draw(st.lists(st.integers(0, 4), max_size=3)), draw(st.sampled_from(DTYPES))
    size = dtype.itemsize * math.prod(shape)
    values = torch.tensor(list(draw(st.binary(min_size=size, max_size=size))), dtype=torch.uint8)
    whole = (values & 1 if dtype is torch.bool else values).view(dtype).reshape(shape)
    match draw(st.sampled_from(["transposed", "every second", "expanded", "parameter", "plain"])):
        case "transposed" if len(shape) > 1:
            return whole.transpose(0, 1)
        case "every second" if shape:
            return whole[::2]
        case "expanded":
            return whole.expand(2, *shape)
        case "parameter" if dtype.is_floating_point:
            return nn.Parameter(whole)
    return whole


def mappings(values: Any, max_size: int = 3) -> Any:
    return st.dictionaries(NAMES, values, max_size=max_size)


PLAIN = st.recursive(
    st.one_of(st.none(), NUMBERS, NAMES, tensors()),
    lambda inner: st.lists(inner, max_size=3).map(tuple) | st.dictionaries(NAMES | WHOLE, inner, max_size=3),
    max_leaves=6,
)
UNITS = st.builds(WorkUnit, WHOLE, NAMES, FLOATS)
DOWNLOADS = st.builds(
    Download,
    unit=UNITS,
    capacity=FLOATS,
    tensors=mappings(tensors(), 4),
    round_idx=WHOLE,
    local_epochs=WHOLE,
    options=st.lists(st.lists(mappings(PLAIN), max_size=2).map(tuple), max_size=2).map(tuple),
    seed=st.integers(-(2**63), 2**63 - 1),
    frozen=mappings(NAMES),
    held=st.frozensets(NAMES, max_size=3),
    last_turn=st.none() | WHOLE,
    client_state=mappings(tensors()),
    masking=st.none() | st.builds(Masking, FLOATS, st.lists(WHOLE, max_size=3).map(tuple)),
)
UPLOADS = st.builds(
    Upload,
    unit=UNITS,
    tensors=mappings(tensors(), 4),
    num_steps=WHOLE,
    loss=FLOATS,
    logged=mappings(st.builds(LoggedValue, FLOATS, st.booleans(), st.booleans())),
    left_out=st.sampled_from([None, *get_args(ExclusionReason)]),
    failure=st.none() | st.builds(Failure, NAMES, NAMES, st.none() | st.builds(ValueError, NAMES)),
    seconds=mappings(FLOATS),
    unreached=st.none() | st.lists(NAMES, max_size=3).map(tuple),
    untrained_rows=mappings(tensors()),
    discarded=st.lists(NAMES, max_size=3).map(tuple),
    missing=st.lists(NAMES, max_size=3).map(tuple),
    put_back=st.lists(NAMES, max_size=3).map(tuple),
    loss_before=FLOATS,
    client_state=mappings(tensors()),
    lost_state=st.booleans(),
)


def exact(value: Any) -> Any:
    """Something that is equal exactly if two values have the same types, bits and order."""
    if isinstance(value, Tensor):
        return digest(value)
    if isinstance(value, float):
        return struct.pack(">d", value)
    if isinstance(value, tuple | list):
        return type(value), [exact(inner) for inner in value]
    if isinstance(value, dict):
        return [(exact(key), exact(inner)) for key, inner in value.items()]
    if isinstance(value, Download | Upload | Failure | LoggedValue | Masking):
        return type(value), [exact(getattr(value, field.name)) for field in fields(value) if field.name != "cause"]
    return type(value), value


@given(DOWNLOADS)
def test_a_download_is_read_as_it_was_written(download: Download) -> None:
    travelled = decode(*encode(download), Download)
    assert exact(travelled) == exact(replace(download, tensors=dict(download.travelling)))
    assert (travelled.num_bytes, travelled.frozen_bytes) == (download.num_bytes, download.frozen_bytes)
    assert exact(decode(*encode(travelled), Download)) == exact(travelled)


@given(UPLOADS)
def test_an_upload_is_read_as_it_was_written(upload: Upload) -> None:
    travelled = decode(*encode(upload), Upload)
    assert exact(travelled) == exact(upload)
    assert encode(travelled) == encode(upload)


def example() -> Upload:
    """With a bit of everything."""
    return Upload(
        WorkUnit(3, "words", 80.0),
        {"weight": torch.tensor([[1.5, -0.0], [math.nan, math.inf]]), "bits": torch.tensor([7], dtype=torch.uint8)},
        num_steps=2**40,
        logged={"acc": LoggedValue(0.5, True, False)},
        failure=Failure("loading", "no, nö"),
        seconds={"load": 0.25, "train": 1e-300},
        unreached=("net.0",),
        untrained_rows={"weight": torch.tensor([1])},
    )


HEAD, VALUES = encode(example())


def mutated(data: bytes, rng: random.Random) -> bytes:
    """The bytes with one or two flipped bits, or without an end, a stretch or with one more."""
    changed = bytearray(data)
    for _ in range(rng.randint(1, 2)):
        at = rng.randrange(len(changed) + 1)
        match rng.choice(["flip", "flip", "flip", "flip", "byte", "cut", "insert", "drop"]):
            case "flip":
                changed[at : at + 1] = bytes(byte ^ 1 << rng.randrange(8) for byte in changed[at : at + 1])
            case "byte":
                changed[at : at + 1] = rng.randbytes(1)
            case "cut":
                del changed[at:]
            case "insert":
                changed[at:at] = rng.randbytes(rng.randint(1, 20))
            case "drop":
                del changed[at : at + rng.randint(1, 20)]
    return bytes(changed)


def sealed(plain: bytes, values: bytes = VALUES) -> tuple[bytes, bytes]:
    """A head with a valid checksum, as somebody might send who knows the format."""
    return hashlib.sha256(plain + values).digest() + plain, values


@pytest.mark.parametrize("record", [example(), Download(WorkUnit(3), 0.5, {"w": torch.ones(3)}, held=frozenset("x"))])
def test_mutations_are_refused_in_our_words_or_make_a_record_of_the_right_types(record: Any) -> None:
    head, values = encode(record)
    rng, refused = random.Random(0), 0
    for _ in range(3000):
        parts = mutated(head, rng), values if rng.random() < 0.5 else mutated(values, rng)
        if parts != (head, values):
            with pytest.raises(RecordError, match=r"^The record .*\.$"):
                decode(*parts, type(record))
        try:
            read = decode(*sealed(mutated(head[32:], rng), mutated(values, rng)), type(record))
        except RecordError:
            refused += 1
        else:
            assert exact(decode(*encode(read), type(record))) == exact(read)  # it is one that could have been written
    assert 1000 < refused < 3000


@given(st.binary(max_size=200), st.binary(max_size=200))
def test_any_bytes_are_refused(data: bytes, values: bytes) -> None:
    for parts in ((data, values), sealed(data), sealed(HEAD[32:], values)):
        with pytest.raises(RecordError):
            decode(*parts, Upload)


def test_every_flipped_bit_is_noticed() -> None:
    for which, part in enumerate((HEAD, VALUES)):
        for bit in range(8 * len(part)):
            damaged = bytearray(part)
            damaged[bit // 8] ^= 1 << bit % 8
            with pytest.raises(RecordError):
                decode(*((damaged, VALUES) if which == 0 else (HEAD, damaged)), Upload)  # type: ignore[arg-type]


def content(**changes: Any) -> Any:
    """The plain data of the example as a receiver without types would read it."""
    version, name, record = msgspec.msgpack.decode(HEAD[32:])
    return msgspec.msgpack.encode((version, name, {**record, **changes}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"loss": "low"}, r"Expected `float`, got `str` - at `\$\.loss`\."),
        ({"num_steps": True}, r"Expected `int`, got `bool` - at `\$\.num_steps`\."),
        ({"left_out": "tired"}, r"Invalid enum value 'tired' - at `\$\.left_out`\."),
        ({"unit": (3, 4, 5)}, r"Expected `str`, got `int` - at `\$\.unit\[1\]`\."),
        ({"tensors": {"weight": 1.0}}, r"Expected `Tensor`, got `float` - at `\$\.tensors\[\.\.\.\]`\."),
        ({"tensors": {1: 1.0}}, r"Expected `str`, got `int` - at `key` in `\$\.tensors`\."),
        ({"tensors": {"w": msgspec.msgpack.Ext(1, b"\7")}}, r"cannot be read: '7'"),
        ({"logged": {"acc": {"value": 1.0}}}, r"missing required field `prog_bar`"),
        ({"failure": {"stage": "", "message": "", "cause": 1}}, r"Expected `Exception`, got `int`"),
        ({"discarded": "net.0"}, r"Expected `array`, got `str` - at `\$\.discarded`\."),
    ],
)
def test_fields_of_the_wrong_type_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(RecordError, match=message):
        decode(*sealed(content(**changes)), Upload)


def deep(levels: int) -> Any:
    return [deep(levels - 1)] if levels else []


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (print, r"The Download cannot be sent: it holds a builtin_function_or_method, and records hold numbers"),
        (object(), r"it holds a object"),
        (2**65, r"The Download cannot be sent: can't serialize ints"),
        (torch.zeros(2).to_sparse(), r"A tensor cannot be sent: it is not a dense tensor, but .* torch\.sparse_coo"),
        (torch.zeros(2, device="meta"), r"it is not a dense tensor, but .* on device meta"),
        (torch.zeros(2, dtype=torch.complex128), r"A tensor cannot be sent: "),
        (codec.MOST_HEAD_BYTES * "x", r"Download holds \d+ bytes besides its tensors; at most 16777216 are sent\."),
    ],
    ids=["function", "object", "long number", "sparse", "meta", "complex", "long"],
)
def test_what_cannot_be_sent_is_named(value: Any, message: str) -> None:
    with pytest.raises(RecordError, match=message):
        encode(Download(WorkUnit(0), 1.0, {}, options=(({"x": value},),)))


@pytest.mark.parametrize(
    "plain",
    [
        100_000 * b"\x91",  # deep
        b"\xdd\xff\xff\xff\xff",  # an array of 4 billion entries, of which none arrived
        b"\xdf\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        bytes(2**24 + 1),
    ],
    ids=["deep", "array", "map", "bytes", "long"],
)
def test_nothing_is_allocated_for_what_did_not_arrive(plain: bytes) -> None:
    for parts in (
        sealed(plain),
        sealed(b"\x93\x03\xa6Upload" + plain),
        sealed(b"\x93\x03\xa6Upload\x81\xa4unit" + plain),
    ):
        with pytest.raises(RecordError):
            decode(*parts, Upload)


@pytest.mark.parametrize(
    "header",
    [
        b'{"a":{"dtype":"F32","shape":[1099511627776],"data_offsets":[0,4398046511104]}}',
        b'{"a":{"dtype":"F32","shape":[0,1099511627776,1099511627776],"data_offsets":[0,0]}}',
        b'{"a":{"dtype":"F32","shape":[-1],"data_offsets":[0,0]}}',
        b'{"a":{"dtype":"F3","shape":[1],"data_offsets":[0,4]}}',
        b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,8]}}',
        b"{",
    ],
)
def test_tensors_that_cannot_be_are_refused(header: bytes) -> None:
    with pytest.raises(RecordError, match=r"^The record's tensors cannot be read: \w+: "):
        read_tensors(len(header).to_bytes(8, "little") + header + bytes(4))


def test_boolean_tensors_hold_no_other_values() -> None:
    data = write_tensors({"mask": torch.tensor([True])})
    assert read_tensors(data)["mask"].tolist() == [True]
    with pytest.raises(RecordError, match=r"Boolean tensor with values other than 0 and 1\."):
        read_tensors(data[:-1] + b"\2")


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ((b"", VALUES), r"damaged or truncated"),
        ((HEAD[:20], VALUES), r"damaged or truncated"),
        ((HEAD, VALUES[:-1]), r"damaged or truncated"),
        ((HEAD, VALUES + b".."), r"damaged or truncated"),
        ((pickle.dumps(example()), b""), r"damaged or truncated"),
        (encode(Download(WorkUnit(0), 1.0, {})), r"Expected a record of type Upload, got another type\."),
        (
            sealed(msgspec.msgpack.encode((8, "Upload", {}))),
            r"version 8 of the format; this is version 7\. Install the",
        ),
        (sealed(content()[:-1]), r"cannot be read: Input data was truncated\."),
    ],
)
def test_the_message_says_what_happened_to_the_bytes(parts: tuple[bytes, bytes], message: str) -> None:
    with pytest.raises(RecordError, match=message):
        decode(*parts, Upload)


def test_numbers_of_numpy_arrive_as_pythons_and_lists_of_options_as_tuples() -> None:
    options = {"lr": np.float32(0.1), "steps": np.int64(3), "on": np.bool_(True), "betas": [np.float64(0.9), 0.5]}
    arrived = decode(*encode(Download(WorkUnit(0), 1.0, {}, options=((options,),))), Download).options[0][0]
    assert exact(arrived) == exact({"lr": float(np.float32(0.1)), "steps": 3, "on": True, "betas": (0.9, 0.5)})


def test_what_arrives_shares_no_memory_and_is_aligned_as_torch_aligns() -> None:
    tensor = torch.arange(3.0)
    head, values = encode(Upload(WorkUnit(0), {"a": tensor, "b": tensor}))
    arrived = decode(head, values, Upload)
    tensor.zero_()
    arrived.tensors["a"].add_(1)
    assert arrived.tensors["a"].tolist() == [1, 2, 3]
    assert arrived.tensors["b"].tolist() == [0, 1, 2]
    assert all(one.data_ptr() % 64 == 0 for one in arrived.tensors.values())


def test_values_that_all_clients_get_are_the_same_bytes() -> None:
    weights = {"w": torch.randn(5), "b": torch.randn(2).half()}
    (one, values), (other, same) = (encode(Download(WorkUnit(i), 1.0, weights)) for i in range(2))
    assert values == same
    assert one != other
    assert safetensors.torch.load(values).keys() == {"0", "1"}


def test_the_format_changes_only_with_its_version() -> None:
    digest = "a786797b500f9b4ea84afcef9f0ae4ad62f4c89fb80ec831b49648a968bfb1cd"
    assert (codec.VERSION, hashlib.sha256(HEAD[32:]).hexdigest()) == (7, digest)  # raise both if records change
