"""The device half of sub-models by width: the user's module with fewer channels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from lightning_spectral.algorithms.fed_avg import DenseSide
from lightning_spectral.algorithms.width.averages import STEP_COUNTS, by_width
from lightning_spectral.client.side import StepActions
from lightning_spectral.nn.width.narrow_steps import NarrowSteps, cut_sizes, narrow_to
from lightning_spectral.nn.width.plan import WidthPlan
from lightning_spectral.nn.width.sub_model import cut_to
from lightning_spectral.protocol.records import Download, Upload
from lightning_spectral.protocol.rng import derived_generator

NARROW_STEPS = "_narrow_steps"  # of a sub-model, in its `__dict__`
COUNTER = "num_batches_tracked"


@dataclass(frozen=True)
class WidthSide(DenseSide):
    """Sub-models that have some channels of each group, and are ordinary modules otherwise.

    Attributes:
        plan: Which channels belong together.
        scaled: Names of the layers whose outputs are divided by the keep ratio while training.
        step_widths: The keep ratios from which local steps draw, up to the client's own; empty to always use its own.
        averages: Names of the running averages of which each of these has its own; empty if they share them.
    """

    plan: WidthPlan
    scaled: tuple[str, ...] = ()
    step_widths: tuple[float, ...] = ()
    averages: tuple[str, ...] = ()

    def take_form(self, module: nn.Module, capacity: float) -> None:
        widths = [width for width in self.step_widths if width < capacity]
        smaller = {width: cut_sizes(module, self.plan, width) for width in widths}
        cut_to(module, self.plan, capacity)
        for name in self.scaled if capacity < 1 else ():
            module.get_submodule(name).register_forward_hook(partial(_divide, capacity))
        if not self.step_widths:
            return
        own = {*self.averages, *(f"{name.rpartition('.')[0]}.{COUNTER}".lstrip(".") for name in self.averages)}
        narrow = {w: narrow_to(module, small, self.plan, (capacity, w), own) for w, small in smaller.items()}
        vars(module)[NARROW_STEPS] = NarrowSteps(module, narrow)

    @torch.no_grad()
    def load(self, client: nn.Module, download: Download) -> None:
        averages = self._averages(client)
        rest = {name: tensor for name, tensor in download.tensors.items() if name not in averages}
        super().load(client, replace(download, tensors=rest))
        for name, tensor in averages.items():
            tensor.copy_(download.tensors[name])
        for buffers in _buffers(client).values():
            for name in buffers.keys() - {*self.averages}:  # counters, which do not travel back
                buffers[name].copy_(client.get_buffer(name))

    def collect(self, client: nn.Module, download: Download) -> Upload:
        upload = super().collect(client, download)
        if not (averages := self._averages(client)):
            return upload
        counts = vars(client)[NARROW_STEPS].counts
        steps = torch.tensor([counts[width] for width in (*_buffers(client), download.capacity)])
        device = next(iter(averages.values())).device
        return replace(upload, tensors={**upload.tensors, **averages, STEP_COUNTS: steps.to(device)})

    def _averages(self, client: nn.Module) -> dict[str, Tensor]:
        """The averages of smaller widths, by the names under which they travel."""
        found = {width: {name: own[name] for name in self.averages} for width, own in _buffers(client).items()}
        return by_width(found)

    def start(self, client: nn.Module, download: Download) -> StepActions | None:
        widths = [width for width in self.step_widths if width <= download.capacity]
        if not widths:
            return None
        steps: NarrowSteps = vars(client)[NARROW_STEPS]
        generator = derived_generator(download.seed, "step widths", *download.ids)

        def draw() -> None:
            steps.use(widths[int(torch.randint(len(widths), (), generator=generator))])

        steps.start_client()
        return StepActions(draw, lambda _: steps.end_backward(), steps.restore)


def _buffers(client: nn.Module) -> dict[float, Mapping[str, Tensor]]:
    """The buffers that the smaller widths of a sub-model have of their own, by width; empty if it draws no widths."""
    steps: NarrowSteps | None = vars(client).get(NARROW_STEPS)
    return {} if steps is None else steps.buffers


def _divide(keep_ratio: float, layer: nn.Module, inputs: Sequence[object], output: Tensor) -> Tensor:
    return output / keep_ratio if layer.training else output
