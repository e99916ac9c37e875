"""Records what a client logs with ``self.log``, as one example-weighted mean per name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Number
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lightning_spectral.client.module_metrics import is_metric, metrics_of
from lightning_spectral.protocol.records import LoggedValue

if TYPE_CHECKING:
    from torchmetrics import Metric


@dataclass
class _Entry:
    total: Tensor
    weight: float
    prog_bar: bool
    logger: bool


class Recorder:
    """Stands in for ``LightningModule.log`` and ``log_dict`` on a client's module.

    Values stay tensors while a client trains, so that nothing waits for the device. ``torchmetrics`` objects are
    computed once, when the client is done.

    Args:
        module: The client's module; its metrics are looked up once.
    """

    def __init__(self, module: nn.Module | None = None) -> None:
        self.num_examples = 1
        self._own_metrics = [] if module is None else metrics_of(module)
        self._client: dict[str, _Entry] = {}
        self._metrics: dict[str, tuple[Metric, bool, bool]] = {}

    def log(
        self,
        name: str,
        value: Metric | Tensor | float,
        prog_bar: bool = False,
        logger: bool | None = None,
        on_step: bool | None = None,
        on_epoch: bool | None = None,
        *args: Any,
        batch_size: int | None = None,
        **options: Any,
    ) -> None:
        """Record one value; the other options of ``LightningModule.log`` have no effect on a client."""
        name = f"{name}_epoch" if on_step and on_epoch else name
        to_logger = logger is not False
        if is_metric(value):
            self._metrics[name] = (value, prog_bar, to_logger)
            return
        if not isinstance(value, Tensor | Number):
            raise TypeError(
                f"`self.log({name!r}, ...)` takes a number, a tensor or a metric of torchmetrics, got {value!r}; log "
                "several values with `self.log_dict`, and print what is not a number."
            )
        weight = float(self.num_examples if batch_size is None else batch_size)
        _accumulate(self._client, name, value, weight, prog_bar, to_logger)

    def log_dict(self, dictionary: Mapping[str, Any], *args: Any, **options: Any) -> None:
        """Record several values."""
        for name, value in dictionary.items():
            self.log(name, value, *args, **options)

    def start_client(self) -> None:
        """Clear what the previous client logged, and reset the module's metrics."""
        self._client.clear()
        self._metrics.clear()
        for metric in self._own_metrics:
            metric.reset()

    def finish_client(self) -> dict[str, LoggedValue]:
        """The means over the client's turn, by name."""
        means = {n: LoggedValue(float(e.total / e.weight), e.prog_bar, e.logger) for n, e in self._client.items()}
        computed = {n: LoggedValue(_scalar(m.compute()).item(), *flags) for n, (m, *flags) in self._metrics.items()}
        return {**means, **computed}


def log_to(recorder: Recorder, module: Any) -> None:
    """Let a module's ``self.log`` and ``self.log_dict`` lead to a recorder."""
    module.log, module.log_dict = recorder.log, recorder.log_dict


def _accumulate(
    entries: dict[str, _Entry], name: str, value: Tensor | float, weight: float, prog_bar: bool, logger: bool
) -> None:
    """Add a weighted value to the running mean of its name."""
    value = _scalar(value)
    if name not in entries:
        entries[name] = _Entry(torch.zeros((), dtype=torch.float64, device=value.device), 0.0, prog_bar, logger)
    entries[name].total.add_(value, alpha=weight)
    entries[name].weight += weight


def _scalar(value: Tensor | float) -> Tensor:
    """The value as a scalar tensor; several values are averaged, as Lightning does."""
    # a Python number keeps its precision even where half precision is the default type
    value = value.detach() if isinstance(value, Tensor) else torch.as_tensor(value, dtype=torch.float64)
    return value if value.ndim == 0 else value.float().mean()
