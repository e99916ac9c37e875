"""The data of a federation: dealt to clients, kept at the server for evaluation, of one model or of several."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from types import MappingProxyType
from typing import Any, NoReturn, TypeAlias

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only
from torch.utils.data import DataLoader, Dataset, Subset

from lightning_spectral.algorithms import Algorithm
from lightning_spectral.algorithms.filter import Filter
from lightning_spectral.arguments import Number, Whole, flag
from lightning_spectral.client.batches import BatchSource, ClientData, Collate, EvaluationLoader
from lightning_spectral.client.local_loop import LocalTrainer
from lightning_spectral.errors import check_is
from lightning_spectral.participation.cohorts import ClientDirectory
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
from lightning_spectral.partition.datasets import (
    TransformedByClient,
    check_client_transform,
    check_dealt,
    check_evaluation,
)
from lightning_spectral.partition.labels import check_labels_of_examples, stored_labels
from lightning_spectral.plugin.settings import FixedArguments, as_config
from lightning_spectral.plugin.user_hooks import Share, as_host
from lightning_spectral.protocol.per_client import (
    Assigned,
    PerClient,
    assign,
    check_entries,
    check_num_entries,
    entries_of,
)
from lightning_spectral.protocol.records import Download
from lightning_spectral.protocol.rng import derived_generator, derived_seed, isolated_rng
from lightning_spectral.server.executor import Executor
from lightning_spectral.server.round import Engine

CALLED = MappingProxyType(  # names from elsewhere
    {
        **dict.fromkeys(("num_clients", "num_partitions"), "a partitioner: IIDPartitioner(num_clients=10)"),
        **dict.fromkeys(("val_fraction", "val_split"), "client_val_fraction=0.1, for examples of each client"),
        **dict.fromkeys(("test_fraction", "test_split"), "client_test_fraction=0.1, for examples of each client"),
        "shuffle": "nothing, since clients shuffle in every local epoch",
        "transform": "client_transform=lambda example, client: ..., or transform the data set",
    }
)
COMPARED = 8  # clients whose first examples tell data sets apart


# `Dataset` without a type argument, because jsonargparse builds no subclasses of a class with one
EvaluationData: TypeAlias = Dataset | Sequence[Dataset | Iterable[Any]] | Iterable[Any] | None  # type: ignore[type-arg]


class RoundLoader:
    """A single batch for an epoch of Lightning's, with all clients that this process trains in a round.

    The fitted module is asked when the batch is fetched: when Lightning makes the iterator, a resumed run has no epoch.
    """

    def __init__(self, host: Any) -> None:
        self.host = host

    def __len__(self) -> int:
        return 1

    def __iter__(self) -> Iterator[Share]:
        yield self.host.federation.cohorts.share(self.host.current_epoch)


def check_host(data: pl.LightningDataModule) -> None:
    """Raise ``TypeError`` if the module that a Trainer fits would train on batches instead of clients."""
    module = None if data.trainer is None else data.trainer.lightning_module
    as_host(module, f"{type(data).__name__} feeds clients, not batches")


class ServerData(pl.LightningDataModule):
    """Base class of data modules whose rounds are played by clients: here, or elsewhere.

    Args:
        val: Validation data: a data set, which may be a list of examples, a dataloader of your own, or a list of these.
        test: Test data, likewise.
        eval_batch_size: Examples per evaluation batch.
        collate_fn: Merges examples into a batch; ``None`` for PyTorch's default.
        num_workers: Number of worker processes for data that is not in memory.

    Raises:
        TypeError: If ``val`` or ``test`` is a dictionary or no data at all.
    """

    settings: tuple[str, ...] = ("num_clients",)  # what loggers show

    def __init__(
        self,
        val: EvaluationData = None,
        test: EvaluationData = None,
        eval_batch_size: int = 256,
        collate_fn: Collate | None = None,
        num_workers: int = 0,
    ) -> None:
        super().__init__()
        check_evaluation(val=val, test=test)
        self.val, self.test, self.eval_batch_size = val, test, eval_batch_size
        self.collate_fn, self.num_workers = collate_fn, num_workers

    @property
    def num_clients(self) -> int:
        """Number of clients."""
        raise NotImplementedError

    @property
    def labels_in_examples(self) -> Tensor:
        """Class of each training example, as a training step sees it; empty if examples are on other machines."""
        return torch.empty(0, dtype=torch.int64)

    @property
    def stored_labels(self) -> Tensor | None:
        """The same, if the data set stores integers; ``None`` if only its examples, or a user, know the classes."""
        return None

    def client_directory(self, capacities: Assigned[float], available: Tensor | None = None) -> ClientDirectory:
        """What the server knows of the clients.

        Args:
            capacities: Keep ratio of each client, as the algorithm assigns them.
            available: Whether each client can train the model, bool, shape ``(num_clients,)``; ``None`` if all can.
        """
        raise NotImplementedError

    def make_executor(self, owner: Any, engine: Engine, local_trainer: LocalTrainer) -> Executor | None:
        """Create the executor of a `FederatedModule` whose clients are elsewhere; by default ``None``, as none are."""
        return None

    def evaluate_elsewhere(
        self, owner: Any, round_idx: int, client_ids: Sequence[int]
    ) -> Mapping[int, Mapping[str, float]] | None:
        """Evaluate a `FederatedModule` where clients are; ``None``, as by default, if that is here.

        Returns:
            The metrics of each client that could be evaluated, by name.
        """
        return None

    def check_clients(self) -> None:
        """Raise ``ValueError`` if a client has no examples; by default, none of these is a client."""

    def configuration(self) -> dict[str, str | int]:
        """The settings that must match for a checkpoint to be resumed."""
        raise NotImplementedError

    def filters_beside(self, filters: Sequence[Filter], algorithm: Algorithm) -> Sequence[Filter]:
        """Filters that these clients need, besides those of the user, which they precede."""
        return ()

    def identity(self) -> Sequence[str]:
        """Who the clients are, for checkpoints: those of two fits differ if one of the entries that both have does."""
        raise NotImplementedError

    def has_clients_of(self, other: ServerData) -> bool:
        """Whether its clients are those of another one, as far as both have them."""
        return all(own == its for own, its in zip(self.identity(), other.identity(), strict=False))

    @property
    def has_val(self) -> bool:
        """Whether there is validation data: given as ``val``, or by a subclass with loaders of its own."""
        return self.val is not None or type(self).val_dataloader is not ServerData.val_dataloader

    def train_dataloader(self) -> Any:
        """Raise ``ValueError``: the training examples are elsewhere."""
        check_host(self)
        raise ValueError(
            f"{type(self).__name__} has no training examples to iterate over: clients have them. Pass what is to be "
            "counted, such as class weights, to the module."
        )

    def val_dataloader(self) -> Any:
        """The validation data in order, or nothing."""
        return self._loader(self.val, "validate", "val")

    def test_dataloader(self) -> Any:
        """The test data in order, or nothing."""
        return self._loader(self.test, "test", "test")

    def _loader(self, data: EvaluationData, method: str, argument: str) -> Any:
        if data is None:
            if self.trainer is not None and self.trainer.state.fn == method:
                raise ValueError(
                    f"`Trainer.{method}` needs data; give FederatedDataModule(..., {argument}=...), or a dataloader."
                )
            return []
        if isinstance(data, list | tuple) and not any(isinstance(one, tuple | Mapping | Tensor) for one in data):
            return [self._loader(one, method, argument) for one in data]
        if isinstance(data, DataLoader) or not hasattr(data, "__getitem__"):
            return data  # a loader of the user's own
        dataset: Any = data
        source = BatchSource(dataset, self.collate_fn)
        if source.is_in_memory:
            return EvaluationLoader(source, len(dataset), self.eval_batch_size)
        return DataLoader(dataset, self.eval_batch_size, collate_fn=self.collate_fn, num_workers=self.num_workers)


class FederatedDataModule(FixedArguments, ServerData):
    """Deals the examples of a training set to clients; evaluation data stays whole, at the server.

    Args:
        train: Any map-style data set, including those of Hugging Face (``with_format("torch")``).
        partitioner: Decides which examples belong to which client.
        val: Validation data: a data set, which may be a list of examples, a dataloader of your own, or a list of these.
        test: Test data, likewise.
        batch_size: Examples per local step of a client: a number, ``{number: share of clients}`` or a list.
        drop_last: Whether a client drops the last batch of a local epoch if it is smaller than ``batch_size``.
            BatchNorm needs this, because it cannot train on a single example. The dropped examples change from epoch
            to epoch. A client with less than one batch trains on all its examples.
        eval_batch_size: Examples per evaluation batch; ``None`` for the largest ``batch_size``, at least 256.
        labels: Class of each training example, shape ``(len(train),)``: integers, or names, which are numbered in
            sorted order; a tensor, an array, a list or a column. ``None`` to read them from the data set, whose
            ``targets`` are compared with a sample of its examples.
        collate_fn: Merges examples into a batch; ``None`` for PyTorch's default.
        num_workers: Number of worker processes for data that is not in memory; those for clients stay alive from one
            client to the next. The number does not change the run.
        seed: Seed of the partition, separate from the run's, so that runs can be compared on the same partition.
        client_val_fraction: Share of each client's examples held out from training, for `ClientEvaluation`.
        client_test_fraction: Share held out besides, on which it evaluates in ``Trainer.test``; 0 for the same ones.
        stratified: Whether every class of a client is held out in the same proportion, rounded up or down.
        client_transform: Function of an example and of the number of its client, which returns a new example, as this
            client sees it, such as a rotated image; of examples held out too, not of ``val`` and ``test``. Labels are
            read, and dealt, as they are before it. If workers are spawned, it is a function of a module.

    Raises:
        ValueError: If the fractions leave nothing to train on, or another argument is out of range.

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
    moved = CALLED

    def __init__(
        self,
        train: Dataset,  # type: ignore[type-arg]
        partitioner: Partitioner,
        *,
        val: EvaluationData = None,
        test: EvaluationData = None,
        batch_size: PerClient[int] = 32,
        drop_last: bool = False,
        eval_batch_size: int | None = None,
        labels: Labels | None = None,
        collate_fn: Collate | None = None,
        num_workers: int = 0,
        seed: int = 0,
        client_val_fraction: float = 0.0,
        client_test_fraction: float = 0.0,
        stratified: bool = False,
        client_transform: Callable[[Any, int], Any] | None = None,
    ) -> None:
        check_dealt(train, partitioner)
        if collate_fn is not None and not callable(collate_fn):
            raise TypeError(f"`collate_fn` must be a function from a list of examples to a batch, got {collate_fn!r}.")
        self.batch_size: PerClient[int] = check_entries("batch_size", batch_size, Whole(at_least=1))
        size = Whole(at_least=1, optional=True)("eval_batch_size", eval_batch_size)
        size = size or max(*entries_of(self.batch_size), 256)
        super().__init__(val, test, size, collate_fn, Whole(at_least=0)("num_workers", num_workers))
        check_client_transform(client_transform)
        self.train: Any = train
        self.client_transform = client_transform
        self.partitioner, self.drop_last = partitioner, flag("drop_last", drop_last)
        self.seed: int = Whole()("seed", seed)
        self.client_val_fraction: float = Number(at_least=0, below=1)("client_val_fraction", client_val_fraction)
        limit = round(1 - self.client_val_fraction, 9)  # .3, where the other is .7
        rest = Number(at_least=0, below=limit, hint="with client_val_fraction, less than all")
        self.client_test_fraction: float = rest("client_test_fraction", client_test_fraction)
        self.stratified = flag("stratified", stratified)
        self._labels = None if labels is None else class_indices(labels, len(train))  # type: ignore[arg-type]
        self._assigned: tuple[object, Assigned[int]] | None = None
        self._fix(("train", "collate_fn", "num_workers", "client_transform"))

    @cached_property
    def labels(self) -> Tensor:
        """Class of each training example, int64, shape ``(len(train),)``; read once."""
        if self._labels is not None:
            return self._labels
        with isolated_rng(derived_seed(self.seed, "labels")):  # examples may draw, and a client may be training
            labels = dataset_labels(self.train)
            # a file that is opened here would be shared by the workers, which read it at once
            if self.num_workers == 0 and stored_labels(self.train) is not None:
                check_labels_of_examples(self.train, labels)
            return labels

    @cached_property
    def labels_in_examples(self) -> Tensor:
        """The same as a training step sees them, after the data set's ``target_transform``."""
        return self.labels if self._labels is not None else labels_in_examples(self.train, self.labels)

    @property
    def stored_labels(self) -> Tensor | None:
        try:
            stored = None if self._labels is not None else stored_labels(self.train)
        except ValueError:
            return None
        return None if stored is None else labels_in_examples(self.train, stored)

    @cached_property
    def parts(self) -> tuple[Partition, Partition, Partition]:
        """Each client's examples to train on, and those held out for validation and for tests."""
        labels = self.labels if self.partitioner.needs_labels else None
        whole = self.partitioner(len(self.train), labels, derived_generator(self.seed, "partition"))
        self._fix(("partitioner", "seed", "client_val_fraction", "client_test_fraction", "stratified", "labels"))
        split = partial(hold_out, labels=self.labels if self.stratified else None)
        rest, val = split(whole, self.client_val_fraction, derived_generator(self.seed, "held-out examples"))
        share = self.client_test_fraction / (1 - self.client_val_fraction)
        training, test = split(rest, share, derived_generator(self.seed, "test examples"))
        return training, val, test if share else val

    @cached_property
    def examples(self) -> Any:
        """The training examples, as clients see them."""
        seen = self.client_transform
        return self.train if seen is None else TransformedByClient(self.train, seen, self.parts)

    @cached_property
    def _source(self) -> BatchSource:
        return BatchSource(self.examples, self.collate_fn, self.num_workers)

    @property
    def partition(self) -> Partition:
        """The examples that each client trains on; drawn once from the seed."""
        return self.parts[0]

    @property
    def held_out(self) -> Partition:
        """The examples of each client on which it is evaluated; in `Trainer.test`, by ``client_test_fraction``."""
        return self.parts[2 if self.trainer is not None and self.trainer.state.fn == "test" else 1]

    def _loader(self, data: EvaluationData, method: str, argument: str) -> Any:
        """That of the data, or where clients are evaluated without a fit, at least of what they hold out."""
        trainer: Any = self.trainer
        if data is None and trainer is not None and trainer.state.fn == method:
            own = (type(self).held_out, type(self).client_val_batches)  # a subclass may hold out other data
            is_ours = own == (FederatedDataModule.held_out, FederatedDataModule.client_val_batches)
            is_asked = any(getattr(callback, "reads_clients", False) for callback in trainer.callbacks)
            if is_ours and is_asked and self.held_out.num_assigned:
                data = Subset(self.examples, self.held_out.indices.tolist())
        return super()._loader(data, method, argument)

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

    @property
    def batch_sizes(self) -> Assigned[int]:
        """Examples per local step of each client; which client has which of several is drawn from the seed."""
        if self._assigned is None or self._assigned[0] is not self.batch_size:
            check_num_entries("batch_size", self.batch_size, self.num_clients)
            self._assigned = self.batch_size, assign(self.batch_size, self.num_clients, self.seed, "batch sizes")
        return self._assigned[1]

    def setup(self, stage: str) -> None:
        """Draw the partition before training, so that an impossible one is refused here."""
        if stage == "fit":
            self.batch_sizes  # noqa: B018

    def train_dataloader(self) -> DataLoader[Any]:
        """The examples of all clients, in batches, for code that counts or reads them; rounds do without it."""
        check_host(self)
        size = max(entries_of(self.batch_size))
        return DataLoader(self.examples, size, collate_fn=self.collate_fn, num_workers=self.num_workers)

    def teardown(self, stage: str) -> None:
        if "_source" in vars(self):
            self._source.close()

    def on_exception(self, exception: BaseException) -> None:
        self.teardown("fit")

    def client_directory(self, capacities: Assigned[float], available: Tensor | None = None) -> ClientDirectory:
        return ClientDirectory(self.partition.sizes, capacities, available, self.batch_sizes, self.drop_last)

    def client_data(self, download: Download) -> ClientData:
        """The data of a download's client, in an order that depends on the round."""
        indices, size = self.partition[download.unit.client_id], self.batch_sizes.of(download.unit.client_id)
        order = download.seed, download.ids, self.drop_last
        return ClientData(self._source, indices, size, *order, labels=lambda: self.labels_in_examples)

    def check_clients(self) -> None:
        if empty := (self.partition.sizes == 0).nonzero().flatten().tolist():
            shown = ", ".join(map(str, empty[:5])) + (", ..." if len(empty) > 5 else "")
            raise ValueError(
                f"{len(empty)} of {self.num_clients} clients have no examples (clients {shown}); use fewer clients or "
                "a partitioner that gives every client some, or leave the others out of their rounds: "
                "faults=Faults(on_no_data=LeaveOut())."
            )

    def configuration(self) -> dict[str, str | int]:
        size = self.batch_size if isinstance(self.batch_size, int) else repr(self.batch_size)
        seen = {} if self.client_transform is None else {"client_transform": str(as_config(self.client_transform))}
        return {"batch_size": size, "drop_last": self.drop_last, "partition": self.partition.fingerprint, **seen}

    def identity(self) -> Sequence[str]:
        return [self.partition.fingerprint]

    def has_clients_of(self, other: ServerData) -> bool:
        """Examples are compared, the first ones of some clients, unless the data sets are the same object."""
        if not (isinstance(other, FederatedDataModule) and super().has_clients_of(other)):
            return False
        return self.examples is other.examples or self._first_examples() == other._first_examples()

    def _first_examples(self) -> list[bytes]:
        """The first example of some clients, as bytes."""
        with_data = self.partition.sizes.nonzero().flatten().tolist()
        with isolated_rng(derived_seed(self.seed, "first examples")):  # examples may draw
            examples = [self.examples[int(self.partition[client][0])] for client in with_data[:COMPARED]]
        return [pickle.dumps(tree_map_only(Tensor, lambda tensor: tensor.numpy(force=True), each)) for each in examples]

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


class MultiModelDataModule(pl.LightningDataModule):
    """Holds the data of each model; client i is the same client for all models.

    A client may have no examples of some models: it never trains those.

    Args:
        modules: The data by model name; the same number of clients in all.

    Example:
        >>> import torch
        >>> from torch.utils.data import TensorDataset
        >>> from lightning_spectral.partition import IIDPartitioner
        >>> words, images = TensorDataset(torch.ones(20, 3)), TensorDataset(torch.ones(30, 4))
        >>> data = MultiModelDataModule(
        ...     {
        ...         "words": FederatedDataModule(words, IIDPartitioner(num_clients=10)),
        ...         "images": FederatedDataModule(images, IIDPartitioner(num_clients=10)),
        ...     }
        ... )
        >>> data.num_clients
        10
    """

    def __init__(self, modules: Mapping[str, FederatedDataModule]) -> None:
        super().__init__()
        check_is("modules", modules, Mapping)
        if not modules:
            raise ValueError("`modules` is empty; give the data of each model: {'words': FederatedDataModule(...)}.")
        for name, module in modules.items():
            if not isinstance(module, ServerData):
                check_is(f"modules[{name!r}]", module, FederatedDataModule)
        self.modules: dict[str, ServerData] = dict(modules)  # a command line builds only `FederatedDataModule`
        self.evaluated: dict[str, list[tuple[str, int, int]]] = {}

    @property
    def num_clients(self) -> int:
        """Number of clients; raises ``ValueError`` if models have different ones."""
        counts = {name: module.num_clients for name, module in self.modules.items()}
        if len(set(counts.values())) > 1:
            listed = ", ".join(f"{name!r}: {count}" for name, count in counts.items())
            raise ValueError(
                f"The models have different numbers of clients ({listed}); partition all data among the same clients. "
                "A client may have no examples of some models."
            )
        return next(iter(counts.values()))

    @property
    def has_val(self) -> bool:
        return any(module.has_val for module in self.modules.values())

    def prepare_data(self) -> None:
        for module in self.modules.values():
            module.prepare_data()

    def setup(self, stage: str) -> None:
        for module in self.modules.values():
            module.trainer = self.trainer
            module.setup(stage)
        if stage == "fit":
            self.num_clients  # noqa: B018  # refused here if they differ

    def teardown(self, stage: str) -> None:
        for module in self.modules.values():
            module.teardown(stage)

    def on_exception(self, exception: BaseException) -> None:
        for module in self.modules.values():
            module.on_exception(exception)

    def state_dict(self) -> dict[str, Any]:
        """What each model's data keeps in checkpoints."""
        return {name: state for name, module in self.modules.items() if (state := module.state_dict())}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what each model's data keeps in checkpoints."""
        for name, state in state_dict.items():
            self.modules[name].load_state_dict(state)

    def train_dataloader(self) -> NoReturn:
        """Raise ``TypeError``: each model has data of its own."""
        check_host(self)
        raise TypeError("Each model has data of its own: `datamodule.modules[name].train_dataloader()`.")

    def val_dataloader(self) -> list[Any]:
        return self._counted("validate", "val_dataloader")

    def test_dataloader(self) -> list[Any]:
        return self._counted("test", "test_dataloader")

    def _counted(self, stage: str, method: str) -> list[Any]:
        """All models' loaders; `evaluated` then has each one's model, its index there, and how many the model has."""
        found = ((name, getattr(module, method)()) for name, module in self.modules.items())
        loaders = {n: one if isinstance(one, list | tuple) else [one] for n, one in found if one is not None}
        # counted here, not in `val` or `test`, since a subclass may have loaders of other data
        self.evaluated[stage] = [(name, index, len(own)) for name, own in loaders.items() for index in range(len(own))]
        return [loader for own in loaders.values() for loader in own]
