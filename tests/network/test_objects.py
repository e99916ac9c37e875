"""What a device is sent once: dataclasses survive the journey, and nothing else is made or run."""

import subprocess
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from toy_models import LitMLP

import lightning_spectral as ls
from lightning_spectral.client.forms import Forms
from lightning_spectral.client.local_hooks import ProximalTerm
from lightning_spectral.errors import RecordError
from lightning_spectral.network.messages import Holding, Identity, Start, decode_object, encode_object
from lightning_spectral.protocol.object_codec import from_plain, to_plain

SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.frozensets(st.text(max_size=3), max_size=3)
        | st.dictionaries(SCALARS | st.tuples(SCALARS, SCALARS), inner, max_size=3)
    ),
)


@given(VALUES)
def test_what_is_read_is_what_was_written(value: Any) -> None:
    assert from_plain(to_plain(value)) == value


def test_arrays_classes_and_dataclasses_are_read_back() -> None:
    value = {"array": np.arange(6).reshape(2, 3), "class": torch.optim.SGD, "hook": ProximalTerm(0.3)}
    found = from_plain(to_plain(value))
    assert np.array_equal(found.pop("array"), value.pop("array"))
    assert found == value


PLAN = ls.nn.width_plan(LitMLP(), torch.zeros(2, 6))


@pytest.mark.parametrize(
    "algorithm", [ls.SpectralSharding(keep_ratio=0.5), ls.WidthSharding(keep_ratio=0.5, plan=PLAN)]
)
def test_a_device_half_gives_a_module_the_same_form(algorithm: Any) -> None:
    lit = LitMLP()
    side = algorithm.bind(lit, algorithm.new_state(lit, 0)).device_half
    read = decode_object(encode_object(Start("", side, (ProximalTerm(0.5),))), Start)
    assert read.local_hooks == (ProximalTerm(0.5),)
    shapes = []
    for half in (read.side, side):
        with Forms(lit, half.take_form).client(0.5) as client:
            shapes.append([(name, parameter.shape) for name, parameter in client.named_parameters()])
    assert shapes[0] == shapes[1]
    assert shapes[0] != [(name, parameter.shape) for name, parameter in lit.named_parameters()]


class NotADataclass:
    def __init__(self) -> None:
        raise AssertionError("it must not be made")


@dataclass(frozen=True)
class OfThisFile:
    value: int = 1


@pytest.mark.parametrize(
    "plain",
    [
        ("object", "subprocess:Popen", {"args": "true"}),
        ("object", "os:system", {"command": "true"}),
        ("object", "lightning_spectral.errors:ClientError", {}),  # no dataclass
        ("object", "lightning_spectral.client.local_hooks:ProximalTerm", {"mu": -1.0}),  # its own check
        ("object", "lightning_spectral.client.local_hooks:ProximalTerm", {"other": 1.0}),
        ("object", "lightning_spectral.client.nothing:Nothing", {}),
        ("object", "lightning_spectral.client.local_hooks:nn.Linear", {}),
        ("object", f"{__name__}:OfThisFile", {}),  # of a package that is not trusted
        ("class", "builtins:eval"),
        ("class", "subprocess:Popen"),
        ("member", "lightning_spectral.client.local_hooks:ProximalTerm", "mu"),
        ("something else", 3),
        {"a": 1},
        ("tuple", [1]),
    ],
)
def test_anything_else_is_refused(plain: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*args: Any, **options: Any) -> None:
        raise AssertionError("it must not run")

    monkeypatch.setattr(subprocess.Popen, "__init__", never)
    with pytest.raises(RecordError):
        from_plain(plain)


def test_a_trusted_package_may_be_named() -> None:
    assert from_plain(to_plain(OfThisFile(3)), trusted=[__name__.partition(".")[0]]) == OfThisFile(3)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (lambda x: x, "of type function"),
        (NotADataclass, "of type type"),
        ({"hook": object()}, r"value\['hook'\] cannot be sent to devices: it is of type object"),
    ],
)
def test_what_cannot_be_sent_is_named(value: Any, message: str) -> None:
    with pytest.raises(RecordError, match=message):
        to_plain(value)


def test_a_class_of_a_function_cannot_be_sent() -> None:
    @dataclass(frozen=True)
    class Local:
        value: int = 1

    with pytest.raises(RecordError, match="is defined in a function or a script"):
        to_plain(Local())


@given(st.binary(max_size=300), st.integers(0, 400))
def test_damaged_bytes_are_refused(noise: bytes, place: int) -> None:
    written = encode_object(Identity("ward 7", {"": Holding(80, 64, 0.5)}))
    damaged = written[:place] + noise + written[place:]
    if damaged != written:
        with pytest.raises(RecordError):
            decode_object(damaged, Identity)


def test_one_kind_is_not_taken_for_another() -> None:
    with pytest.raises(RecordError, match="Expected a record of type Start"):
        decode_object(encode_object(Identity("a", {})), Start)
