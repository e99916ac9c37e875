"""The device half of FIARSE: a model with zeros, of which only large weights are used and trained."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_spectral.algorithms.fed_avg import DenseSide
from lightning_spectral.client.side import StepActions
from lightning_spectral.functional.zampling import unpack_bits
from lightning_spectral.protocol.exchange import load_tensors, select_tensors
from lightning_spectral.protocol.records import Download, Tensors, Upload

HELD = "held:"  # prefix to the name of a weight: one bit for each of its entries
THRESHOLDED = "_thresholded_weights"  # of a sub-model, in its `__dict__`


class ThresholdedWeight:
    r"""A weight of which a step uses only the entries that are at least as large as a threshold.

    In the gradient of :math:`w\,[|w| \ge \theta]`, the derivative of the step function is taken to be
    :math:`2\theta / (|w| + \theta)^2` where the entry is used, and zero elsewhere. So entries near the threshold have
    up to 3/2 of the gradient.
    """

    def __init__(self, weight: nn.Parameter, held: Tensor, threshold: float) -> None:
        self.weight, self._held, self._threshold = weight, held, threshold
        self._below: Tensor | None = None  # the whole weight, while its small entries are zero

    @torch.no_grad()
    def use(self) -> None:
        """Set entries below the threshold to zero, until `restore`."""
        self.restore()
        self._below = self.weight.clone()
        self.weight.mul_(self._used())

    @torch.no_grad()
    def restore(self) -> None:
        if self._below is not None:
            self.weight.copy_(self._below)
            self._below = None

    @torch.no_grad()
    def correct_gradient(self) -> None:
        if self.weight.grad is not None:
            magnitude = self.weight.abs()
            whole = (magnitude + self._threshold).clamp(min=torch.finfo(magnitude.dtype).tiny)
            slope = 2 * (self._threshold / whole) * (magnitude / whole)
            self.weight.grad.mul_((1 + slope) * self._used())

    def _used(self) -> Tensor:
        return self._held & (self.weight.abs() >= self._threshold)


@dataclass(frozen=True)
class FIARSESide(DenseSide):
    """Models whose absent weights are zero and stay zero."""

    def load(self, client: nn.Module, download: Download) -> None:
        values = {name: tensor for name, tensor in download.tensors.items() if not name.startswith(HELD)}
        for name, held in held_entries(client, download.tensors).items():
            values[name] = torch.zeros_like(client.get_parameter(name)).masked_scatter_(held, values[name])
        load_tensors(client, values)

    def start(self, client: nn.Module, download: Download) -> StepActions | None:
        """Apply a threshold, the smallest magnitude sent, in each step; do nothing if the client holds all weights."""
        held = held_entries(client, download.tensors)
        smallest = [float(download.tensors[name].abs().min()) for name in held if download.tensors[name].numel()]
        weights = [ThresholdedWeight(client.get_parameter(name), mask, min(smallest)) for name, mask in held.items()]
        vars(client)[THRESHOLDED] = weights

        def use() -> None:
            for weight in weights:
                weight.use()

        def correct(optimizer: Optimizer) -> None:
            stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
            for weight in weights:
                weight.restore()
                if id(weight.weight) in stepped:
                    weight.correct_gradient()

        return StepActions(use, correct) if weights else None

    def collect(self, client: nn.Module, download: Download) -> Upload:
        for weight in vars(client).pop(THRESHOLDED, ()):
            weight.restore()  # from a step that was begun but not taken
        tensors, held = select_tensors(client, self.returned), held_entries(client, download.tensors)
        return Upload(download.unit, {n: t[held[n]] if n in held else t for n, t in tensors.items()})


def held_entries(client: nn.Module, tensors: Tensors) -> dict[str, Tensor]:
    """Which entries of its weights a client was sent, as booleans in their shapes; weights sent whole are left out."""
    packed = {n.removeprefix(HELD): bits for n, bits in tensors.items() if n.startswith(HELD)}
    shapes = {name: client.get_parameter(name).shape for name in packed}
    return {name: unpack_bits(bits, shapes[name].numel()).view(shapes[name]) for name, bits in packed.items()}
