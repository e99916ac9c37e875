"""FederatedDataModule: a data set, dealt to clients."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from lightning_spectral.arguments import Number, Whole, flag
from lightning_spectral.client.batches import BatchSource, ClientData, Collate, examples_per_epoch
from lightning_spectral.partition import (
    Labels,
    Partition,
    Partitioner,
    PartitionReport,
    class_indices,
    dataset_labels,
    hold_out,
    labels_in_examples,
    report,
)
from lightning_spectral.plugin.data.checks import check_collate, check_dealt, dataset_length
from lightning_spectral.plugin.data.server_data import EvaluationData, ServerData
from lightning_spectral.plugin.lightning.fixed_arguments import FixedArguments
from lightning_spectral.protocol.per_client import Assigned
from lightning_spectral.protocol.records import Download
from lightning_spectral.protocol.rng import derived_generator, derived_seed, isolated_rng
from lightning_spectral.server.client_directory import ClientDirectory


class FederatedDataModule(FixedArguments, ServerData):
    """Deals the examples of a training set to clients; evaluation data stays whole, at the server.

    Args:
        train: Any map-style data set, including those of Hugging Face (``with_format("torch")``).
        partitioner: Decides which examples belong to which client.
        val: Validation data: a data set, which may be a list of examples, a dataloader of your own, or a list of these.
        test: Test data, likewise.
        batch_size: Examples per local step of a client.
        drop_last: Whether a client drops the last batch of a local epoch if it is smaller than ``batch_size``.
            BatchNorm needs this, because it cannot train on a single example. The dropped examples change from epoch
            to epoch. A client with less than one batch trains on all its examples.
        eval_batch_size: Examples per evaluation batch; ``None`` for ``batch_size``, at least 256.
        labels: Class of each training example, shape ``(len(train),)``: integers, or names, which are numbered in
            sorted order; a tensor, an array, a list or a column. ``None`` to read them from the data set.
        collate_fn: Merges examples into a batch; ``None`` for PyTorch's default.
        num_workers: Number of worker processes for data that is not in memory; those for clients stay alive from one
            client to the next. The number does not change the run.
        seed: Seed of the partition, separate from the run's, so that runs can be compared on the same partition.
        client_val_fraction: Share of each client's examples held out from training, for `ClientEvaluation`.

    Note:
        Data in a `torch.utils.data.TensorDataset`, or a `Subset` of one, is indexed directly, without a DataLoader.

    Example:
        >>> import torch
        >>> from torch.utils.data import TensorDataset
        >>> from lightning_spectral.partition import IIDPartitioner
        >>> train = TensorDataset(torch.randn(100, 3), torch.randint(2, (100,)))
        >>> FederatedDataModule(train, IIDPartitioner(num_clients=10)).partition.sizes.tolist()
        [10, 10, 10, 10, 10, 10, 10, 10, 10, 10]
    """

    settings = ("batch_size", "num_clients", "partitioner", "seed", "num_examples")

    def __init__(
        self,
        train: Dataset,  # type: ignore[type-arg]
        partitioner: Partitioner,
        *,
        val: EvaluationData = None,
        test: EvaluationData = None,
        batch_size: int = 32,
        drop_last: bool = False,
        eval_batch_size: int | None = None,
        labels: Labels | None = None,
        collate_fn: Collate | None = None,
        num_workers: int = 0,
        seed: int = 0,
        client_val_fraction: float = 0.0,
    ) -> None:
        check_dealt(train, partitioner)
        check_collate(collate_fn)
        self.batch_size: int = Whole(at_least=1)("batch_size", batch_size)
        size = Whole(at_least=1, optional=True)("eval_batch_size", eval_batch_size) or max(self.batch_size, 256)
        super().__init__(val, test, size, collate_fn, Whole(at_least=0)("num_workers", num_workers))
        self.train = train
        self.partitioner = partitioner
        self.drop_last = flag("drop_last", drop_last)
        self.seed: int = Whole()("seed", seed)
        self.client_val_fraction: float = Number(at_least=0, below=1)("client_val_fraction", client_val_fraction)
        self._labels = None if labels is None else class_indices(labels, dataset_length(train))
        self._source = BatchSource(train, collate_fn, self.num_workers)
        self._fix(("train", "collate_fn", "num_workers"))

    @cached_property
    def labels(self) -> Tensor:
        """Class of each training example, int64, shape ``(len(train),)``; read once."""
        if self._labels is not None:
            return self._labels
        with isolated_rng(derived_seed(self.seed, "labels")):  # examples may draw, and a client may be training
            return dataset_labels(self.train)

    @cached_property
    def labels_in_examples(self) -> Tensor:
        """The same as a training step sees them, after the data set's ``target_transform``."""
        return self.labels if self._labels is not None else labels_in_examples(self.train, self.labels)

    @cached_property
    def _parts(self) -> tuple[Partition, Partition]:
        labels = self.labels if self.partitioner.needs_labels else None
        whole = self.partitioner(dataset_length(self.train), labels, derived_generator(self.seed, "partition"))
        self._fix(("partitioner", "seed", "client_val_fraction", "labels"))
        return hold_out(whole, self.client_val_fraction, derived_generator(self.seed, "held-out examples"))

    @cached_property
    def partition(self) -> Partition:
        """The examples that each client trains on; drawn once from the seed."""
        return self._parts[0]

    @cached_property
    def held_out(self) -> Partition:
        """The examples of each client that are held out, by ``client_val_fraction``; drawn once from the seed."""
        return self._parts[1]

    def report(self) -> PartitionReport:
        """Number of examples and label histogram of every client, to print or to plot."""
        return report(self.partition, self.labels)

    @property
    def num_clients(self) -> int:
        return self.partition.num_clients

    @property
    def num_examples(self) -> int:
        """Number of training examples of all clients."""
        return int(self.partition.sizes.sum())

    def setup(self, stage: str) -> None:
        """Draw the partition before training, so that an impossible one is refused here."""
        if stage == "fit":
            self.partition  # noqa: B018

    def teardown(self, stage: str) -> None:
        self._source.close()

    def on_exception(self, exception: BaseException) -> None:
        self._source.close()

    def client_directory(self, capacities: Assigned[float], available: Tensor | None = None) -> ClientDirectory:
        """What the server knows of clients: their sizes and keep ratios, and which of them can train the model."""
        return ClientDirectory(self.partition.sizes, capacities, available, self.examples_per_epoch)

    def client_data(self, download: Download) -> ClientData:
        """The data of a download's client, in an order that depends on the round."""
        indices = self.partition[download.unit.client_id]
        order = download.seed, download.ids, self.drop_last
        return ClientData(self._source, indices, self.batch_size, *order, labels=lambda: self.labels_in_examples)

    def check_clients(self) -> None:
        """Raise ``ValueError`` if a client has no examples."""
        check_no_client_is_empty(self.partition)

    def configuration(self) -> dict[str, str | int]:
        """The settings that must match for a checkpoint to be resumed."""
        own = {"batch_size": self.batch_size, "drop_last": self.drop_last}
        return {**own, "partition": self.partition.fingerprint()}

    def examples_per_epoch(self, num_examples: int) -> int:
        return examples_per_epoch(num_examples, self.batch_size, self.drop_last)

    def client_val_batches(self, client_id: int) -> Iterator[Any]:
        """A client's held-out examples in order, in batches of ``eval_batch_size``."""
        index_batches = torch.split(self.held_out[client_id], self.eval_batch_size)
        return self._source.batches(index_batches, self.seed, ("held out", client_id))

    def shuffled_batches(self, seed: int, ids: tuple[int | str, ...], max_batches: int | None = None) -> Iterator[Any]:
        """The training examples of all clients, shuffled, in nearly equal batches of at most ``eval_batch_size``.

        Seed and ids determine the order and every random draw of the examples.
        """
        dealt = self.partition.indices
        order = dealt[torch.randperm(len(dealt), generator=derived_generator(seed, "data order", *ids))]
        index_batches = torch.tensor_split(order, -(-len(order) // self.eval_batch_size))
        return self._source.batches(index_batches[:max_batches], seed, ids)


def check_no_client_is_empty(partition: Partition) -> None:
    """Raise ``ValueError`` if a client has no examples."""
    empty = (partition.sizes == 0).nonzero().flatten().tolist()
    if empty:
        shown = ", ".join(map(str, empty[:5])) + (", ..." if len(empty) > 5 else "")
        raise ValueError(
            f"{len(empty)} of {partition.num_clients} clients have no examples (clients {shown}); "
            "use fewer clients or a partitioner that gives every client some, or leave the others out of their rounds: "
            "faults=Faults(on_no_data=LeaveOut())."
        )
