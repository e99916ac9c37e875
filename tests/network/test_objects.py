"""What a device is sent once: dataclasses survive the journey, and nothing else is made or run."""

import subprocess
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from toy_models import LitMLP

import lightning_spectral as ls
from lightning_spectral.client.device import Instructions
from lightning_spectral.client.forms import Forms
from lightning_spectral.client.local_hooks import ProximalTerm
from lightning_spectral.errors import RecordError
from lightning_spectral.network.messages import Start
from lightning_spectral.network.objects import read_object, write_object

INTEGERS = st.integers(-(2**63), 2**63 - 1)
SCALARS = st.none() | st.booleans() | INTEGERS | st.floats(allow_nan=False) | st.text(max_size=5)
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
    assert read_object(write_object(value), object) == value


def test_tensors_arrays_classes_and_dataclasses_are_read_back() -> None:
    value = {"array": np.arange(6).reshape(2, 3), "class": torch.optim.SGD, "hook": ProximalTerm(0.3)}
    value["tensor"] = torch.tensor([1.0, 2.0])
    found = read_object(write_object(value), dict)
    assert np.array_equal(found.pop("array"), value.pop("array"))
    assert torch.equal(found.pop("tensor"), value.pop("tensor"))
    assert found == value


PLAN = ls.nn.width_plan(LitMLP(), torch.zeros(2, 6))


@pytest.mark.parametrize(
    "algorithm", [ls.SpectralSharding(keep_ratio=0.5), ls.WidthSharding(keep_ratio=0.5, plan=PLAN)]
)
def test_a_device_half_gives_a_module_the_same_form(algorithm: Any) -> None:
    lit = LitMLP()
    side = algorithm.bind(lit, algorithm.new_state(lit, 0)).client_side
    read = read_object(write_object(Start("", Instructions(side), (ProximalTerm(0.5),))), Start)
    assert read.local_hooks == (ProximalTerm(0.5),)
    shapes = []
    for half in (read.instructions.side, side):
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
        ("tensor", b"no safetensors"),
        ("mapping", [1, 2]),
        ("frozenset", [("list", [])]),
        ("something else", 3),
        {"a": 1},
        ("tuple", 1),
    ],
)
def test_anything_else_is_refused(plain: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*args: Any, **options: Any) -> None:
        raise AssertionError("it must not run")

    monkeypatch.setattr(subprocess.Popen, "__init__", never)
    with pytest.raises(RecordError):
        read_object(msgspec.msgpack.encode(plain), object)


def test_a_trusted_package_may_be_named() -> None:
    assert read_object(write_object(OfThisFile(3)), OfThisFile, trusted=[__name__.partition(".")[0]]) == OfThisFile(3)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (lambda x: x, "of type function"),
        (NotADataclass, "of type type"),
        ({"hook": object()}, r"dict\['hook'\] cannot be sent to devices: it is of type object"),
    ],
)
def test_what_cannot_be_sent_is_named(value: Any, message: str) -> None:
    with pytest.raises(RecordError, match=message):
        write_object(value)


def test_a_class_of_a_function_cannot_be_sent() -> None:
    @dataclass(frozen=True)
    class Local:
        value: int = 1

    with pytest.raises(RecordError, match="is defined in a function or a script"):
        write_object(Local())


@given(st.binary(max_size=300))
def test_other_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(RecordError):
        read_object(data, Start)


def test_one_kind_is_not_taken_for_another() -> None:
    with pytest.raises(RecordError, match="Expected an object of type Start, got a ProximalTerm"):
        read_object(write_object(ProximalTerm(0.5)), Start)
