"""FIARSE: a client's sub-model consists of the server's largest weights."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor, nn

from lightning_spectral.algorithms.by_keep_ratio import ByKeepRatio
from lightning_spectral.algorithms.dense_mean import dense_mean
from lightning_spectral.algorithms.fiarse_side import HELD, FIARSESide
from lightning_spectral.arguments import Number, as_patterns, check_fields, check_matches, matches_any
from lightning_spectral.client.side import ClientSide
from lightning_spectral.functional.factors import num_terms_for
from lightning_spectral.functional.zampling.bits import pack_bits
from lightning_spectral.protocol.cohort import Cohort
from lightning_spectral.protocol.copying import normalised_weights
from lightning_spectral.protocol.exchange import (
    apply_mean_change,
    averaged_tensors,
    kept_buffers,
    travelling_tensors,
)
from lightning_spectral.protocol.per_client import PerClient, check_per_client
from lightning_spectral.protocol.records import Download, Receipt, Upload
from lightning_spectral.protocol.work_unit import WorkUnit
from lightning_spectral.sums import MeanChange, RunningMean
from lightning_spectral.sums.entry_mean import MeanEntryChange

SHARE = Number(above=0, at_most=1, hint="it is the share of weights a client holds")


@dataclass(frozen=True, eq=False)
class FIARSERound:
    """One open round.

    Attributes:
        cohort: The clients that take part.
        tensors: Parameters and buffers of the server's module, by name.
        held: For each keep ratio and each weight, the ascending indices of the entries that are held.
        masked: Running mean over the entries of the weights.
        dense: Running mean of the tensors that all clients hold whole.
    """

    cohort: Cohort
    tensors: Mapping[str, Tensor]
    held: Mapping[float, Mapping[str, Tensor]]
    masked: MeanEntryChange
    dense: MeanChange


@dataclass(frozen=True)
class FIARSE(ByKeepRatio[FIARSERound]):
    r"""Each client trains the largest weights of the server's model; all others are zero on the client.

    A client of keep ratio r gets the ceil(r m) weights of largest magnitude among all m weights of the module. Weights
    are the entries of trainable parameters of two or more dimensions; biases, normalisation layers and buffers travel
    whole. The threshold :math:`\theta` is the smallest magnitude that was sent. In local training, weights below it are
    not used, and the gradient of the others is :math:`1 + 2\theta|w| / (|w| + \theta)^2` times that of a plain weight.
    Each entry is averaged over the clients that held it; entries held by no client are unchanged.

    Only traffic shrinks: the sub-model has the same shapes as the whole model. The download holds the values and one
    bit for each weight, held or not; the upload holds the values.

    Args:
        keep_ratio: Share r of the weights a client holds: one for all, ``{ratio: share of clients}`` or one per client.
        exclude: Patterns of the names of parameters that travel whole.
        keep_buffers: Patterns of the names of buffers that keep the server's value instead of the clients' average.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If a ratio is outside (0, 1], shares do not sum to 1, or patterns are not a sequence of strings.

    Note:
        The published code also masks the biases of linear layers and convolutions, and counts clients, whereas this
        class weighs them. With ``keep_ratio=1`` there is no threshold, and this is `FedAvg`, bit for bit.

    Reference:
        Wu et al. (2024), "FIARSE: Model-heterogeneous federated learning via importance-aware submodel extraction".

    Example:
        >>> FIARSE({0.25: 0.5, 1.0: 0.5}).masked_weights(nn.Linear(3, 2))
        ('weight',)
    """

    updates_have_norms: ClassVar[bool] = True

    keep_ratio: PerClient[float] = 0.25
    exclude: Sequence[str] = ()
    keep_buffers: Sequence[str] = ()

    def __post_init__(self) -> None:
        check_fields(
            self,
            keep_ratio=partial(check_per_client, rule=SHARE),
            exclude=as_patterns,
            keep_buffers=as_patterns,
        )

    def masked_weights(self, server: nn.Module) -> tuple[str, ...]:
        """Names of the parameters of which clients hold only the largest entries.

        Raises:
            ValueError: If a pattern of ``exclude`` matches no parameter.
        """
        check_matches("exclude", self.exclude, (name for name, _ in server.named_parameters()), "parameter")
        whole = set(normalised_weights(server))
        return tuple(
            name
            for name, parameter in server.named_parameters()
            if parameter.requires_grad
            and parameter.dim() > 1
            and name not in whole
            and not matches_any(name, self.exclude)
        )

    def check(self, server: nn.Module) -> None:
        """Raise ``ValueError`` if there is no weight to choose from."""
        if not self.masked_weights(server):
            raise ValueError(
                f"FIARSE finds no weight to cut in {type(server).__name__}: none that is trained, has two dimensions "
                "and is not in `exclude`. Leave patterns out, or use FedAvg()."
            )

    def prepare(self, server: nn.Module) -> FIARSE:
        """Decide which buffers keep the server's value, once for all rounds."""
        return replace(self, keep_buffers=kept_buffers(server, self.keep_buffers))

    def leave_untrained(self, server: nn.Module, names: Collection[str]) -> FIARSE:
        """Let parameters that no optimizer steps travel whole, as the server keeps them."""
        cut = [name for name in self.masked_weights(server) if name in names]
        return replace(self, exclude=(*self.exclude, *cut)) if cut else self

    def cut_sizes(self, server: nn.Module) -> set[int]:
        """The number m of weights, as a set of one: a client of keep ratio r holds ceil(r m) of them."""
        return {sum(server.get_parameter(name).numel() for name in self.masked_weights(server))}

    def client_side(self, server: nn.Module) -> ClientSide:
        """The device half: trainable parameters and averaged buffers travel back."""
        return FIARSESide(tuple(averaged_tensors(server, keep_buffers=self.keep_buffers)))

    def open(self, server: nn.Module, state: nn.Module | None, cohort: Cohort) -> FIARSERound:
        """Find the largest weights for each keep ratio of the cohort."""
        names, averaged = self.masked_weights(server), averaged_tensors(server, keep_buffers=self.keep_buffers)
        weights = {name: averaged.pop(name) for name in names}
        masked = MeanEntryChange(weights, cohort.total, cohort.absolute)
        held = {keep_ratio: largest_entries(weights, keep_ratio) for keep_ratio in cohort.groups}
        return FIARSERound(cohort, travelling_tensors(server), held, masked, dense_mean(server, averaged, cohort))

    def send(self, opened: FIARSERound, unit: WorkUnit) -> tuple[Download, Receipt]:
        """Send what all clients hold, the largest weights and their positions; nothing is drawn."""
        keep_ratio = opened.cohort.keep_ratio_of(unit)
        tensors = dict(opened.tensors)
        if keep_ratio < 1:
            for name, entries in opened.held[keep_ratio].items():
                whole = tensors[name].flatten()
                tensors[name] = whole[entries]
                bits = torch.zeros_like(whole, dtype=torch.bool).index_fill_(0, entries, True)
                tensors[HELD + name] = pack_bits(bits)
        return Download(unit, keep_ratio, tensors), Receipt(unit, keep_ratio)

    def add(self, opened: FIARSERound, receipt: Receipt, upload: Upload) -> None:
        """Add the client's change to the entries that it held."""
        weight = receipt.unit.coefficient
        opened.masked.add(upload.tensors, opened.held[receipt.capacity], weight, upload.largest)
        opened.dense.add(upload.tensors, weight, upload.largest)

    def running_means(self, opened: FIARSERound) -> Sequence[RunningMean]:
        """One sum over entries, and one over whole tensors."""
        return [opened.masked, opened.dense]

    def close(self, server: nn.Module, state: nn.Module | None, opened: FIARSERound) -> None:
        """Set the pseudo-gradients, which are minus the mean changes."""
        apply_mean_change(server, opened.dense.finish())
        apply_mean_change(server, opened.masked.finish())


@torch.no_grad()
def largest_entries(weights: Mapping[str, Tensor], keep_ratio: float) -> dict[str, Tensor]:
    """Indices of the ceil(r m) entries of largest magnitude among all m of some tensors; of equal ones, the first.

    Args:
        weights: By name.
        keep_ratio: The share r.

    Returns:
        For each name, ascending indices in the flattened tensor.

    Example:
        >>> largest_entries({"a": torch.tensor([[3.0, -1.0]]), "b": torch.tensor([1.0, -4.0])}, 0.75)
        {'a': tensor([0, 1]), 'b': tensor([1])}
    """
    magnitudes = torch.cat([weight.abs().flatten() for weight in weights.values()])
    num_held = num_terms_for(len(magnitudes), keep_ratio)
    threshold = magnitudes.kthvalue(len(magnitudes) - num_held + 1).values
    held = magnitudes > threshold
    ties = (magnitudes == threshold).nonzero().squeeze(1)
    held[ties[: num_held - int(held.sum())]] = True
    parts = torch.split(held, [weight.numel() for weight in weights.values()])
    return {name: part.nonzero().squeeze(1) for name, part in zip(weights, parts, strict=True)}
