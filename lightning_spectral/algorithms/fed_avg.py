"""Federated averaging: every client trains the whole model."""

# Annotations are evaluated eagerly here, because jsonargparse resolves inherited ones in the file of the subclass.

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from lightning_spectral.algorithms.base import Algorithm, Decisions, Names, Round, ServerHalf
from lightning_spectral.algorithms.compression import WHOLE, Compression, ErrorFeedback, error_feedback
from lightning_spectral.algorithms.personal import NOTHING, Personal, check_personal, personal_names, rules_with
from lightning_spectral.arguments import Whole, as_patterns, check_fields
from lightning_spectral.client.device import ClientSide, StepActions
from lightning_spectral.errors import check_is
from lightning_spectral.protocol.buffer_rules import Rules, as_rules, averaged_parameters, buffer_rules
from lightning_spectral.protocol.cohort import Cohort
from lightning_spectral.protocol.exchange import apply_mean_change, load_tensors, select_tensors, travelling_tensors
from lightning_spectral.protocol.records import Download, Receipt, Tensors, Upload, WorkUnit
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

    Only names, shapes and device of ``like`` count. The weights are the cohort's coefficients; ``counts`` as for
    `MeanChange`.
    """
    zeros = {name: tensor.new_zeros((), dtype=torch.float64).expand(tensor.shape) for name, tensor in like.items()}
    return MeanChange(zeros, cohort.total, cohort.absolute, counts=counts)


@dataclass(frozen=True)
class DenseSide(ClientSide):
    """The device half of federated averaging.

    Attributes:
        returned: Names of the tensors that are sent back.
        personal: What stays with each client.
        feedback: What is packed.
        packs: Whether a class that defines `collect`, `unpack` or `keep` still packs what `feedback` says.
    """

    packs: ClassVar[bool] = False

    returned: tuple[str, ...]
    personal: Personal = field(default=NOTHING, kw_only=True)
    feedback: ErrorFeedback = field(default=WHOLE, kw_only=True)

    def load(self, client: nn.Module, download: Download) -> None:
        own = self.personal.of(download.client_state) if self.personal.names else {}
        load_tensors(client, {**download.tensors, **own})

    def start(self, client: nn.Module, download: Download) -> StepActions | Sequence[StepActions] | None:
        return self.personal.phases(client, None) if self.personal.names else None

    def sent_back(self, client: nn.Module, download: Download) -> dict[str, Tensor]:
        """What a trained client sends back, before it is packed."""
        return select_tensors(client, self.returned)

    def collect(self, client: nn.Module, download: Download) -> Upload:
        tensors = self.sent_back(client, download)
        return Upload(download.unit, self.feedback.packed(tensors, download) if self.feedback.names else tensors)

    def unpack(self, download: Download, upload: Upload) -> Upload:
        return self.feedback.opened(upload, download) if self.feedback.names else upload

    @property
    def keeps_state(self) -> bool:
        return bool(self.personal.names or self.feedback.names) or type(self).keep is not DenseSide.keep

    def keep(self, client: nn.Module, download: Download, upload: Upload) -> Tensors:
        kept = select_tensors(client, self.personal.names)
        if not self.feedback.names:
            return kept
        return {**kept, **self.feedback.residuals(self.sent_back(client, download), download, upload.tensors)}

    def own_model(self, client_state: Tensors) -> Tensors:
        return self.personal.of(client_state)


class DenseRound(Round):
    """One open round in which tensors are sent whole, all or some of them.

    Attributes:
        tensors: Parameters and buffers of the server's module, by name, unless they are sent apart.
        mean: Running mean of the clients' changes.
    """

    def __init__(self, half: ServerHalf, cohort: Cohort) -> None:
        self.half = half
        self.cohort = cohort
        self.tensors: Mapping[str, Tensor] = travelling_tensors(half.server, half.apart)
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

    def __init__(
        self, algorithm: "FedAvg", server: nn.Module, state: nn.Module | None = None, decisions: Decisions = None
    ) -> None:
        self.personal = Personal(personal_names(server, algorithm.personal), algorithm.personal_epochs)
        rules = rules_with(self.personal.names, server, algorithm.buffers)
        super().__init__(server, state, buffer_rules(server, rules, decisions))
        self.algorithm = algorithm

    @property
    def device_options(self) -> Mapping[str, Any]:
        """Arguments of the device half besides the names of what is sent back."""
        return {"personal": self.personal}

    @cached_property
    def device_half(self) -> ClientSide:
        returned = self.returned()
        trained = {n: returned[n] for n, p in self.server.named_parameters() if n in returned and p.requires_grad}
        feedback = error_feedback(self.algorithm.compression, trained)
        return self.algorithm.side(tuple(returned), feedback=feedback, **self.device_options)

    def open(self, cohort: Cohort) -> Round:
        return self.algorithm.round(self, cohort)


@dataclass(frozen=True)
class FedAvg(Algorithm):
    """The dense baseline, "no sharding" in the papers: the example-weighted mean of whole models.

    A subclass that changes only what a device or a round does names its own `side`, `round` or `half`.

    Args:
        buffers: What becomes of buffers, by patterns of their names: ``"mean"`` for the clients' average, the default
            for floating-point numbers; ``"min"`` or ``"max"`` for the clients' smallest or largest value of each entry;
            ``"server"`` to keep the server's value, the default for all others. The first pattern that matches counts.
        personal: Patterns of the names of parameters and buffers that stay with each client: a head (FedPer), or
            normalisation layers with their running averages (FedBN). The server never gets them; its own values
            stay as they are and are where new clients begin. `ClientEvaluation` evaluates every client with its own.
        personal_epochs: Passes over a client's data that train the personal parameters alone, before the
            ``local_epochs`` that train the others (FedRep); 0 to train all of them together.
        compression: How clients pack the changes of their parameters for the upload, `TopK` or `Int8`; ``None`` for new
            values, whole. What packing loses, a device keeps and adds to its next upload (error feedback), so each
            client keeps one number per parameter. Downloads, buffers, and parameters that it would not make smaller
            are sent whole.

    Note:
        Error feedback makes up for what was not sent once the client takes part again. Where that is seldom, much of it
        comes late, or never; nor does what a server cuts off, with a bound on updates or to add noise.

    Reference:
        McMahan et al. (2017), Algorithm 1. Arivazhagan et al. (2019), FedPer; Collins et al. (2021), FedRep, Algorithm
        1; Li et al. (2021), FedBN. Karimireddy et al. (2019), error feedback.

    Example:
        >>> FedAvg().bind(nn.Linear(3, 2)).device_half.returned
        ('weight', 'bias')
        >>> FedAvg(buffers={"num_batches_tracked": "max"}).bind(nn.BatchNorm1d(2, affine=False)).device_half.returned
        ('running_mean', 'running_var', 'num_batches_tracked')
        >>> FedAvg(personal=["bias"]).bind(nn.Linear(3, 2)).device_half.returned
        ('weight',)
        >>> from lightning_spectral.algorithms import Int8, TopK, cost_table
        >>> line, choices = nn.Linear(300, 10), [FedAvg(compression=choice) for choice in (None, Int8(), TopK(0.01))]
        >>> [cost_table(line, choice, [1], torch.zeros(1, 300)).at[1].uplink_bytes for choice in choices]
        [12040, 3054, 248]
    """

    side: ClassVar[type[DenseSide]] = DenseSide
    round: ClassVar[type[DenseRound]] = DenseRound
    half: ClassVar[type[DenseHalf]] = DenseHalf
    updates_have_norms: ClassVar[bool] = True

    buffers: Rules = field(default_factory=dict)
    personal: Sequence[str] = field(default=(), kw_only=True)
    personal_epochs: int = field(default=0, kw_only=True)
    compression: Compression | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        check_fields(self, buffers=as_rules, personal=as_patterns, personal_epochs=Whole(at_least=0))
        check_personal(self.personal, self.personal_epochs)
        if self.compression is None:
            return
        check_is("compression", self.compression, Compression)
        own = [side for side in self.side.__mro__ if issubclass(side, DenseSide) and side is not DenseSide]
        if any({"collect", "unpack", "keep"} & vars(side).keys() and not vars(side).get("packs") for side in own):
            raise ValueError(
                f"`compression` cannot pack the uploads of {type(self).__name__}, which has uploads, or states of "
                "devices, of its own; leave it out, or use FedAvg."
            )

    @property
    def sums_are_all(self) -> bool:
        return self.compression is None  # what is packed has no place in a sum of masked values

    def check(self, server: nn.Module) -> None:
        personal_names(server, self.personal)

    def check_privacy(self) -> None:
        """Allow noise: what clients send back is summed, and nothing else is released."""

    def bind(
        self, server: nn.Module, state: nn.Module | None = None, *, untrained: Names = (), decisions: Decisions = None
    ) -> ServerHalf:
        return self.half(self, server, state, decisions)
