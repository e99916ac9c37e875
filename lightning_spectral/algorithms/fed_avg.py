"""Federated averaging: every client trains the whole model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from torch import Tensor, nn

from lightning_spectral.algorithms.base import Algorithm
from lightning_spectral.algorithms.dense_mean import dense_mean
from lightning_spectral.arguments import as_patterns, check_fields
from lightning_spectral.client.local_optimizer import LocalOptimizer, OptimizerRecipe, rebuild_optimizer
from lightning_spectral.client.side import ClientSide
from lightning_spectral.protocol.cohort import Cohort
from lightning_spectral.protocol.exchange import (
    apply_mean_change,
    averaged_tensors,
    copy_module,
    kept_buffers,
    load_tensors,
    select_tensors,
    travelling_tensors,
)
from lightning_spectral.protocol.records import Download, Receipt, Upload
from lightning_spectral.protocol.work_unit import WorkUnit
from lightning_spectral.sums import MeanChange, RunningMean


@dataclass(frozen=True)
class DenseSide(ClientSide):
    """The device half of federated averaging.

    Attributes:
        returned: Names of the tensors that travel back.
    """

    returned: tuple[str, ...]

    def build(self, module: nn.Module, capacity: float) -> nn.Module:
        """A copy of the user's module."""
        client: nn.Module = copy_module(module)
        return client

    def load(self, client: nn.Module, download: Download) -> None:
        """Copy the server's values."""
        load_tensors(client, download.tensors)

    def local_optimizer(self, recipe: OptimizerRecipe, client: nn.Module) -> LocalOptimizer:
        """The user's optimizer, group by group."""
        return rebuild_optimizer(recipe, client)

    def collect(self, client: nn.Module, download: Download) -> Upload:
        """The trained values."""
        return Upload(download.unit, select_tensors(client, self.returned))


@dataclass(frozen=True, eq=False)
class DenseRound:
    """One open round in which tensors travel whole.

    Attributes:
        cohort: The clients that take part.
        tensors: Parameters and buffers of the server's module, by name.
        mean: Running mean of the clients' changes.
    """

    cohort: Cohort
    tensors: Mapping[str, Tensor]
    mean: MeanChange


@dataclass(frozen=True)
class FedAvg(Algorithm[DenseRound]):
    """The dense baseline, "no sharding" in the papers: the example-weighted mean of whole models.

    Args:
        keep_buffers: Patterns of the names of buffers that keep the server's value instead of the clients' average.

    Raises:
        ValueError: If patterns are not a sequence of strings.

    Reference:
        McMahan et al. (2017), Algorithm 1.

    Example:
        >>> FedAvg().client_side(nn.Linear(3, 2))
        DenseSide(returned=('weight', 'bias'))
    """

    side: ClassVar[type[DenseSide]] = DenseSide
    updates_have_norms: ClassVar[bool] = True

    keep_buffers: Sequence[str] = ()

    def __post_init__(self) -> None:
        check_fields(self, keep_buffers=as_patterns)

    def prepare(self, server: nn.Module) -> FedAvg:
        """Decide which buffers keep the server's value, once for all rounds."""
        return replace(self, keep_buffers=kept_buffers(server, self.keep_buffers))

    def client_side(self, server: nn.Module) -> ClientSide:
        """The device half: trainable parameters and averaged buffers travel back."""
        return type(self).side(tuple(averaged_tensors(server, keep_buffers=self.keep_buffers)))

    def open(self, server: nn.Module, state: nn.Module | None, cohort: Cohort) -> DenseRound:
        """Collect the tensors that every client starts from."""
        before = averaged_tensors(server, keep_buffers=self.keep_buffers)
        return DenseRound(cohort, travelling_tensors(server), dense_mean(server, before, cohort))

    def send(self, opened: DenseRound, unit: WorkUnit) -> tuple[Download, Receipt]:
        """Send the whole model; nothing is drawn."""
        return Download(unit, 1.0, opened.tensors), Receipt(unit, 1.0)

    def add(self, opened: DenseRound, receipt: Receipt, upload: Upload) -> None:
        """Add the client's change, weighted by its coefficient."""
        opened.mean.add(upload.tensors, receipt.unit.coefficient, upload.largest)

    def running_means(self, opened: DenseRound) -> Sequence[RunningMean]:
        """The single sum over whole tensors."""
        return [opened.mean]

    def close(self, server: nn.Module, state: nn.Module | None, opened: DenseRound) -> None:
        """Set the pseudo-gradients, which are minus the mean changes."""
        apply_mean_change(server, opened.mean.finish())
