"""The device half of sub-models by width: the user's module with fewer channels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from torch import Tensor, nn

from lightning_spectral.algorithms.fed_avg import DenseSide
from lightning_spectral.nn.width.plan import WidthPlan
from lightning_spectral.nn.width.sub_model import cut_module
from lightning_spectral.protocol.exchange import copy_module


@dataclass(frozen=True)
class WidthSide(DenseSide):
    """Sub-models that have some channels of each group, and are ordinary modules otherwise.

    Attributes:
        plan: Which channels belong together.
        scaled: Names of the layers whose outputs are divided by the keep ratio while training.
    """

    plan: WidthPlan
    scaled: tuple[str, ...] = ()

    def build(self, module: nn.Module, capacity: float) -> nn.Module:
        """A copy of ``module`` with the first channels; all clients of a keep ratio have as many."""
        indices = self.plan.indices(self.plan.first(capacity))
        # What is about to be cut is not copied first.
        parameters = dict(module.named_parameters())
        client: nn.Module = copy_module(module, [parameters[name] for name in indices if name in parameters])
        cut_module(client, indices)
        for name in self.scaled if capacity < 1 else ():
            client.get_submodule(name).register_forward_hook(partial(_divide, capacity))
        return client


def _divide(keep_ratio: float, layer: nn.Module, inputs: Sequence[object], output: Tensor) -> Tensor:
    return output / keep_ratio if layer.training else output
