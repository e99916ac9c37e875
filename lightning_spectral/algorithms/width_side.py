"""The device half of sub-models by width: the user's module with fewer channels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from lightning_spectral.algorithms.fed_avg import DenseSide
from lightning_spectral.client.side import StepActions
from lightning_spectral.nn.width.narrow_steps import NarrowSteps, narrow_to
from lightning_spectral.nn.width.plan import WidthPlan
from lightning_spectral.nn.width.sub_model import cut_module
from lightning_spectral.protocol.exchange import copy_module
from lightning_spectral.protocol.records import Download
from lightning_spectral.protocol.rng import derived_generator

NARROW_STEPS = "_narrow_steps"  # of a sub-model, in its `__dict__`


@dataclass(frozen=True)
class WidthSide(DenseSide):
    """Sub-models that have some channels of each group, and are ordinary modules otherwise.

    Attributes:
        plan: Which channels belong together.
        scaled: Names of the layers whose outputs are divided by the keep ratio while training.
        step_widths: The keep ratios that local steps have, up to the client's own; empty for always its own.
    """

    plan: WidthPlan
    scaled: tuple[str, ...] = ()
    step_widths: tuple[float, ...] = ()

    def build(self, module: nn.Module, capacity: float) -> nn.Module:
        """A copy of ``module`` with the first channels; all clients of a keep ratio have as many."""
        client = self._cut(module, capacity)
        for name in self.scaled if capacity < 1 else ():
            client.get_submodule(name).register_forward_hook(partial(_divide, capacity))
        if not self.step_widths:
            return client
        narrower = {width: self._cut(module, width) for width in self.step_widths if width < capacity}
        narrow = {width: narrow_to(client, small, self.plan, (capacity, width)) for width, small in narrower.items()}
        vars(client)[NARROW_STEPS] = NarrowSteps(client, narrow)
        return client

    def _cut(self, module: nn.Module, keep_ratio: float) -> nn.Module:
        indices = self.plan.indices(self.plan.first(keep_ratio))
        # What is about to be cut is not copied first.
        parameters = dict(module.named_parameters())
        client: nn.Module = copy_module(module, [parameters[name] for name in indices if name in parameters])
        cut_module(client, indices)
        return client

    def start(self, client: nn.Module, download: Download) -> StepActions | None:
        """Draw a width before each step, all up to the client's own equally likely."""
        widths = [width for width in self.step_widths if width <= download.capacity]
        if not widths:
            return None
        steps: NarrowSteps = vars(client)[NARROW_STEPS]
        generator = derived_generator(download.seed, "step widths", *download.ids)

        def draw() -> None:
            steps.use(widths[int(torch.randint(len(widths), (), generator=generator))])

        steps.start_client()
        return StepActions(draw, lambda _: steps.end_backward(), steps.restore)


def _divide(keep_ratio: float, layer: nn.Module, inputs: Sequence[object], output: Tensor) -> Tensor:
    return output / keep_ratio if layer.training else output
