"""Federated averaging: every client trains the whole model."""

# Annotations are evaluated eagerly here, because jsonargparse resolves inherited ones in the file of the subclass.

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from lightning_spectral.algorithms.base import UNKNOWN, Algorithm, Known, Names, Promises, Round, ServerHalf
from lightning_spectral.client.device import ClientSide
from lightning_spectral.protocol.buffer_rules import BufferRules, averaged_parameters
from lightning_spectral.protocol.cohort import Cohort
from lightning_spectral.protocol.exchange import (
    apply_mean_change,
    load_tensors,
    returned_tensors,
    select_tensors,
    travelling_tensors,
)
from lightning_spectral.protocol.records import Download, Receipt, Upload, WorkUnit
from lightning_spectral.sums import MeanChange, RunningMean


def dense_mean(server: nn.Module, before: Mapping[str, Tensor], cohort: Cohort) -> MeanChange:
    """The running mean of the changes of some of the server's tensors.

    Buffers hold averages of data, such as BatchNorm's variances. Their weights are always divided by their sum: an
    unbiased sampler's weights may sum to 2 in a round, and a variance that moved twice as far could become negative.
    The same holds for parameters that the user's code updates, such as those of a teacher.
    """
    averages = averaged_parameters(server).union(name for name, _ in server.named_buffers())
    return MeanChange(before, cohort.total, cohort.absolute, always_divided=averages & before.keys())


def sum_of(like: Mapping[str, Tensor], cohort: Cohort, counts: Collection[str] = ()) -> MeanChange:
    """A running sum, or mean, of float64 tensors that are given for each client, not of changes of the server's.

    Only names, shapes and device of ``like`` count. Weights are coefficients of units; ``counts`` as for `MeanChange`.
    """
    zeros = {name: tensor.new_zeros((), dtype=torch.float64).expand(tensor.shape) for name, tensor in like.items()}
    return MeanChange(zeros, cohort.total, cohort.absolute, counts=counts)


@dataclass(frozen=True)
class DenseSide(ClientSide):
    """The device half of federated averaging.

    Attributes:
        returned: Names of the tensors that are sent back.
    """

    returned: tuple[str, ...]

    def load(self, client: nn.Module, download: Download) -> None:
        load_tensors(client, download.tensors)

    def collect(self, client: nn.Module, download: Download) -> Upload:
        return Upload(download.unit, select_tensors(client, self.returned))


class DenseRound(Round):
    """One open round in which tensors are sent whole, all or some of them.

    Attributes:
        tensors: Parameters and buffers of the server's module, by name, unless they are sent apart.
        mean: Running mean of the clients' changes.
    """

    def __init__(self, half: "DenseHalf", cohort: Cohort) -> None:
        self.half = half
        self.cohort = cohort
        self.tensors: Mapping[str, Tensor] = travelling_tensors(half.server, half.apart)
        self.mean = dense_mean(half.server, half.rules.averaged(half.returned()), cohort)

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
    """An algorithm that sends tensors whole, all or some of them, bound to a module.

    Attributes:
        apart: Names of the tensors that are sent in a form of the algorithm's own; all others are sent whole.
    """

    apart: Names = ()

    def returned(self) -> dict[str, Tensor]:
        """What clients send back of the tensors that are sent whole, as it is now; `rules` say what is averaged."""
        return returned_tensors(self.server, self.apart, self.rules)


class FedAvgHalf(DenseHalf):
    """Federated averaging, or a subclass of it, bound to a module; ``state`` is what `Algorithm.new_state` made."""

    def __init__(
        self, algorithm: "FedAvg", server: nn.Module, state: nn.Module | None = None, rules: BufferRules | None = None
    ) -> None:
        super().__init__(server, rules)
        self.algorithm, self.state = algorithm, state

    @property
    def device_options(self) -> Mapping[str, Any]:
        """Arguments of the device half besides the names of what is sent back."""
        return {}

    @cached_property
    def client_side(self) -> ClientSide:
        return self.algorithm.side(tuple(self.returned()), **self.device_options)

    def open(self, cohort: Cohort) -> Round:
        return self.algorithm.round(self, cohort)


@dataclass(frozen=True)
class FedAvg(Algorithm):
    """The dense baseline, "no sharding" in the papers: the example-weighted mean of whole models.

    A subclass that changes only what a device or a round does names its own `side`, `round` or `half`. One that keeps
    the promises of this class says so: ``promises = FedAvg.promises``.

    Reference:
        McMahan et al. (2017), Algorithm 1.

    Example:
        >>> FedAvg().bind(nn.Linear(3, 2)).client_side.returned
        ('weight', 'bias')
    """

    side: ClassVar[type[DenseSide]] = DenseSide
    round: ClassVar[type[DenseRound]] = DenseRound
    half: ClassVar[type[FedAvgHalf]] = FedAvgHalf
    promises: ClassVar[Promises] = Promises(
        new_values=True,
        values_alone=True,
        same_tensors=True,
        one_sum=True,
        noise_hides=True,
        parts_stay=True,
        any_steps=True,
        clients_may_join=True,
    )

    def bind(self, server: nn.Module, state: nn.Module | None = None, known: Known = UNKNOWN) -> ServerHalf:
        return self.half(self, server, state, known.rules)
