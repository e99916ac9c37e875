"""The two halves of sub-models by width, and its rounds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

import torch
from torch import Tensor, nn

from lightning_spectral.algorithms.base import Round, ServerHalf
from lightning_spectral.algorithms.fed_avg import DenseSide
from lightning_spectral.algorithms.width.averages import (
    STEP_COUNTS,
    WidthAverages,
    arrange,
    by_width,
    first_entries,
    without_rows,
)
from lightning_spectral.client.device import StepActions
from lightning_spectral.nn.torch_modules import names_of_averages
from lightning_spectral.nn.width.narrow_steps import NarrowSteps, cut_sizes, narrow_to
from lightning_spectral.nn.width.plan import ChannelGroup, WidthPlan, cut_to, take
from lightning_spectral.protocol.buffer_rules import NO_RULES, BufferRules
from lightning_spectral.protocol.cohort import Cohort, Workers
from lightning_spectral.protocol.exchange import (
    apply_mean_change,
    averaged_tensors,
    returned_tensors,
    travelling_tensors,
)
from lightning_spectral.protocol.frozen_base import frozen_parameters
from lightning_spectral.protocol.records import Download, Receipt, Upload, WorkUnit
from lightning_spectral.protocol.rng import derived_generator
from lightning_spectral.sharding.channels import ChannelChoice, PrefixChannels
from lightning_spectral.sums import MeanChange, RunningMean

Tensors = Mapping[str, Tensor]
NARROW_STEPS = "_narrow_steps"  # of a sub-model, in its `__dict__`
COUNTER = "num_batches_tracked"


class WidthHalf(ServerHalf):
    """Sub-models by width, bound to a module.

    Args:
        server: The server's module.
        state: The running averages of widths narrower than the widest clients', if these have their own.
        plan: Which channels belong together.
        channels: Which of them a client gets.
        keep_ratios: The clients' keep ratios, distinct and ascending.
        buffers: The rules of buffers.
        scaled: Names of the layers whose outputs are divided by the keep ratio while training.
        step_widths: The keep ratios from which local steps draw.
        averages: Names of the running averages of which each of these has its own.
    """

    state: WidthAverages | None

    def __init__(
        self,
        server: nn.Module,
        state: WidthAverages | None,
        plan: WidthPlan,
        channels: ChannelChoice,
        keep_ratios: Sequence[float],
        *,
        buffers: BufferRules = NO_RULES,
        scaled: tuple[str, ...] = (),
        step_widths: tuple[float, ...] = (),
        averages: tuple[str, ...] = (),
    ) -> None:
        super().__init__(server, state, buffers)
        self.plan = plan
        self.channels = channels
        self.keep_ratios = tuple(keep_ratios)
        self.scaled = scaled
        self.step_widths = step_widths
        self.averages = averages

    def averaged(self) -> dict[str, Tensor]:
        return averaged_tensors(self.server, buffers=self.buffers)

    @cached_property
    def device_half(self) -> WidthSide:
        returned = tuple(returned_tensors(self.server, buffers=self.buffers))
        return WidthSide(returned, self.plan, self.scaled, self.step_widths, self.averages)

    def initialize(self, workers: Workers) -> str:
        sizes = {ratio: self.plan.num_parameters(self.server, ratio) for ratio in self.keep_ratios}
        listed = ", ".join(f"{size:,} at keep ratio {ratio:g}" for ratio, size in sizes.items())
        total = sum(parameter.numel() for parameter in self.server.parameters())
        widest = self.keep_ratios[-1]
        untrained = isinstance(self.channels, PrefixChannels) and widest < 1 and self.plan.groups
        alone = f"No client trains the channels above keep ratio {widest:g}, which stay in the server's module."
        notes = "".join(f"\n{note}" for note in [*[alone] * bool(untrained), *self.plan.notes])
        return f"WidthSharding: sub-models have {listed}, of {total:,} parameters.{notes}"

    def settle(self) -> None:
        if self.state is not None:
            self.state.begin(self.server)

    def frozen_tensors(self) -> Tensors:
        """The parameters that need no gradient and are never cut; of cut ones a client may get a new part each time."""
        return {name: t for name, t in frozen_parameters(self.server).items() if name not in self.plan.labels}

    @property
    def averages_may_rest(self) -> bool:
        """Whether clients send averages back, and may take narrower steps only, which leave these alone."""
        return bool(self.step_widths and self.averaged().keys() & {*names_of_averages(self.server)})

    def open(self, cohort: Cohort) -> WidthRound:
        return WidthRound(self, cohort)


class WidthRound(Round):
    """One open round.

    Attributes:
        tensors: All tensors of the server's module, by name.
        averages: The running averages of each width that has its own on the server, by name; other widths use the first
            entries of the module's.
        mean: Running mean of the clients' changes.
    """

    def __init__(self, half: WidthHalf, cohort: Cohort) -> None:
        self.half = half
        self.cohort = cohort
        self.tensors: Tensors = travelling_tensors(half.server)
        self.averages: Mapping[float, Tensors] = {} if half.state is None else half.state.widths
        averaged, own = half.averaged(), by_width(self.averages)
        buffers = {name for name, _ in half.server.named_buffers() if name in averaged} | own.keys()
        before = {**averaged, **own}
        by_index = dict.fromkeys(before)
        self.mean = MeanChange(before, cohort.total, cohort.absolute, always_divided=buffers, by_index=by_index)

    def send(self, unit: WorkUnit) -> tuple[Download, Receipt]:
        keep_ratio = self.cohort.capacity_of(unit)
        kept = {group.name: self._kept(unit, group, keep_ratio) for group in self.half.plan.groups}
        indices = self.half.plan.indices(kept)
        narrower = [width for width in self.half.step_widths if width < keep_ratio]
        tensors = self.parts(indices, keep_ratio) | self.narrower_averages(narrower)
        return Download(unit, keep_ratio, tensors), Receipt(unit, keep_ratio, kept)

    def _kept(self, unit: WorkUnit, group: ChannelGroup, keep_ratio: float) -> Tensor:
        cohort = self.cohort
        generator = derived_generator(cohort.seed, "channels", cohort.round_idx, *unit.ids, group.name)
        return self.half.channels(group.num_units, group.num_kept(keep_ratio), cohort.round_idx, generator)

    def parts(self, indices: Mapping[str, Sequence[Tensor]], keep_ratio: float) -> dict[str, Tensor]:
        """The entries of every tensor that a client holds, with the averages of its own width if that has some."""
        cut = {name: take(tensor, indices.get(name, ())) for name, tensor in self.tensors.items()}
        return {**cut, **self.averages.get(keep_ratio, {})}

    def narrower_averages(self, widths: Iterable[float]) -> dict[str, Tensor]:
        """Each width's own averages, for the narrower widths that a client may draw; empty if widths share them."""
        return by_width({width: self._averages_at(width) for width in widths}) if self.half.averages else {}

    def _averages_at(self, width: float) -> Tensors:
        return self.averages.get(width) or first_entries(self.tensors, self.half.plan, self.half.averages, width)

    def add(self, receipt: Receipt, upload: Upload) -> None:
        tensors, positions, largest = upload.tensors, self.positions(receipt), upload.largest
        if self.averages:
            held = arrange(upload, positions, self.half.averages, receipt.capacity, list(self.averages))
            tensors, positions, largest = held
        if upload.untrained_rows:
            tensors, positions = without_rows(tensors, positions, upload.untrained_rows)
        self.mean.add(tensors, receipt.unit.coefficient, largest, where=positions)

    def positions(self, receipt: Receipt) -> dict[str, Tensor]:
        return self.half.plan.positions(receipt.drawn)

    @property
    def sums(self) -> Sequence[RunningMean]:
        return [self.mean]

    def close(self) -> None:
        changes, state = self.mean.finish(), self.half.state
        apply_mean_change(self.half.server, changes if state is None else state.add(changes))

    def metrics(self) -> Mapping[str, float]:
        """The share of all entries that at least one client of the round held."""
        return {"entries_held": self.mean.share_held}


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
