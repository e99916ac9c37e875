"""What a server has of a federation's data: evaluation sets, and what it knows of the clients, wherever they are."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias, cast

import lightning.pytorch as pl
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lightning_spectral.client.batches import BatchSource, Collate, EvaluationLoader
from lightning_spectral.client.local_task import LocalTrainer
from lightning_spectral.plugin.data.checks import are_several, check_asked, check_evaluation, dataset_length
from lightning_spectral.plugin.host import Host, Share, as_host
from lightning_spectral.protocol.per_client import Assigned
from lightning_spectral.server.client_directory import ClientDirectory
from lightning_spectral.server.executor import Executor
from lightning_spectral.server.run import Run

# `Dataset` without a type argument, because jsonargparse builds no subclasses of a class with one
EvaluationData: TypeAlias = Dataset | Sequence[Dataset | Iterable[Any]] | Iterable[Any] | None  # type: ignore[type-arg]


class RoundLoader:
    """A single batch for an epoch of Lightning's, with all clients that this process trains in a round.

    The host is asked when the batch is fetched: Lightning creates the iterator before a resumed run knows its epoch.
    """

    def __init__(self, host: Host) -> None:
        self.host = host

    def __len__(self) -> int:
        return 1

    def __iter__(self) -> Iterator[Share]:
        yield self.host.share(self.host.current_epoch)


def round_loader(trainer: pl.Trainer | None, owner: str) -> RoundLoader:
    """The rounds of the module that a Trainer fits; raise ``TypeError`` if it trains on batches instead of clients."""
    module = None if trainer is None else trainer.lightning_module
    return RoundLoader(as_host(module, f"{owner} feeds clients, not batches"))


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
        self.val = val
        self.test = test
        self.eval_batch_size = eval_batch_size
        self.collate_fn = collate_fn
        self.num_workers = num_workers

    @property
    def num_clients(self) -> int:
        """Number of clients."""
        raise NotImplementedError

    @property
    def labels_in_examples(self) -> Tensor:
        """Class of each training example, as a training step sees it.

        Raises:
            ValueError: If the server does not know the clients' examples.
        """
        raise ValueError("The server does not know the classes of clients' examples, which are on other machines.")

    def client_directory(self, capacities: Assigned[float], available: Tensor | None = None) -> ClientDirectory:
        """What the server knows of the clients.

        Args:
            capacities: Keep ratio of each client, as the algorithm assigns them.
            available: Whether each client can train the model, bool, shape ``(num_clients,)``; ``None`` if all can.
        """
        raise NotImplementedError

    def make_executor(self, owner: Any, run: Run, local_trainer: LocalTrainer) -> Executor | None:
        """Create the executor of clients that are elsewhere; by default there are none, and it returns ``None``.

        Args:
            owner: The `FederatedModule` of the model that they train.
            run: Settings and state shared by its rounds.
            local_trainer: Runs a client's local epochs.
        """
        return None

    def evaluate_elsewhere(
        self, owner: Any, round_idx: int, client_ids: Sequence[int]
    ) -> Mapping[int, Mapping[str, float]] | None:
        """Evaluate the server's model where clients are; ``None``, as by default, if that is here.

        Args:
            owner: The `FederatedModule`.
            round_idx: The round, from 0.
            client_ids: Clients to evaluate.

        Returns:
            The metrics of each client that could be evaluated, by name.
        """
        return None

    def check_clients(self) -> None:
        """Raise ``ValueError`` if a client has no examples."""
        raise NotImplementedError

    def configuration(self) -> dict[str, str | int]:
        """The settings that must match for a checkpoint to be resumed."""
        raise NotImplementedError

    @property
    def has_val(self) -> bool:
        """Whether there is validation data: given as ``val``, or by a subclass with loaders of its own."""
        return self.val is not None or type(self).val_dataloader is not ServerData.val_dataloader

    def train_dataloader(self) -> RoundLoader:
        """One item per client of the round that Lightning is about to run."""
        return round_loader(self.trainer, type(self).__name__)

    def val_dataloader(self) -> Any:
        """The validation data in order, or nothing."""
        check_asked(self.trainer, "validate", "val", self.val)
        return self._evaluation_loader(self.val)

    def test_dataloader(self) -> Any:
        """The test data in order, or nothing."""
        check_asked(self.trainer, "test", "test", self.test)
        return self._evaluation_loader(self.test)

    def _evaluation_loader(self, data: EvaluationData) -> Any:
        if data is None:
            return []
        if are_several(data):
            return [self._evaluation_loader(one) for one in data]
        if isinstance(data, DataLoader) or not hasattr(data, "__getitem__"):
            return data  # a loader of the user's own
        dataset = cast(Dataset[Any], data)
        source = BatchSource(dataset, self.collate_fn)
        if source.is_in_memory:
            return EvaluationLoader(source, dataset_length(dataset), self.eval_batch_size)
        return DataLoader(dataset, self.eval_batch_size, collate_fn=self.collate_fn, num_workers=self.num_workers)
