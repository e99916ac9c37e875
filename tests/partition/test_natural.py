"""Clients that the data set already has."""

from collections.abc import Hashable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_spectral.partition import NaturalPartitioner

MIXED = ["b", ("a", 1), "b", None, 3, ("a", 1)]


@pytest.mark.parametrize(
    ("keys", "names"),
    [
        (MIXED, ("b", ("a", 1), None, 3)),
        (torch.tensor([7, 5, 7]), (7, 5)),
        (np.array(["x", "y", "x"]), ("x", "y")),
        (np.array([2.5, 1.0]), (2.5, 1.0)),
    ],
)
def test_clients_are_named_in_order_of_first_appearance(keys: Any, names: tuple[Hashable, ...]) -> None:
    partitioner = NaturalPartitioner(keys)
    assert partitioner.client_names == names
    assert partitioner.num_clients == len(names)
    assert repr(partitioner) == f"NaturalPartitioner(num_clients={len(names)})"


@given(keys=st.lists(st.integers(0, 5), min_size=1, max_size=40))
def test_each_client_owns_exactly_the_examples_of_its_key(keys: list[int]) -> None:
    partitioner = NaturalPartitioner(keys)
    partition = partitioner(len(keys), None, torch.Generator())
    for name, examples in zip(partitioner.client_names, partition, strict=True):
        assert examples.tolist() == [i for i, key in enumerate(keys) if key == name]


@pytest.mark.parametrize(
    ("keys", "rule"),
    [
        ([], "at least one key"),
        (torch.zeros(2, 2), r"one-dimensional, got shape \(2, 2\)"),
        (list(torch.tensor([1, 1])), r"hashable by value, got tensor\(1\)"),
        (np.array([1.0, np.nan]), "hashable by value, got nan"),
    ],
)
def test_unusable_keys_are_refused(keys: Any, rule: str) -> None:
    with pytest.raises(ValueError, match=rule):
        NaturalPartitioner(keys)


def test_keys_of_another_data_set_are_refused() -> None:
    with pytest.raises(ValueError, match=r"one key per example \(5\), got 3"):
        NaturalPartitioner(["a", "b", "a"])(5, None, torch.Generator())


def test_several_data_sets_can_have_the_same_clients() -> None:
    names = ("romeo", "juliet", "nurse")
    one, two = (NaturalPartitioner(keys, names=names) for keys in (["nurse", "romeo", "nurse"], ["juliet"] * 3))
    assert one.client_names == two.client_names == names
    assert [part.tolist() for part in one(3, None, torch.Generator())] == [[1], [], [0, 2]]
    assert [part.tolist() for part in two(3, None, torch.Generator())] == [[], [0, 1, 2], []]


@pytest.mark.parametrize(
    ("names", "message"), [(["romeo"], "'juliet'"), (["romeo", "juliet", "romeo"], "'romeo' twice")]
)
def test_wrong_names_are_named(names: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        NaturalPartitioner(["romeo", "juliet"], names=names)
