"""Steps of the factors that move the weight as the dense step would, projected onto the weights of the same rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import lightning_spectral as ls
from lightning_spectral.algorithms.spectral.algorithm import SpectralSide
from lightning_spectral.client.device import StepActions
from lightning_spectral.nn.layers.terms import SingularTerms, sharded_layers
from lightning_spectral.protocol.records import Download

Projection = Callable[[Tensor], Tensor]


class TangentSide(SpectralSide):
    """Scales gradients by the inverse squares of the terms; what both vectors would do twice, each does by half."""

    def start(self, client: nn.Module, download: Download) -> StepActions:
        """As it is otherwise, then the projection."""
        others = super().start(client, download)
        layers = [projected(layer) for layer in sharded_layers(client).values()]

        @torch.no_grad()
        def before_step(optimizer: Optimizer) -> None:
            others.before_step(optimizer)
            for factors, projections in layers:
                for factor, projection in zip(factors, projections, strict=True):
                    if factor.grad is not None:
                        factor.grad.copy_(projection(factor.grad))

        return StepActions(before_step=before_step)


@torch.no_grad()
def projected(layer: SingularTerms) -> tuple[tuple[nn.Parameter, ...], tuple[Projection, ...]]:
    """Both factors of a layer, and what becomes of their gradients, as long as the terms are those that it holds now.

    Args:
        layer: A sharded layer whose terms are orthogonal; gradients of those below 1 are not scaled up.
    """
    lengths_u, lengths_v = layer.u.norm(dim=0), layer.v.norm(dim=1)
    u, v = layer.u / lengths_u, layer.v / lengths_v[:, None]
    of_u = (layer.omega * lengths_v).square().reciprocal().clamp(max=1.0)
    of_v = (layer.omega * lengths_u).square().reciprocal().clamp(max=1.0)

    def u_gradient(gradient: Tensor) -> Tensor:
        scaled = gradient * of_u
        return scaled - u @ (u.T @ scaled) / 2

    def v_gradient(gradient: Tensor) -> Tensor:
        scaled = gradient * of_v[:, None]
        return scaled - (scaled @ v.T) @ v / 2

    return (layer.u, layer.v), (u_gradient, v_gradient)


@dataclass(frozen=True)
class TangentSharding(ls.SpectralSharding):
    """Spectral sharding with these steps."""

    side: ClassVar[type[SpectralSide]] = TangentSide
    clip_weight_lr: float = float("inf")
