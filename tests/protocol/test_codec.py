"""Records as bytes: what is read is what was written, bit for bit, and anything else is refused in our words."""

import hashlib
import json
import math
import pickle
import struct
from dataclasses import fields, replace
from typing import Any, get_args

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from lightning_spectral.errors import RecordError
from lightning_spectral.protocol import codec
from lightning_spectral.protocol.codec import decode, encode
from lightning_spectral.protocol.exclusion import ExclusionReason
from lightning_spectral.protocol.records import Download, Failure, LoggedValue, Upload
from lightning_spectral.protocol.tensor_bytes import DTYPES, raw_bytes
from lightning_spectral.protocol.work_unit import WorkUnit

NAMES = st.text(st.characters(), max_size=8)  # of all characters, surrogates too
FLOATS = st.floats(width=64)
NUMBERS = st.one_of(st.booleans(), st.integers(), st.integers(-(2**200), 2**200), FLOATS)
WHOLE = st.integers(0, 2**70)


@st.composite
def tensors(draw: Any) -> Tensor:
    """Any values, i.e. any bits, of any type and shape, also if they do not lie one after another in memory."""
    shape, dtype = draw(st.lists(st.integers(0, 4), max_size=3)), DTYPES[draw(st.sampled_from(sorted(DTYPES)))]
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
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.frozensets(NAMES, max_size=3),
        st.dictionaries(st.one_of(NAMES, st.integers(), st.tuples(NAMES, st.booleans())), inner, max_size=3),
    ),
    max_leaves=6,
)
UNITS = st.builds(WorkUnit, WHOLE, NAMES, st.one_of(WHOLE, FLOATS))
DOWNLOADS = st.builds(
    Download,
    unit=UNITS,
    capacity=st.one_of(FLOATS, WHOLE),
    tensors=mappings(tensors(), 4),
    round_idx=WHOLE,
    local_epochs=WHOLE,
    options=st.lists(st.lists(mappings(PLAIN), max_size=2).map(tuple), max_size=2).map(tuple),
    seed=st.integers(),
    frozen=mappings(NAMES),
    held=st.frozensets(NAMES, max_size=3),
)
UPLOADS = st.builds(
    Upload,
    unit=UNITS,
    tensors=mappings(tensors(), 4),
    num_steps=WHOLE,
    loss=FLOATS,
    logged=mappings(st.builds(LoggedValue, FLOATS, st.booleans(), st.booleans())),
    left_out=st.sampled_from([None, *get_args(ExclusionReason)]),
    failure=st.none() | st.builds(Failure, NAMES, NAMES),
    seconds=mappings(FLOATS),
    unreached=st.none() | st.lists(NAMES, max_size=3).map(tuple),
    untrained_rows=mappings(tensors()),
    discarded=st.lists(NAMES, max_size=3).map(tuple),
    missing=st.lists(NAMES, max_size=3).map(tuple),
    put_back=st.lists(NAMES, max_size=3).map(tuple),
)


def exact(value: Any) -> Any:
    """Something that is equal exactly if two values have the same types, bits and order."""
    if isinstance(value, Tensor):
        return value.dtype, tuple(value.shape), raw_bytes(value).tobytes()
    if isinstance(value, float):
        return struct.pack(">d", value)
    if isinstance(value, tuple | list):
        return type(value), [exact(inner) for inner in value]
    if isinstance(value, dict):
        return [(exact(key), exact(inner)) for key, inner in value.items()]
    if isinstance(value, Download | Upload | Failure | LoggedValue):
        return type(value), [exact(getattr(value, field.name)) for field in fields(value) if field.name != "cause"]
    return type(value), value


@given(DOWNLOADS)
def test_a_download_is_read_as_it_was_written(download: Download) -> None:
    travelled = decode(encode(download), Download)
    assert exact(travelled) == exact(replace(download, tensors=dict(download.travelling)))
    assert (travelled.num_bytes, travelled.frozen_bytes) == (download.num_bytes, download.frozen_bytes)
    assert encode(travelled) == encode(download)


@given(UPLOADS)
def test_an_upload_is_read_as_it_was_written(upload: Upload) -> None:
    travelled = decode(encode(upload), Upload)
    assert exact(travelled) == exact(upload)
    assert encode(travelled) == encode(upload)


def example() -> Upload:
    """With a bit of everything."""
    return Upload(
        WorkUnit(3, "words", 80),
        {"weight": torch.tensor([[1.5, -0.0], [math.nan, math.inf]]), "bits": torch.tensor([7], dtype=torch.uint8)},
        num_steps=2**70,
        logged={"acc": LoggedValue(0.5, True, False)},
        failure=Failure("loading", "no, nö"),
        seconds={"load": 0.25, "train": 1e-300},
        unreached=("net.0",),
        untrained_rows={"weight": torch.tensor([1])},
    )


WRITTEN = encode(example())


@given(st.data())
def test_damaged_bytes_are_refused_in_our_words(data: Any) -> None:
    written, damaged = WRITTEN, bytearray(WRITTEN)
    for _ in range(data.draw(st.integers(1, 3), "number of changes")):
        at = data.draw(st.integers(0, len(damaged)), "at")
        match data.draw(st.sampled_from(["flip", "cut", "insert", "drop"]), "change"):
            case "flip":
                damaged[at : at + 1] = bytes(byte ^ data.draw(st.integers(1, 255)) for byte in damaged[at : at + 1])
            case "cut":
                del damaged[at:]
            case "insert":
                damaged[at:at] = data.draw(st.binary(min_size=1, max_size=20))
            case "drop":
                del damaged[at : at + data.draw(st.integers(1, 20))]
    if damaged == written:
        assert exact(decode(damaged, Upload)) == exact(example())
    else:
        with pytest.raises(RecordError, match=r"^(The record|These bytes) .*\.$"):
            decode(damaged, Upload)


def test_every_flipped_bit_is_noticed() -> None:
    for bit in range(8 * len(WRITTEN)):
        damaged = bytearray(WRITTEN)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(RecordError):
            decode(damaged, Upload)


@given(st.binary(max_size=200))
def test_any_bytes_are_refused(data: bytes) -> None:
    for whole in (data, codec.MAGIC + data, forged(data), forged(b"{" + data + b"}")):
        with pytest.raises(RecordError):
            decode(whole, Upload)


def forged(plain: bytes, values: bytes = b"", version: int = codec.VERSION) -> bytes:
    """Bytes with a valid header, as somebody might send who knows the format."""
    prefix = struct.pack("<8sHQQ", codec.MAGIC, version, len(plain), len(values))
    return prefix + hashlib.sha256(prefix + plain + values).digest() + plain + values


def content(data: bytes = WRITTEN) -> dict[str, Any]:
    """The plain data of a record."""
    (num_plain,) = struct.unpack_from("<Q", data, 10)
    written: dict[str, Any] = json.loads(data[58 : 58 + num_plain])
    return written


JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-2, 3), st.floats(), NAMES, st.just("0xff")),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["int", "float", "tensor", "tuple", "frozenset", "dict", "?"]), inner, max_size=2
        )
    ),
    max_leaves=6,
)


@given(st.data())
def test_forged_plain_data_is_refused_or_makes_a_record_of_the_right_types(data: Any) -> None:
    written = content()
    place: Any = written
    while isinstance(place, list | dict) and place and data.draw(st.booleans(), "deeper"):
        outer, key = place, data.draw(st.sampled_from(list(place) if isinstance(place, dict) else range(len(place))))
        place = outer[key]
    if place is not written:
        outer[key] = data.draw(JSON, "instead")
    values = WRITTEN[-sum(tensor.numel() * tensor.element_size() for tensor in example_tensors()) :]
    try:
        upload = decode(forged(json.dumps(written).encode(), values), Upload)
    except RecordError:
        return
    assert exact(decode(encode(upload), Upload)) == exact(upload)  # it is one that could have been written


def example_tensors() -> list[Tensor]:
    upload = example()
    return [*upload.tensors.values(), *upload.untrained_rows.values()]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tensors": [["float32", [2**40]]]}, r"tensors need 4398046511104 bytes by their shapes, but have 0\."),
        ({"tensors": [["float32", [-1]]]}, r"describes a tensor by something else than a type and a shape"),
        ({"tensors": [["float32", [0, 2**40, 2**40]]]}, r"describes a tensor by something else"),
        ({"tensors": [["float32", 65 * [1]]]}, r"describes a tensor by something else"),
        ({"tensors": [["float3", [1]]]}, r"a tensor of the type 'float3', which torch [0-9.+a-z]+ lacks"),
        ({"tensors": 7}, r"has no list of its tensors"),
        ({"tensors": []}, r"Upload\[1\]\[1\] cannot be read: records hold no such value\."),
        ({"record": "Download"}, r"Expected a record of type Upload, got another type\."),
        ({"byteorder": "middle"}, r"not little-endian, unlike this one"),
        ({"fields": {"dict": []}}, r"Upload must be of type Upload, got a value of type dict\."),
        ({"more": 1}, r"does not say what it holds"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_allocated(change: dict[str, Any], message: str) -> None:
    with pytest.raises(RecordError, match=message):
        decode(forged(json.dumps({**content(), "tensors": [], **change}).encode()), Upload)


def test_boolean_tensors_hold_no_other_values() -> None:
    written = content(encode(Upload(WorkUnit(0), {"mask": torch.tensor([True])})))
    assert decode(forged(json.dumps(written).encode(), b"\1"), Upload).tensors["mask"].tolist() == [True]
    with pytest.raises(RecordError, match=r"Boolean tensor with values other than 0 and 1\."):
        decode(forged(json.dumps(written).encode(), b"\2"), Upload)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("loss", "low", r"Upload\.loss must be of type float, got a value of type str\."),
        ("num_steps", True, r"Upload\.num_steps must be of type int, got a value of type bool\."),
        ("left_out", "tired", r"Upload\.left_out must be one of 'error', .*'surplus', got a value of type str\."),
        ("unit", (3,), r"Upload\.unit must be of type WorkUnit, got a value of type tuple\."),
        ("unit", (3, 4, 5), r"Upload\.unit\.model must be of type str, got a value of type int\."),
        ("tensors", {"weight": 1.0}, r"Upload\.tensors\['weight'\] must be of type Tensor"),
        ("tensors", {1: torch.zeros(1)}, r"a key of Upload\.tensors must be of type str"),
        ("logged", {"acc": {"value": 1.0}}, r"Upload\.logged\['acc'\] must be of type LoggedValue"),
        ("discarded", ["net.0"], r"Upload\.discarded must be of type tuple, got a value of type list\."),
    ],
)
def test_fields_of_the_wrong_type_are_refused(field: str, value: Any, message: str) -> None:
    with pytest.raises(RecordError, match=message):
        decode(encode(replace(example(), **{field: value})), Upload)


def deep(levels: int) -> Any:
    return [deep(levels - 1)] if levels else []


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (print, r"Download\.options\[0\]\[0\]\['x'\] cannot be sent: it is of type builtin_function_or_method\."),
        ({"y": {1}}, r"\['x'\]\['y'\] cannot be sent: it is of type set\. Records hold numbers, text and tensors"),
        (torch.zeros(2).to_sparse(), r"\['x'\] cannot be sent: it is not a dense tensor .* torch\.sparse_coo"),
        (torch.zeros(2, device="meta"), r"not a dense tensor of a standard type, but .* on device meta"),
        (deep(40), r"is nested too deeply: a record has at most 32 levels\."),
        (codec.MOST_PLAIN_BYTES * "x", r"Download holds \d+ bytes besides its tensors; at most 16777216 are sent\."),
    ],
    ids=["function", "set", "sparse", "meta", "deep", "long"],
)
def test_what_cannot_be_sent_is_named(value: Any, message: str) -> None:
    with pytest.raises(RecordError, match=message):
        encode(Download(WorkUnit(0), 1.0, {}, options=(({"x": value},),)))


def test_deep_and_long_plain_data_is_refused() -> None:
    nested = {**content(), "fields": deep(40)}
    with pytest.raises(RecordError, match="is nested too deeply: a record has at most 32 levels"):
        decode(forged(json.dumps(nested).encode(), b"\0" * 25), Upload)
    with pytest.raises(RecordError, match="is not JSON, or is nested too deeply"):
        decode(forged(100_000 * b"["), Upload)
    with pytest.raises(RecordError, match=r"holds 16777217 bytes besides its tensors; at most 16777216 are read"):
        decode(forged(bytes(2**24 + 1)), Upload)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", r"is truncated: 0 bytes arrived of a header of 58\."),
        (WRITTEN[:20], r"is truncated: 20 bytes arrived of a header of 58\."),
        (WRITTEN[:-1], rf"is truncated: {len(WRITTEN) - 1} of {len(WRITTEN)} bytes arrived\."),
        (WRITTEN + b"..", rf"has 2 bytes too many; it ends after {len(WRITTEN)}\."),
        (WRITTEN[:-1] + b"x", r"is damaged: its checksum does not match\."),
        (forged(b"", version=3), r"was written by version 3 of the format; this is version 2\. Install the same"),
        (pickle.dumps(example()), r"These bytes are not a record of lightning_spectral\."),
    ],
    ids=["empty", "header", "body", "tail", "flip", "version", "pickle"],
)
def test_the_message_says_what_happened_to_the_bytes(data: bytes, message: str) -> None:
    with pytest.raises(RecordError, match=message):
        decode(data, Upload)


def test_numbers_of_numpy_arrive_as_pythons() -> None:
    options = {"lr": np.float32(0.1), "steps": np.int64(3), "on": np.bool_(True), "betas": (np.float64(0.9), 0.5)}
    arrived = decode(encode(Download(WorkUnit(0), 1.0, {}, options=((options,),))), Download).options[0][0]
    assert exact(arrived) == exact({"lr": float(np.float32(0.1)), "steps": 3, "on": True, "betas": (0.9, 0.5)})


def test_what_arrives_shares_no_memory() -> None:
    tensor = torch.arange(3.0)
    data = bytearray(encode(Upload(WorkUnit(0), {"a": tensor, "b": tensor})))
    arrived = decode(data, Upload)
    tensor.zero_()
    data[-12:] = bytes(12)
    arrived.tensors["a"].add_(1)
    assert arrived.tensors["a"].tolist() == [1, 2, 3]
    assert arrived.tensors["b"].tolist() == [0, 1, 2]


def test_the_format_changes_only_with_its_version() -> None:
    digest = "23c9d8b9f2cbd71635bbfd29533a7ac484a3ac2320ba192f1f2e1b4dbf1038da"
    assert (codec.VERSION, hashlib.sha256(WRITTEN).hexdigest()) == (2, digest)  # raise both if records change
