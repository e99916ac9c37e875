"""The user's module, validated beside its own validation on other data or with other weights."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.data import extract_batch_size
from torch import Tensor
from torchmetrics import Metric

from lightning_spectral.client.local_loop import Recorder, call_with_accepted, isolate_metrics
from lightning_spectral.plugin.logs import redirect_logging
from lightning_spectral.protocol.exchange import named_state
from lightning_spectral.protocol.kept_state import trying

SUFFIX = "/dataloader_idx_"  # which Lightning appends to names where there are several dataloaders
_LOG = inspect.signature(pl.LightningModule.log)
_MEANS = ("mean", "avg", torch.mean)


class ValidatedBeside:
    """Runs ``validation_step`` of the user's module beside its validation, and keeps what it logs to itself.

    It does so within blocks of `entered`, after which the module is as it was. Values are averaged over examples as
    Lightning does, ``torchmetrics`` objects are computed, and names are those that Lightning uses. Values that are
    logged only for single batches, or are not reduced to their mean, are ignored.

    Args:
        module: The user's module.
        tensors: Weights to validate where they differ from the module's, by name.
        trainer: The Trainer that validates.
    """

    def __init__(self, module: pl.LightningModule, tensors: Mapping[str, Tensor], trainer: pl.Trainer) -> None:
        self.module: Any = module
        self._tensors = tensors
        self._recorder = Recorder(module)
        self._states: list[dict[str, Any]] = []  # of the metrics, between blocks
        self._trainer = trainer
        self._batch: Any = None
        self._dataloader_idx: int | None = None
        self._ended: dict[str, float] = {}

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Within the block, the module has the weights, and its metrics are those of this validation."""
        with trying(self.module):
            own = named_state(self.module)
            for name, tensor in self._tensors.items():
                own[name].data = tensor
            redirect_logging(self.module, self._log, self._log_dict)
            isolate_metrics(self._recorder.metrics)
            if not self._states:
                self.start()
            for metric, state in zip(self._recorder.metrics, self._states, strict=True):
                vars(metric).update(state)
            yield
            self._states = [vars(metric).copy() for metric in self._recorder.metrics]

    def start(self) -> None:
        """Forget what was logged so far, and reset the module's metrics: other data follows."""
        for metric in self._recorder.metrics:
            vars(metric).update({name: [] for name, default in metric._defaults.items() if isinstance(default, list)})
        self._recorder.start_client()
        self._states = [vars(metric).copy() for metric in self._recorder.metrics]
        self._dataloader_idx, self._ended = None, {}

    def step(self, batch: Any, batch_idx: int, dataloader_idx: int | None = None) -> None:
        """Validate on one batch, which is left unchanged.

        Args:
            batch: As ``validation_step`` gets it, on its device.
            batch_idx: Its index in its dataloader.
            dataloader_idx: Which dataloader; ``None`` if there is only one.
        """
        if dataloader_idx != self._dataloader_idx:
            self._end_dataloader(dataloader_idx)
        self._batch = copy.deepcopy(batch)  # steps may change it, or take entries out of it
        indices = (batch_idx,) if dataloader_idx is None else (batch_idx, dataloader_idx)
        with self._trainer.precision_plugin.val_step_context():
            call_with_accepted(self.module.validation_step, self._batch, *indices)
        self._batch = None

    def logged(self) -> dict[str, float]:
        return {**self._so_far(), **self._ended}

    def _so_far(self) -> dict[str, float]:
        return {name: entry.value for name, entry in self._recorder.finish_client().items()}

    def _end_dataloader(self, following: int | None) -> None:
        """Settle a dataloader's values, since metrics that are logged for several dataloaders keep accumulating."""
        suffix = f"{SUFFIX}{self._dataloader_idx}"
        self._ended.update({name: value for name, value in self._so_far().items() if name.endswith(suffix)})
        self._dataloader_idx = following

    def _log(self, *args: Any, **options: Any) -> None:  # with the arguments of `LightningModule.log`
        call = _LOG.bind(self.module, *args, **options)
        call.apply_defaults()
        name, value, batch_size = (call.arguments[key] for key in ("name", "value", "batch_size"))
        is_metric = isinstance(value, Metric)
        if call.arguments["on_epoch"] is False or not (is_metric or call.arguments["reduce_fx"] in _MEANS):
            return
        if call.arguments["add_dataloader_idx"] and self._dataloader_idx is not None:
            name = f"{name}{SUFFIX}{self._dataloader_idx}"
        if batch_size is None and not is_metric:
            batch_size = extract_batch_size(self._batch)
        self._recorder.log(name, value, batch_size=batch_size)

    def _log_dict(self, dictionary: Mapping[str, Any], *args: Any, **options: Any) -> None:
        for name, value in dictionary.items():
            self._log(name, value, *args, **options)
