"""Partitions, held-out examples, the simple partitioners, the contract of all, and reports."""

import random
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Generator, Tensor

from lightning_spectral.partition import (
    DirichletPartitioner,
    IIDPartitioner,
    LabelsPerClient,
    NaturalPartitioner,
    PachinkoPartitioner,
    Partition,
    Partitioner,
    ShardPartitioner,
    SizeLaw,
    hold_out,
    report,
)
from lightning_spectral.testing import check_partitioner

LABELS = torch.arange(60) % 5

PARTITIONERS = [
    IIDPartitioner(7),
    IIDPartitioner(1),
    IIDPartitioner(60),
    DirichletPartitioner(7, alpha=1.0),
    DirichletPartitioner(7, alpha=0.01),
    DirichletPartitioner(60, alpha=10.0, symmetric=True),
    PachinkoPartitioner(7, [0, 0, 1, 1, 2], alpha=1.0, beta=10.0),
    PachinkoPartitioner(60, [3, 1, 3, 1, 1], alpha=0.01, beta=0.1, symmetric=True),
    NaturalPartitioner((torch.arange(60) // 9).tolist()),
    IIDPartitioner(7, sizes=SizeLaw("lognormal", 2.0)),
    DirichletPartitioner(7, alpha=0.5, sizes=[1, 2, 3, 4, 5, 6, 300]),
    ShardPartitioner(7),
    LabelsPerClient(7, num_labels=2),
]


@pytest.mark.parametrize("partitioner", PARTITIONERS, ids=str)
def test_every_partitioner_keeps_the_contract(partitioner: Partitioner) -> None:
    check_partitioner(partitioner, 60, LABELS)


def blocks(num_examples: int, num_clients: int = 3) -> Partition:
    return Partition.from_assignment(torch.arange(num_examples) * num_clients // num_examples, num_clients)


def blocks_after(draw: Callable[[torch.Generator], object]) -> "Split":
    """A split that depends on no draw, and draws nevertheless."""

    def split(n: int, labels: Tensor | None, generator: torch.Generator) -> Partition:
        draw(generator)
        return blocks(n)

    return split


def spoiling_the_labels(n: int, labels: Tensor | None, generator: torch.Generator) -> Partition:
    if labels is not None:
        labels.zero_()
    return blocks(n)


Split = Callable[[int, Tensor | None, torch.Generator], Partition]


@pytest.mark.parametrize(
    ("split", "promise"),
    [
        (blocks_after(lambda generator: torch.rand(1, generator=generator)), "different seeds gave one and the same"),
        (blocks_after(lambda generator: torch.rand(1)), "global generators must be left"),
        (blocks_after(lambda generator: random.random()), "global generators must be left"),
        (blocks_after(lambda generator: np.random.rand()), "global generators must be left"),
        (lambda n, *_: Partition.from_assignment(torch.arange(n) % 2, 3), "a client has no examples"),
        (lambda *_: Partition.from_lists([[0, 1], [1, 2], [3]]), "an example is used twice"),
        (lambda n, *_: Partition.from_lists([[0], [1], [n]]), "an index is beyond the data set"),
        (lambda n, *_: blocks(n, 2), "`num_clients` is not that of the split"),
        (
            lambda n, y, _: Partition.from_assignment((torch.arange(n) if y is None else y) % 3, 3),
            "the labels change the split",
        ),
        (spoiling_the_labels, "the labels must be left"),
    ],
)
def test_contract_refuses_a_partitioner_that_breaks_it(split: Split, promise: str) -> None:
    class Broken(Partitioner):
        num_clients = 3

        def split(self, num_examples: int, labels: Tensor | None, generator: torch.Generator) -> Partition:
            return split(num_examples, labels, generator)

    with pytest.raises(AssertionError, match=promise):
        check_partitioner(Broken(), 60, LABELS.clone())


def test_contract_refuses_a_false_claim_to_need_labels() -> None:
    @dataclass(frozen=True)
    class Claims(IIDPartitioner):
        needs_labels: ClassVar[bool] = True

        def __call__(self, num_examples: int, labels: Tensor | None, generator: torch.Generator) -> Partition:
            return self.split(num_examples, labels, generator)

    with pytest.raises(AssertionError, match="missing labels raise no ValueError"):
        check_partitioner(Claims(3), 60, LABELS)


def concentrations() -> st.SearchStrategy[float]:
    return st.floats(-300.0, 12.0).map(lambda power: 10.0**power)


@settings(max_examples=75, deadline=None)
@given(
    labels=st.lists(st.integers(0, 5), min_size=1, max_size=60),
    share=st.floats(0.0, 1.0),
    make=st.one_of(
        st.just(IIDPartitioner),
        st.builds(partial, st.just(DirichletPartitioner), alpha=concentrations(), symmetric=st.booleans()),
        st.builds(
            partial,
            st.just(PachinkoPartitioner),
            superclasses=st.lists(st.integers(-3, 3), min_size=6, max_size=6),
            alpha=concentrations(),
            beta=concentrations(),
            symmetric=st.booleans(),
        ),
    ),
    seed=st.integers(0, 2**31),
)
def test_every_example_is_used_once_and_sizes_differ_by_at_most_one(labels, share, make, seed):
    n = len(labels)
    num_clients = 1 + int(share * (n - 1))
    partition = make(num_clients)(n, torch.tensor(labels), torch.Generator().manual_seed(seed))
    assert sorted(partition.indices.tolist()) == list(range(n))
    assert int(partition.sizes.max() - partition.sizes.min()) == (1 if n % num_clients else 0)


def test_iid_gives_every_example_to_every_client_equally_often() -> None:
    num_seeds, owners = 1000, torch.zeros(4, 2)
    for seed in range(num_seeds):
        partition = IIDPartitioner(2)(4, None, torch.Generator().manual_seed(seed))
        owners[partition[0], 0] += 1
        owners[partition[1], 1] += 1
    assert ((owners / num_seeds - 0.5).abs() <= 5.0 * 0.5 / num_seeds**0.5).all()


@settings(max_examples=50, deadline=None)
@given(rows=st.lists(st.lists(st.integers(0, 99), max_size=5), min_size=1, max_size=8))
def test_rows_come_back_as_they_went_in(rows: list[list[int]]) -> None:
    partition = Partition.from_lists(rows)
    assert [row.tolist() for row in partition] == rows
    assert partition.sizes.tolist() == [len(row) for row in rows]
    assert (len(partition), partition.num_assigned) == (len(rows), sum(map(len, rows)))


@settings(max_examples=50, deadline=None)
@given(owner=st.lists(st.integers(-1, 4), min_size=0, max_size=30))
def test_assignment_groups_examples_by_owner(owner: list[int]) -> None:
    partition = Partition.from_assignment(torch.tensor(owner, dtype=torch.int64), num_clients=5)
    expected = [[i for i, client in enumerate(owner) if client == c] for c in range(5)]
    assert [row.tolist() for row in partition] == expected


def test_a_clients_examples_are_a_view() -> None:
    partition = Partition.from_lists([[3], [1, 2]])
    assert partition[1].data_ptr() == partition.indices[1:].data_ptr()


def test_a_million_clients_fit_in_two_tensors() -> None:
    partition = Partition.from_assignment(torch.arange(1_000_000), 1_000_000)
    assert partition.indices.nbytes + partition.offsets.nbytes <= 16_000_008
    assert partition[999_999].tolist() == [999_999]


def test_fingerprint_tells_splits_apart_and_is_stable() -> None:
    splits = [[[0, 1], [2]], [[0], [1, 2]], [[1, 0], [2]], [[0, 1], [2], []], [[], [0, 1], [2]], [[0, 1, 2]]]
    fingerprints = [Partition.from_lists(split).fingerprint for split in splits]
    assert len(set(fingerprints)) == len(splits)
    assert fingerprints[0] == "e57d6bc5dc5056e6"  # hashlib.blake2b(digest_size=8) of int64 LE: 2, 0 2 3, 0 1 2


def record(indices: list[float], offsets: Any) -> Partition:
    return Partition(torch.tensor(indices), torch.tensor(offsets))


def by_class(labels: Tensor | None) -> Partition:
    return DirichletPartitioner(2, 1.0)(4, labels, torch.Generator())


@pytest.mark.parametrize(
    ("make", "rule"),
    [
        (lambda: record([0.0], [0, 1]), "`indices` must be a one-dimensional int64"),
        (lambda: record([0], [[0, 1]]), "`offsets` must be a one-dimensional int64"),
        (lambda: record([0], [0]), "at least one client"),
        (lambda: record([0, 1], [0, 1]), "must rise from 0"),
        (lambda: record([0, 1], [1, 2]), "must rise from 0"),
        (lambda: record([0, 1], [0, 2, 1, 2]), "must rise from 0"),
        (lambda: record([-1], [0, 1]), "must be >= 0, got -1"),
        (lambda: Partition.from_lists([[0], [1]])[-1], r"must be in \[0, num_clients=2\), got"),
        (lambda: Partition.from_lists([[0], [1]])[2], r"must be in \[0, num_clients=2\), got"),
        (lambda: Partition.from_assignment(torch.tensor([0, 2]), num_clients=2), r"must be in \[0, num_clients=2\)"),
        (lambda: Partition.from_assignment(torch.tensor([-2, 0]), num_clients=2), r"must be in \[0, num_clients=2\)"),
        (lambda: IIDPartitioner(5)(4, None, torch.Generator()), r"IIDPartitioner\(num_clients=5\) needs at least one"),
        (lambda: by_class(None), "pass labels="),
        (lambda: by_class(torch.zeros(3, dtype=torch.long)), r"shape \(4,\), got \(3,\)"),
        (lambda: by_class(torch.zeros(4, 1, dtype=torch.long)), r"shape \(4,\), got \(4, 1\)"),
        (lambda: by_class(torch.zeros(4)), "must be integers, got torch.float32"),
        (lambda: IIDPartitioner(0), "`num_clients` must be at least 1, got 0"),
        (lambda: DirichletPartitioner(0, alpha=1.0), "`num_clients` must be at least 1, got 0"),
        (lambda: NaturalPartitioner([]), "at least one key"),
        (lambda: NaturalPartitioner(torch.zeros(2, 2)), r"one-dimensional, got shape \(2, 2\)"),
        (lambda: NaturalPartitioner(list(torch.tensor([1, 1]))), r"hashable by value, got tensor\(1\)"),
        (lambda: NaturalPartitioner(np.array([1.0, np.nan])), "hashable by value, got nan"),
        (lambda: NaturalPartitioner([[1], [2]]), r"hashable by value, got \[1\]"),
        (lambda: NaturalPartitioner(["a", "b", "a"])(5, None, torch.Generator()), r"one key per example \(5\), got 3"),
        (lambda: NaturalPartitioner(["romeo", "juliet"], names=["romeo"]), "'juliet'"),
        (lambda: NaturalPartitioner(["romeo"], names=["romeo", "juliet", "romeo"]), "'romeo' twice"),
        (lambda: hold_out(record([0], [0, 1]), -0.1, torch.Generator()), r"must be in \[0, 1\), got"),
        (lambda: hold_out(record([0], [0, 1]), 1.0, torch.Generator()), r"must be in \[0, 1\), got"),
        (lambda: hold_out(record([0], [0, 1]), float("nan"), torch.Generator()), r"must be in \[0, 1\), got"),
        (lambda: report(record([0, 1], [0, 2]), torch.tensor([1])), "one class index per example"),
    ],
)
def test_what_cannot_be_split_is_refused(make: Callable[[], Any], rule: str) -> None:
    with pytest.raises((ValueError, IndexError), match=rule):
        make()


def seeded(seed: int = 0) -> Generator:
    return torch.Generator().manual_seed(seed)


@pytest.fixture
def whole() -> Partition:
    """Clients with 0 to 60 examples whose ids are scattered."""
    sizes = [0, 1, 2, 3, 10, 25, 60]
    return Partition.from_lists(list(torch.randperm(sum(sizes), generator=seeded()).split(sizes)))


STRATA = pytest.mark.parametrize("labels", [None, torch.arange(101) % 4 // 2 * 7], ids=["of all", "of each class"])


@STRATA
@pytest.mark.parametrize(("fraction", "expected"), [(0.1, [0, 0, 1, 1, 1, 2, 6]), (0.9, [0, 0, 1, 2, 9, 22, 54])])
def test_every_example_is_trained_on_or_held_out(fraction: float, expected: Any, whole: Partition, labels: Any) -> None:
    training, held_out = hold_out(whole, fraction, seeded(), labels)
    assert held_out.sizes.tolist() == expected
    for mine, out in zip(whole, held_out, strict=True) if labels is not None else ():
        share = len(out) / max(len(mine), 1)
        assert all(abs((labels[out] == label).sum() - share * (labels[mine] == label).sum()) < 1 for label in (0, 7))
    for mine, kept, out in zip(whole, training, held_out, strict=True):
        assert sorted([*kept.tolist(), *out.tolist()]) == sorted(mine.tolist())
        places = [mine.tolist().index(example) for example in kept.tolist()]
        assert places == sorted(places)  # in their original order


@STRATA
def test_every_example_of_a_client_is_as_likely_to_be_held_out(whole: Partition, labels: Any) -> None:
    generator, draws = seeded(), 500
    counts = torch.zeros(whole.num_assigned)
    for _ in range(draws):
        counts[hold_out(whole, 0.2, generator, labels)[1].indices] += 1
    for examples, expected in zip(whole, (0, 0, 1 / 2, 1 / 3, 2 / 10, 5 / 25, 12 / 60), strict=True):
        five_sigma = 5 * (expected * (1 - expected) / draws) ** 0.5
        assert ((counts[examples] / draws - expected).abs() <= five_sigma).all()


def test_nothing_held_out_leaves_the_partition_and_the_generator_as_they_are(whole: Partition) -> None:
    generator = seeded()
    training, held_out = hold_out(whole, 0.0, generator)
    assert training is whole
    assert held_out.sizes.tolist() == [0] * 7
    assert torch.equal(generator.get_state(), seeded().get_state())


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


def test_several_data_sets_can_have_the_same_clients() -> None:
    names = ("romeo", "juliet", "nurse")
    one, two = (NaturalPartitioner(keys, names=names) for keys in (["nurse", "romeo", "nurse"], ["juliet"] * 3))
    assert one.client_names == two.client_names == names
    assert [part.tolist() for part in one(3, None, torch.Generator())] == [[1], [], [0, 2]]
    assert [part.tolist() for part in two(3, None, torch.Generator())] == [[], [0, 1, 2], []]


SEVENS = torch.tensor([3, 3, 7, 3, 9, 7])
PARTITION = Partition.from_lists([[0, 1, 2], [4], [], [5, 3]])


def test_histogram_counts_each_client_and_class() -> None:
    seen = report(PARTITION, SEVENS)
    assert seen.classes is not None
    assert seen.histogram is not None
    assert seen.classes.tolist() == [3, 7, 9]
    assert seen.histogram.tolist() == [[2, 1, 0], [0, 0, 1], [0, 0, 0], [1, 1, 0]]
    assert seen.counts.tolist() == [3, 1, 0, 2]


def test_mean_classes_counts_shares_above_the_threshold() -> None:
    seen = report(PARTITION, SEVENS)
    assert seen.mean_classes() == (2 + 1 + 0 + 2) / 4
    assert seen.mean_classes(0.4) == (1 + 1 + 0 + 2) / 4
    assert seen.mean_classes(0.5) == (1 + 1 + 0 + 0) / 4


def test_long_tables_are_cut() -> None:
    text = str(report(IIDPartitioner(40)(400, None, torch.Generator().manual_seed(0)), torch.arange(400) % 9))
    assert text.startswith("40 clients, 400 examples; 10 / 10 / 10 examples per client")
    assert text.endswith("... and 30 more clients")
    assert max(map(len, text.splitlines())) <= 110


def test_names_of_clients_are_reported_and_stay_with_held_out_examples() -> None:
    partition = NaturalPartitioner(["Bologna", "Ulm", "Ulm", "Bologna", "Graz"])(5, None, seeded())
    training, held_out = hold_out(partition, 0.5, seeded())
    assert training.names == held_out.names == ("Bologna", "Ulm", "Graz")
    rows = str(report(partition, torch.tensor([0, 0, 1, 0, 1]))).splitlines()
    assert [row.split() for row in rows[-4:]] == [
        ["client", "name", "examples", "classes"],
        ["0", "Bologna", "2", "0:", "2"],
        ["1", "Ulm", "2", "0:", "1,", "1:", "1"],
        ["2", "Graz", "1", "1:", "1"],
    ]
    assert "name" not in str(report(NaturalPartitioner([0, 1, 1])(3, None, seeded())))


def test_report_without_labels_has_sizes_only() -> None:
    seen = report(PARTITION)
    assert (seen.histogram, seen.classes) == (None, None)
    assert "classes" not in str(seen)
    with pytest.raises(ValueError, match="made without labels"):
        seen.mean_classes()


@pytest.mark.parametrize("labels", [SEVENS, None])
def test_bars_stack_to_the_sizes(labels: torch.Tensor | None, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    seen = report(PARTITION, labels)
    axes = seen.plot(tmp_path / "split.png")
    assert (tmp_path / "split.png").stat().st_size > 0
    tops = [max(bar.get_y() + bar.get_height() for bar in column) for column in zip(*axes.containers, strict=True)]
    assert tops == seen.counts.tolist()


def test_plot_draws_on_the_axes_it_is_given() -> None:
    figure = pytest.importorskip("matplotlib.figure").Figure()
    axes = figure.subplots()
    named = replace(PARTITION, names=["Ulm", "Graz", "Bern", "Wien"])
    assert report(named, SEVENS).plot(axes) is axes
    assert [tick.get_text() for tick in axes.get_xticklabels()] == named.names
    assert len(axes.patches) == 3 * 4
