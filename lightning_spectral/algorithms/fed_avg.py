"""Federated averaging: every client trains the whole model."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

from torch import Tensor, nn

from lightning_spectral.algorithms.base import Algorithm, Round, ServerHalf
from lightning_spectral.algorithms.dense_mean import dense_mean
from lightning_spectral.arguments import as_patterns, check_fields
from lightning_spectral.client.side import ClientSide
from lightning_spectral.protocol.cohort import Cohort
from lightning_spectral.protocol.exchange import (
    apply_mean_change,
    averaged_tensors,
    kept_buffers,
    load_tensors,
    select_tensors,
    travelling_tensors,
)
from lightning_spectral.protocol.records import Download, Receipt, Upload
from lightning_spectral.protocol.work_unit import WorkUnit
from lightning_spectral.sums import RunningMean


@dataclass(frozen=True)
class DenseSide(ClientSide):
    """The device half of federated averaging.

    Attributes:
        returned: Names of the tensors that travel back.
    """

    returned: tuple[str, ...]

    def load(self, client: nn.Module, download: Download) -> None:
        load_tensors(client, download.tensors)

    def collect(self, client: nn.Module, download: Download) -> Upload:
        return Upload(download.unit, select_tensors(client, self.returned))


class DenseRound(Round):
    """One open round in which tensors travel whole.

    Attributes:
        tensors: Parameters and buffers of the server's module, by name.
        mean: Running mean of the clients' changes.
    """

    def __init__(self, half: DenseHalf, cohort: Cohort) -> None:
        self.half = half
        self.cohort = cohort
        self.tensors: Mapping[str, Tensor] = travelling_tensors(half.server)
        self.mean = dense_mean(half.server, half.averaged(), cohort)

    def send(self, unit: WorkUnit) -> tuple[Download, Receipt]:
        return Download(unit, 1.0, self.tensors), Receipt(unit, 1.0)

    def add(self, receipt: Receipt, upload: Upload) -> None:
        self.mean.add(upload.tensors, receipt.unit.coefficient, upload.largest)

    @property
    def sums(self) -> Sequence[RunningMean]:
        return [self.mean]

    def close(self) -> None:
        apply_mean_change(self.half.server, self.mean.finish())


class DenseHalf(ServerHalf):
    """Federated averaging, or a subclass of it, bound to a module."""

    def __init__(self, algorithm: FedAvg, server: nn.Module, state: nn.Module | None = None) -> None:
        super().__init__(server, state)
        self.algorithm = algorithm
        self._kept = kept_buffers(server, algorithm.keep_buffers)

    def averaged(self) -> dict[str, Tensor]:
        """The trainable parameters and the averaged buffers of the server's module, as they are now."""
        return averaged_tensors(self.server, keep_buffers=self._kept)

    @cached_property
    def device_half(self) -> ClientSide:
        return self.algorithm.side(tuple(self.averaged()))

    def open(self, cohort: Cohort) -> Round:
        return self.algorithm.round(self, cohort)


@dataclass(frozen=True)
class FedAvg(Algorithm):
    """The dense baseline, "no sharding" in the papers: the example-weighted mean of whole models.

    A subclass that changes only what a device or a round does names its own `side`, `round` or `half`.

    Args:
        keep_buffers: Patterns of the names of buffers that keep the server's value instead of the clients' average.

    Reference:
        McMahan et al. (2017), Algorithm 1.

    Example:
        >>> FedAvg().bind(nn.Linear(3, 2)).device_half
        DenseSide(returned=('weight', 'bias'))
    """

    side: ClassVar[type[DenseSide]] = DenseSide
    round: ClassVar[type[DenseRound]] = DenseRound
    half: ClassVar[type[DenseHalf]] = DenseHalf
    updates_have_norms: ClassVar[bool] = True

    keep_buffers: Sequence[str] = ()

    def __post_init__(self) -> None:
        check_fields(self, keep_buffers=as_patterns)

    def bind(
        self,
        server: nn.Module,
        state: nn.Module | None = None,
        *,
        untrained: Collection[str] = (),
        decisions: Mapping[str, Any] | None = None,
    ) -> ServerHalf:
        return self.half(self, server, state)
