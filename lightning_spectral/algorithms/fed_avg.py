"""Federated averaging: every client trains the whole model."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_spectral.algorithms.base import Algorithm
from lightning_spectral.client.local_optimizer import LocalOptimizer, rebuild_optimizer
from lightning_spectral.protocol.exchange import (
    apply_mean_change,
    averaged_tensors,
    load_tensors,
    select_tensors,
    travelling_tensors,
)
from lightning_spectral.protocol.records import Cohort, Download, Upload
from lightning_spectral.protocol.statistics import MeanChange, RunningMean


@dataclass(frozen=True)
class DenseRound:
    """One open round of tensors that travel whole.

    Attributes:
        tensors: Parameters and buffers of the server's module, by name.
        mean: Running sum over the clients of what comes back.
    """

    tensors: Mapping[str, Tensor]
    mean: MeanChange


@dataclass(frozen=True)
class FedAvg(Algorithm[DenseRound]):
    """The dense baseline, "no sharding" in the papers: the example-weighted mean of whole models.

    Args:
        keep_buffers: Patterns of buffer names that keep the server's value instead of the clients' average.

    Reference:
        McMahan et al. (2017), Algorithm 1.

    Example:
        >>> FedAvg().build(nn.Linear(3, 2), keep_ratio=1.0)
        Linear(in_features=3, out_features=2, bias=True)
    """

    keep_buffers: Sequence[str] = ()

    def build(self, server: nn.Module, keep_ratio: float) -> nn.Module:
        """A copy of the server's module."""
        return copy.deepcopy(server)

    def local_optimizer(self, template: Optimizer, server: nn.Module, client: nn.Module) -> LocalOptimizer:
        """The user's optimizer, group by group."""
        return rebuild_optimizer(template, server, client)

    def refresh(self, server: nn.Module, cohort: Cohort) -> DenseRound:
        """Note where every client starts."""
        averaged = averaged_tensors(server, keep_buffers=self.keep_buffers)
        return DenseRound(travelling_tensors(server), MeanChange(averaged, cohort.total_weight))

    def sample(self, round_state: DenseRound, keep_ratio: float, key: tuple[Any, ...]) -> Download:
        """Everything; nothing is drawn."""
        return Download(keep_ratio, round_state.tensors)

    def load(self, client: nn.Module, download: Download) -> None:
        """Copy the server's values."""
        load_tensors(client, download.tensors)

    def collect(self, round_state: DenseRound, client: nn.Module, num_examples: int) -> Upload:
        """The trained values."""
        return Upload(select_tensors(client, round_state.mean.names), num_examples)

    def add(self, round_state: DenseRound, download: Download, upload: Upload) -> None:
        """Add the client's change, weighted by its number of examples."""
        round_state.mean.add(upload.tensors, upload.num_examples, upload.largest)

    def running_means(self, round_state: DenseRound) -> Sequence[RunningMean]:
        """One sum over whole tensors."""
        return [round_state.mean]

    def apply(self, server: nn.Module, round_state: DenseRound) -> None:
        """Pseudo-gradient: minus the mean change."""
        apply_mean_change(server, round_state.mean.finish())
