"""The server half of FIARSE: it sends the largest weights, and averages each entry over those who held it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from lightning_spectral.algorithms.base import Round, ServerHalf
from lightning_spectral.algorithms.dense_mean import dense_mean
from lightning_spectral.algorithms.fiarse.device import HELD, FIARSESide
from lightning_spectral.functional.spectra import num_terms_for
from lightning_spectral.functional.zampling import pack_bits
from lightning_spectral.protocol.buffer_rules import BufferRules
from lightning_spectral.protocol.cohort import Cohort
from lightning_spectral.protocol.exchange import (
    apply_mean_change,
    averaged_tensors,
    returned_tensors,
    travelling_tensors,
)
from lightning_spectral.protocol.records import Download, Receipt, Upload, WorkUnit
from lightning_spectral.sums import MeanChange, RunningMean


class FIARSEHalf(ServerHalf):
    """FIARSE bound to a module; ``masked`` names the parameters of which clients hold only the largest entries."""

    def __init__(self, server: nn.Module, masked: Sequence[str], buffers: BufferRules) -> None:
        super().__init__(server, buffers=buffers)
        self.masked = tuple(masked)

    @property
    def device_half(self) -> FIARSESide:
        return FIARSESide(tuple(returned_tensors(self.server, buffers=self.buffers)))

    def open(self, cohort: Cohort) -> FIARSERound:
        return FIARSERound(self, cohort)


class FIARSERound(Round):
    """One open round.

    Attributes:
        tensors: Parameters and buffers of the server's module, by name.
        held: For each keep ratio and each weight, the ascending indices of the entries that are held.
        masked: Running mean over the entries of the weights.
        dense: Running mean of the tensors that all clients hold whole.
    """

    def __init__(self, half: FIARSEHalf, cohort: Cohort) -> None:
        before = averaged_tensors(half.server, buffers=half.buffers)
        weights = {name: before.pop(name) for name in half.masked}
        self.server, self.cohort = half.server, cohort
        self.tensors = travelling_tensors(half.server)
        self.held = {keep_ratio: largest_entries(weights, keep_ratio) for keep_ratio in cohort.groups}
        self.masked = MeanChange(weights, cohort.total, cohort.absolute, by_index=dict.fromkeys(weights))
        self.dense = dense_mean(half.server, before, cohort)

    def send(self, unit: WorkUnit) -> tuple[Download, Receipt]:
        keep_ratio = self.cohort.keep_ratio_of(unit)
        tensors = dict(self.tensors)
        if keep_ratio < 1:
            for name, entries in self.held[keep_ratio].items():
                whole = tensors[name].flatten()
                tensors[name] = whole[entries]
                bits = torch.zeros_like(whole, dtype=torch.bool).index_fill_(0, entries, True)
                tensors[HELD + name] = pack_bits(bits)
        return Download(unit, keep_ratio, tensors), Receipt(unit, keep_ratio)

    def add(self, receipt: Receipt, upload: Upload) -> None:
        weight = receipt.unit.coefficient
        self.masked.add(upload.tensors, weight, upload.largest, where=self.held[receipt.capacity])
        self.dense.add(upload.tensors, weight, upload.largest)

    @property
    def sums(self) -> Sequence[RunningMean]:
        return [self.masked, self.dense]

    def close(self) -> None:
        apply_mean_change(self.server, self.dense.finish())
        apply_mean_change(self.server, self.masked.finish())


@torch.no_grad()
def largest_entries(weights: Mapping[str, Tensor], keep_ratio: float) -> dict[str, Tensor]:
    """Ascending flat indices of the ceil(r m) entries of largest magnitude among all m; of equal ones, the first.

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
