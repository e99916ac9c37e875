"""MultiModelDataModule: the data of several models that the same clients train."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl

from lightning_spectral.errors import check_is
from lightning_spectral.plugin.data.data_module import FederatedDataModule
from lightning_spectral.plugin.data.server_data import ServerData, round_loader


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
        self._num_loaders: dict[str, dict[str, int]] = {}

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
    def val(self) -> Any:
        found = {name: module.val for name, module in self.modules.items() if module.has_val}
        return found or None

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

    def train_dataloader(self) -> Any:
        return round_loader(self.trainer, type(self).__name__)

    def val_dataloader(self) -> list[Any]:
        return self._counted("validate", {n: as_list(m.val_dataloader()) for n, m in self.modules.items()})

    def test_dataloader(self) -> list[Any]:
        return self._counted("test", {n: as_list(m.test_dataloader()) for n, m in self.modules.items()})

    def _counted(self, stage: str, loaders: Mapping[str, list[Any]]) -> list[Any]:
        self._num_loaders[stage] = {name: len(own) for name, own in loaders.items()}
        return [loader for own in loaders.values() for loader in own]

    def evaluated(self, stage: str) -> list[tuple[str, int, int]]:
        """For each evaluation loader of a stage: its model, its index in it, and the number of the model's loaders."""
        counts = self._num_loaders[stage]  # not of `val` or `test`, since a subclass may have loaders of other data
        return [(name, index, count) for name, count in counts.items() for index in range(count)]


def as_list(data: Any) -> list[Any]:
    """Evaluation data, or its loaders: none, one or several, as a list."""
    if data is None:
        return []
    return list(data) if isinstance(data, list | tuple) else [data]
