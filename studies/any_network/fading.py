"""Spectral sharding that forgets: terms held by no client in a round shrink."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

import lightning_spectral as ls
from lightning_spectral.algorithms.spectral_round import LayerRound, SpectralRound
from lightning_spectral.nn.layers.blocks import assemble, by_parameter


@dataclass(frozen=True)
class Fading(ls.SpectralSharding):
    """`SpectralSharding` whose server multiplies terms held by no client by 1 - ``fading``, once a round.

    Args:
        fading: Share that these terms lose in a round.
    """

    fading: float = 0.01

    def close(self, server: nn.Module, state: nn.Module | None, opened: SpectralRound) -> None:
        """Write the pseudo-gradients, and add the loss of the terms held by no client."""
        super().close(server, state, opened)
        for name, blocks in by_parameter(list(opened.plan.blocks.values())):
            weight = server.get_parameter(name)
            lost = [self.fading * unvisited(opened.layers[block.name]).to(weight.dtype) for block in blocks]
            assert weight.grad is not None
            weight.grad += assemble(blocks, lost, weight)


def unvisited(layer: LayerRound) -> Tensor:
    """Return the part of a layer's matrix held by no client, in float64."""
    alone = ~layer.mean.visited
    return layer.mean.u[:, alone].double() @ layer.mean.v[alone].double()
