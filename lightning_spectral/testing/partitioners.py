"""The contract of a partitioner, in executable form."""

import random
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_spectral.errors import check_is
from lightning_spectral.partition.partition import Partition, Partitioner

__all__ = ["check_partitioner"]

_SEEDS = range(8)


def check_partitioner(partitioner: Partitioner, num_examples: int, labels: Tensor | None = None) -> None:
    """Check that a partitioner satisfies its contract on one data set.

    This checks that no client is empty, every example is used at most once and indices are in range; that the same
    generator gives the same split, and other seeds give another one unless the partitioner draws nothing or has one
    client; that the global generators and the labels are left unchanged; and that labels are required if and only if
    they are needed.

    Args:
        partitioner: The partitioner.
        num_examples: Number of examples; enough that two random splits are unlikely to coincide.
        labels: Class of each example, integers, shape ``(num_examples,)``; may be ``None`` if they are not
            needed.

    Example:
        >>> from lightning_spectral.partition import IIDPartitioner
        >>> check_partitioner(IIDPartitioner(num_clients=3), num_examples=20)
    """
    check_is("partitioner", partitioner, Partitioner)
    generator = torch.Generator().manual_seed(_SEEDS[0])
    start, global_states = generator.get_state(), _global_states()
    labels_before = None if labels is None else labels.clone()
    first = partitioner(num_examples, labels, generator)
    is_random = not torch.equal(start, generator.get_state())

    assert _global_states() == global_states, "the global generators must be left as they were"
    if labels is not None and labels_before is not None:
        assert torch.equal(labels, labels_before), "the labels must be left as they were"
    _check_labels_use(partitioner, num_examples, labels, first)

    fingerprints = set()
    for seed in _SEEDS:
        partition = _split(partitioner, num_examples, labels, seed)
        _check_partition(partitioner, partition, num_examples, seed)
        again = _split(partitioner, num_examples, labels, seed)
        assert partition.fingerprint() == again.fingerprint(), f"seed {seed} must give the same split twice"
        fingerprints.add(partition.fingerprint())
    if not is_random:
        assert len(fingerprints) == 1, "the split changes without a draw from the generator"
    elif first.num_clients > 1:
        assert len(fingerprints) > 1, f"{len(_SEEDS)} different seeds gave one and the same split"


def _split(partitioner: Partitioner, num_examples: int, labels: Tensor | None, seed: int) -> Partition:
    return partitioner(num_examples, labels, torch.Generator().manual_seed(seed))


def _check_partition(partitioner: Partitioner, partition: Partition, num_examples: int, seed: int) -> None:
    context = f"(seed {seed})"
    assert partition.num_clients == partitioner.num_clients, f"`num_clients` is not that of the split {context}"
    assert bool((partition.sizes > 0).all()), f"a client has no examples {context}"
    assert int(partition.indices.min()) >= 0, f"an index is negative {context}"
    assert int(partition.indices.max()) < num_examples, f"an index is beyond the data set {context}"
    assert len(set(partition.indices.tolist())) == partition.num_assigned, f"an example is used twice {context}"


def _check_labels_use(partitioner: Partitioner, num_examples: int, labels: Tensor | None, expected: Partition) -> None:
    """Check that ``needs_labels`` is true if and only if the split uses the labels."""
    try:
        without = _split(partitioner, num_examples, None, _SEEDS[0])
    except ValueError:
        assert partitioner.needs_labels, "`needs_labels` is False, but the split refuses to work without labels"
        return
    assert not partitioner.needs_labels, "`needs_labels` is True, but missing labels raise no ValueError"
    assert without.fingerprint() == expected.fingerprint(), "`needs_labels` is False, but the labels change the split"


def _global_states() -> tuple[Any, ...]:
    """States of the global generators of Python, numpy and torch, comparable with ``==``."""
    name, keys, *rest = np.random.get_state(legacy=True)
    return random.getstate(), name, np.asarray(keys).tobytes(), rest, torch.get_rng_state().numpy().tobytes()
