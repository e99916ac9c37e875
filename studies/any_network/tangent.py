"""Steps of the factors that move the weight as the dense step would, projected onto the weights of the same rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import lightning_spectral as ls
from lightning_spectral.algorithms.spectral.device import SpectralSide
from lightning_spectral.client.side import StepActions
from lightning_spectral.nn.layers.terms import SingularTerms, sharded_layers
from lightning_spectral.protocol.records import Download

LARGEST = 1.0  # factor on a gradient


class TangentSide(SpectralSide):
    """Scales gradients by the inverse squares of the terms; what both vectors would do twice, each does by half."""

    largest: ClassVar[float] = LARGEST

    def start(self, client: nn.Module, download: Download) -> StepActions:
        """As it is otherwise, then the projection."""
        others, layers = super().start(client, download), list(sharded_layers(client).values())
        bases = [self._basis(layer) for layer in layers]

        @torch.no_grad()
        def before_step(optimizer: Optimizer) -> None:
            others.before_step(optimizer)
            for layer, (u, v, of_u, of_v) in zip(layers, bases, strict=True):
                if layer.u.grad is not None and layer.v.grad is not None:
                    du, dv = layer.u.grad * of_u, layer.v.grad * of_v[:, None]
                    layer.u.grad.copy_(du - u @ (u.T @ du) / 2)
                    layer.v.grad.copy_(dv - (dv @ v.T) @ v / 2)

        return StepActions(before_step=before_step)

    @torch.no_grad()
    def _basis(self, layer: SingularTerms) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Unit vectors of the terms as they were sent, and the factors on the gradients of both."""
        lengths_u, lengths_v = layer.u.norm(dim=0), layer.v.norm(dim=1)
        of_u = (layer.omega * lengths_v).square().reciprocal().clamp(max=self.largest)
        of_v = (layer.omega * lengths_u).square().reciprocal().clamp(max=self.largest)
        return layer.u / lengths_u, layer.v / lengths_v[:, None], of_u, of_v


class TangentUpSide(TangentSide):
    """The same, also upwards."""

    largest: ClassVar[float] = 10.0


@dataclass(frozen=True)
class TangentSharding(ls.SpectralSharding):
    """Spectral sharding with these steps."""

    side: ClassVar[type[SpectralSide]] = TangentSide
    clip_weight_lr: float = float("inf")


@dataclass(frozen=True)
class TangentUpSharding(TangentSharding):
    """Spectral sharding with these steps, also upwards."""

    side: ClassVar[type[SpectralSide]] = TangentUpSide
