"""Sub-models by width: clients train some channels of every layer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from lightning_spectral.algorithms.base import (
    UNKNOWN,
    Algorithm,
    Known,
    Moment,
    Observed,
    Promises,
    Round,
    ServerHalf,
    Setting,
)
from lightning_spectral.algorithms.capacities import KeepRatios
from lightning_spectral.algorithms.fed_avg import DenseHalf, DenseSide
from lightning_spectral.arguments import Number, as_patterns, check_fields, first_match, flag
from lightning_spectral.client.device import StepActions
from lightning_spectral.errors import check_is, warn
from lightning_spectral.nn.torch_modules import layers_with_averages
from lightning_spectral.nn.width.plan import NarrowSteps, WidthPlan, cut_for_steps, cut_outputs, cut_to, take
from lightning_spectral.nn.width.planner import check_cut, width_plan
from lightning_spectral.protocol.buffer_rules import BufferRules, buffer_rules
from lightning_spectral.protocol.cohort import Cohort, Workers
from lightning_spectral.protocol.exchange import apply_mean_change, copy_module, load_tensors, travelling_tensors
from lightning_spectral.protocol.per_client import PerClient, check_entries, entries_of
from lightning_spectral.protocol.records import Download, Receipt, RoundSummary, Tensors, Upload, WorkUnit
from lightning_spectral.protocol.rng import derived_generator
from lightning_spectral.sharding import ChannelChoice, PrefixChannels
from lightning_spectral.sums import MeanChange, RunningMean

STEP_COUNTS = "steps@widths"  # sent back by a client, because averages are taken over clients that took steps
NARROW_STEPS = "_narrow_steps"  # of a sub-model, in its `__dict__`
COUNTER = "num_batches_tracked"
KEEP_RATIO = Number(above=0, at_most=1, hint="it is the share of a layer's channels that a client holds")


def as_widths(argument: str, widths: object) -> tuple[float, ...]:
    """Distinct keep ratios, ascending."""
    if isinstance(widths, str) or not isinstance(widths, Sequence):
        raise TypeError(f"`{argument}` is a sequence of keep ratios, such as (0.5, 1.0), got {widths!r}.")
    return tuple(sorted({KEEP_RATIO(argument, width) for width in widths}))


@dataclass(frozen=True)
class WidthSharding(Algorithm):
    """Each client trains ceil(r N) of the N channels of every layer: a smaller network of the same shape.

    Which channels belong together is found in a forward pass of the module's ``example_input_array``
    (`lightning_spectral.nn.width_plan`). Every entry of a weight is averaged over the clients that held it; entries
    held by no client are unchanged. Inputs and outputs of the module are never cut.

    Args:
        channels: Which channels a client gets: the first ones (HeteroFL), a window that moves on in every round
            (FedRolex), or random ones (Federated Dropout).
        keep_ratio: Share r of the channels a client holds: one for all; ``{ratio: share of clients}``; or one per
            client. It is a share of the width: where both inputs and outputs of a layer are cut, its parameters and
            multiplications shrink with the square of r.
        scaler: While training, divide the outputs of narrowed layers by r, so that they are as large as those of the
            whole model, which is the one that is evaluated: HeteroFL's Scaler.
        exclude: Patterns of the names of layers that are not cut.
        step_widths: Keep ratios from which each local step draws its own, uniformly among those up to the client's. The
            step uses and trains the first of the client's channels: FjORD's ordered dropout. If empty, all steps have
            the client's width. Modules that recompute activations in the backward pass (``torch.utils.checkpoint``),
            which would happen at the client's own width, are refused in their first step.
        averages_per_width: Give each of ``step_widths`` its own running averages in every BatchNorm, as published.
            Clients send back those of all widths they may draw, and `narrow_model` puts them into the model of a width.
            The server's module has those of the largest keep ratio. If false, narrower steps do not change the
            averages.
        plan: The plan that `width_plan` returned for the module, which then needs no ``example_input_array``; ``None``
            to make it when training starts.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If a ratio is outside (0, 1], shares do not sum to 1, patterns are not a sequence of strings,
            ``step_widths`` lack one of the clients' keep ratios or are combined with ``scaler`` or with ``channels``
            other than the first ones, or ``averages_per_width`` is set without ``step_widths``.

    Reference:
        Diao et al. (2021), HeteroFL; Alam et al. (2022), FedRolex; Caldas et al. (2018), Federated Dropout; Horvath et
        al. (2021), FjORD.

    Example:
        >>> WidthSharding(PrefixChannels(), keep_ratio={0.5: 0.6, 1.0: 0.4}).keep_ratio
        {0.5: 0.6, 1.0: 0.4}
    """

    promises: ClassVar[Promises] = Promises(new_values=True, values_alone=True, clients_may_join=True)

    channels: ChannelChoice = field(default_factory=PrefixChannels)
    keep_ratio: PerClient[float] = 0.5
    scaler: bool = False
    exclude: Sequence[str] = ()
    step_widths: Sequence[float] = ()
    averages_per_width: bool = False
    plan: WidthPlan | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_fields(
            self,
            keep_ratio=partial(check_entries, rule=KEEP_RATIO),
            scaler=flag,
            exclude=as_patterns,
            step_widths=as_widths,
            averages_per_width=flag,
        )
        check_is("channels", self.channels, ChannelChoice)
        check_is("plan", self.plan, WidthPlan | None)
        if not self.step_widths:
            if self.averages_per_width:
                raise ValueError("`averages_per_width` needs widths: give `step_widths`, or leave it out.")
            return
        if not isinstance(self.channels, PrefixChannels):
            raise ValueError(
                f"`step_widths` needs nested sub-models: channels=PrefixChannels(), not {self.channels!r}."
            )
        if self.scaler:
            raise ValueError(
                "`step_widths` and `scaler` exclude each other: FjORD has no Scaler. Leave one of them out."
            )
        if missing := {*entries_of(self.keep_ratio)} - {*self.step_widths}:
            raise ValueError(
                f"`step_widths` must have the keep ratios of all clients, got {self.step_widths}: {sorted(missing)} is "
                "missing, so that some channels of a client would never be trained."
            )

    def check(self, plan: Setting) -> None:
        """Also warn of settings that have no effect on the module, and of averages that evaluation should not read."""
        if plan.optimizers:
            self._check_estimation(plan.callbacks)
            return
        server, channels = plan.module, self.plan_for(plan.module)
        kind = type(server).__name__
        ratios, found = {*entries_of(self.keep_ratio)}, []
        if not channels.groups:
            found.append(
                f"WidthSharding cuts no channel of {kind}: clients train all of it, as with FedAvg(). `width_plan` "
                "says why."
            )
        layers = layers_with_averages(server) if self.scaler and ratios != {1.0} else []
        if scaled := [name for name in layers if first_match(f"{name}.running_mean", plan.buffers) != "server"]:
            found.append(
                f"`scaler` divides outputs while clients train and not in evaluation, which reads the averages that "
                f"{', '.join(scaled)} learned of the divided ones. Use scaler=False, which a BatchNorm makes up for; "
                "buffers={'*.running_*': 'server'} with the callback BatchNormEstimation, as HeteroFL evaluates; "
                "`lightning_spectral.nn.use_batch_statistics`; or another norm."
            )
        if self.averages_per_width and not self.running_averages(server, buffer_rules(server, plan.buffers)):
            found.append(f"`averages_per_width` finds no BatchNorm with running averages in {kind}; leave it out.")
        for sentence in found:
            warn(sentence, 3)
        if self.step_widths and not getattr(server, "automatic_optimization", True):
            raise ValueError(
                "`step_widths` draws one width for each `training_step`, which with manual optimisation takes steps of "
                "its own: set `automatic_optimization = True`, or leave `step_widths` out."
            )
        for keep_ratio in sorted({*ratios, *self.step_widths} - {1.0}):
            check_cut(server, channels, keep_ratio)

    def _check_estimation(self, callbacks: Sequence[Any]) -> None:
        estimates = any(getattr(callback, "estimates_averages", False) for callback in callbacks)
        if estimates and self.averages_per_width and self.widest < 1:
            raise ValueError(
                "BatchNormEstimation estimates averages of the whole model, and with `averages_per_width` the module "
                f"has those of width {self.widest:g}, the largest `keep_ratio`; leave the callback out, or set "
                "averages_per_width=False."
            )

    def plan_for(self, server: nn.Module) -> WidthPlan:
        """Which channels belong together, from the choice's own plan if it has one."""
        if self.plan is None:
            return width_plan(server, exclude=self.exclude)
        self.plan.check_module(server)
        return self.plan

    @property
    def capacities(self) -> Widths:
        return Widths(self, self.keep_ratio, lambda server: {each.num_units for each in self.plan_for(server).groups})

    def running_averages(self, server: nn.Module, rules: BufferRules | None = None) -> tuple[str, ...]:
        """Names of the running averages of which each width has its own: all, or none.

        Args:
            server: The server's module.
            rules: What becomes of its buffers, which is checked; ``None`` if that is not known yet.

        Raises:
            ValueError: If one of them is not averaged over clients.
        """
        if not self.averages_per_width:
            return ()
        names = names_of_averages(server)
        if rules is not None and (other := set(names) - (rules.mean - rules.limits.keys())):
            raise ValueError(
                f"`averages_per_width` needs averages that clients send back, but {', '.join(sorted(other))} are not "
                "averaged: `buffers` says so, or they are not finite. Leave either out."
            )
        return tuple(names)

    @property
    def widest(self) -> float:
        return max(entries_of(self.keep_ratio))

    def new_state(self, server: nn.Module, seed: int) -> WidthAverages | None:
        names, widths = self.running_averages(server), [width for width in self.step_widths if width < self.widest]
        return WidthAverages(server, self.plan_for(server), names, widths) if names and widths else None

    def bind(self, server: nn.Module, state: nn.Module | None = None, known: Known = UNKNOWN) -> ServerHalf:
        return WidthHalf(self, server, state, known.rules)


def narrow_model(model: Any, width: float) -> Any:
    """Return your module at a smaller width, to evaluate or save: the first ceil(r N) of each layer's N channels.

    The result is an ordinary module of your class, with smaller parameters under the same names and layers that know
    their sizes. With ``averages_per_width`` it has the running averages of that width. Otherwise it has the first
    entries of the whole module's averages, which belong to other inputs, and may do badly in evaluation.

    Args:
        model: The federation, after a fit with `WidthSharding`.
        width: Keep ratio r of the channels, in (0, 1].

    Returns:
        A copy, without a Trainer.

    Raises:
        ValueError: If the federation has another algorithm, channels other than the first ones, or ``scaler``; if
            ``width`` is out of range, or each width has its own averages and ``width`` is not among ``step_widths``.

    Example:
        >>> import torch
        >>> import lightning_spectral as ls
        >>> from lightning_spectral.models import MLP, LitClassifier
        >>> lit = LitClassifier(MLP(6, [8], 3), num_classes=3)
        >>> lit.example_input_array = torch.zeros(2, 6)
        >>> model = ls.FederatedModule(lit, algorithm=ls.WidthSharding(), clients_per_round=2)
        >>> ls.algorithms.narrow_model(model, 0.25).model.head
        Linear(in_features=2, out_features=3, bias=True)
    """
    algorithm, server, state = (getattr(model, name, None) for name in ("algorithm", "module", "state"))
    if not (isinstance(algorithm, WidthSharding) and isinstance(server, nn.Module)):
        raise ValueError(
            f"Only a federation with WidthSharding trains models by width, got {type(algorithm or model).__name__}; "
            "train with algorithm=WidthSharding(...), or use the whole model: `model.module`."
        )
    keep_ratio, widest = KEEP_RATIO("width", width), algorithm.widest
    if not isinstance(algorithm.channels, PrefixChannels):
        raise ValueError(
            f"Narrow models have the first channels, which {algorithm.channels!r} does not train alone; train with "
            "PrefixChannels(), or use the whole model: `model.module`."
        )
    if algorithm.scaler:
        raise ValueError(
            "With `scaler` clients train outputs that are divided, which those of a narrow model are not; train with "
            "scaler=False, or use the whole model: `model.module`."
        )
    averages = state.widths if isinstance(state, WidthAverages) and state.has_begun else {}
    if averages and keep_ratio < widest and keep_ratio not in averages:
        raise ValueError(
            f"`width={keep_ratio:g}` has no running averages: with `averages_per_width` only the widths of "
            f"`step_widths={algorithm.step_widths}` have some."
        )
    if keep_ratio > widest:
        warn(
            f"No client trains the channels of width {keep_ratio:g} above {widest:g}, the largest `keep_ratio`; this "
            f"model has them as they were. Take width={widest:g} or less."
        )
    small: nn.Module = copy_module(server)
    cut_to(small, algorithm.plan_for(server), keep_ratio)
    load_tensors(small, averages.get(keep_ratio, {}))
    return small


class Widths(KeepRatios[WidthSharding]):
    """Keep ratios of channels, which are counted with the plan of the whole module."""

    def planned(self, server: nn.Module) -> WidthSharding:
        return replace(self.choice, plan=self.choice.plan_for(server))

    def counts(self, server: nn.Module) -> Callable[[int], Sequence[int]]:
        """How many channels a client holds, along each dimension of each tensor."""
        ratios, plan = self.all_of(server), self.choice.plan_for(server)

        def at(place: int) -> list[int]:
            held = plan.indices(plan.first(ratios[place])).values()
            return [len(along) for dims in held for along in dims]

        return at


class WidthHalf(DenseHalf):
    """Sub-models by width, bound to a module.

    Attributes:
        plan: Which channels belong together.
        averages: Names of the running averages of which each step width has its own.
    """

    def __init__(
        self, choice: WidthSharding, server: nn.Module, state: nn.Module | None, rules: BufferRules | None
    ) -> None:
        super().__init__(server, rules)
        self.choice, self.plan = choice, choice.plan_for(server)
        self.state = state if isinstance(state, WidthAverages) else None
        self.averages = choice.running_averages(server, self.rules)

    @cached_property
    def client_side(self) -> WidthSide:
        scaled = cut_outputs(self.server, self.plan) if self.choice.scaler else ()
        return WidthSide(tuple(self.returned()), self.plan, scaled, tuple(self.choice.step_widths), self.averages)

    def initialize(self, workers: Workers) -> str:
        keep_ratios = sorted({*entries_of(self.choice.keep_ratio)})
        sizes = {ratio: self.plan.num_parameters(self.server, ratio) for ratio in keep_ratios}
        listed = ", ".join(f"{size:,} at keep ratio {ratio:g}" for ratio, size in sizes.items())
        total = sum(parameter.numel() for parameter in self.server.parameters())
        widest = keep_ratios[-1]
        untrained = isinstance(self.choice.channels, PrefixChannels) and widest < 1 and self.plan.groups
        alone = f"No client trains the channels above keep ratio {widest:g}, which stay in the server's module."
        notes = "".join(f"\n{note}" for note in [*[alone] * bool(untrained), *self.plan.notes])
        return f"WidthSharding: sub-models have {listed}, of {total:,} parameters.{notes}"

    def settle(self) -> None:
        if self.state is not None:
            self.state.begin(self.server)

    def frozen_tensors(self) -> Tensors:
        """The parameters that need no gradient and are never cut; of cut ones a client may get a new part each time."""
        return {name: t for name, t in super().frozen_tensors().items() if name not in self.plan.labels}

    def advice(self, moment: Moment, opened: Round | None = None, summary: RoundSummary | None = None) -> Sequence[str]:
        if moment is Moment.RESTING_AVERAGES and self.choice.step_widths:
            sent = self.rules.averaged(self.returned()).keys() & {*names_of_averages(self.server)}
            return ["a client may take narrower steps only, which leave averages alone"] if sent else ()
        return super().advice(moment, opened, summary)

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
        averaged, own = half.rules.averaged(half.returned()), by_width(self.averages)
        buffers = {name for name, _ in half.server.named_buffers() if name in averaged} | own.keys()
        before = {**averaged, **own}
        by_index = dict.fromkeys(before)
        self.mean = MeanChange(before, cohort.total, cohort.absolute, always_divided=buffers, by_index=by_index)

    def send(self, unit: WorkUnit) -> tuple[Download, Receipt]:
        """The entries that a client holds, averages of its own width, and of the narrower ones that it may draw."""
        cohort, choice, plan, names = self.cohort, self.half.choice, self.half.plan, self.half.averages
        keep_ratio, kept = cohort.capacity_of(unit), dict[str, Tensor]()
        for group in plan.groups:
            generator = derived_generator(cohort.seed, "channels", cohort.round_idx, *unit.ids, group.name)
            num_kept = group.num_kept(keep_ratio)
            kept[group.name] = choice.channels(group.num_units, num_kept, cohort.round_idx, generator)
        indices = plan.indices(kept)
        tensors = {name: take(tensor, indices.get(name, ())) for name, tensor in self.tensors.items()}
        tensors |= self.averages.get(keep_ratio, {})
        if names:
            widths = [width for width in choice.step_widths if width < keep_ratio]
            own = {w: self.averages.get(w) or first_entries(self.tensors, plan, names, w) for w in widths}
            tensors |= by_width(own)
        return Download(unit, keep_ratio, tensors), Receipt(unit, keep_ratio, kept)

    def add(self, receipt: Receipt, upload: Upload) -> None:
        tensors, positions, largest = dict(upload.tensors), self.positions(receipt), upload.largest
        if self.averages:
            held = arrange(upload, positions, self.half.averages, receipt.capacity, list(self.averages))
            tensors, positions, largest = held
        for name in upload.untrained_rows.keys() & tensors.keys():  # rows that the loss does not reach are not held
            tensor, rows = tensors[name], upload.untrained_rows[name].cpu()
            places = positions.get(name, torch.arange(tensor.numel()).view(tensor.shape))
            stays = torch.ones(len(tensor), dtype=torch.bool).index_fill_(0, rows, False)
            tensors[name], positions[name] = tensor[stays.to(tensor.device)], places[stays.to(places.device)]
        self.mean.add(tensors, receipt.unit.coefficient, largest, where=positions)

    def positions(self, receipt: Receipt) -> dict[str, Tensor]:
        return self.half.plan.positions(receipt.drawn)

    @property
    def sums(self) -> Sequence[RunningMean]:
        return [self.mean]

    def close(self) -> None:
        changes, state = self.mean.finish(), self.half.state
        apply_mean_change(self.half.server, changes if state is None else state.add(changes))

    def observed(self) -> Observed:
        """The share of all entries that at least one client of the round held."""
        held = self.mean.held.values()
        count = sum(int(weights.count_nonzero()) for weights in held)
        return Observed({"entries_held": count / max(1, sum(map(len, held)))})


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
        if self.step_widths:
            widths = [width for width in self.step_widths if width < capacity]
            own = {*self.averages, *(f"{name.rpartition('.')[0]}.{COUNTER}".lstrip(".") for name in self.averages)}
            vars(module)[NARROW_STEPS] = cut_for_steps(module, self.plan, capacity, widths, own)
            return
        cut_to(module, self.plan, capacity)
        for name in self.scaled if capacity < 1 else ():
            module.get_submodule(name).register_forward_hook(partial(_divide, capacity))

    @torch.no_grad()
    def load(self, client: nn.Module, download: Download) -> None:
        averages = self._averages(client)
        rest = {name: tensor for name, tensor in download.tensors.items() if name not in averages}
        super().load(client, replace(download, tensors=rest))
        for name, tensor in averages.items():
            tensor.copy_(download.tensors[name])
        for buffers in _buffers(client).values():
            for name in buffers.keys() - {*self.averages}:  # counters, which are not sent back
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
        """The averages of smaller widths, by the names under which they are sent."""
        found = {width: {name: own[name] for name in self.averages} for width, own in _buffers(client).items()}
        return by_width(found)

    def start(self, client: nn.Module, download: Download) -> StepActions | None:
        if not (widths := [width for width in self.step_widths if width <= download.capacity]):
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


def at_width(name: str, width: float) -> str:
    """The name under which a width's own version of a tensor is sent."""
    return f"{name}@{width}"


class WidthAverages(nn.Module):
    """The server's running averages at each width below that of the widest clients, whose own are in its module.

    Each width starts from the first entries of the module's averages.

    Attributes:
        has_begun: Whether they are the run's own, and no longer those that the module was built with.
    """

    has_begun: Tensor

    def __init__(self, server: nn.Module, plan: WidthPlan, names: Sequence[str], widths: Sequence[float]) -> None:
        super().__init__()
        self._plan, self._names, self._widths = plan, tuple(names), tuple(widths)
        self.register_buffer("has_begun", torch.tensor(False))
        for width in widths:
            for name, tensor in first_entries(travelling_tensors(server), plan, names, width).items():
                self.register_buffer(_key(name, width), tensor.clone())

    @property
    def widths(self) -> dict[float, dict[str, Tensor]]:
        """The averages of each width, by their names in the server's module."""
        return {width: {name: self.get_buffer(_key(name, width)) for name in self._names} for width in self._widths}

    @torch.no_grad()
    def begin(self, server: nn.Module) -> None:
        """Before the first round, take the first entries of the averages that the module then has."""
        if not self.has_begun:
            tensors = travelling_tensors(server)
            for width, own in self.widths.items():
                for name, tensor in first_entries(tensors, self._plan, self._names, width).items():
                    own[name].copy_(tensor)
            self.has_begun.fill_(True)

    @torch.no_grad()
    def add(self, changes: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Add the changes that belong to a width's own averages, and pass on the others."""
        own = by_width(self.widths)
        for name, change in changes:
            if name in own:
                own[name].add_(change.to(own[name].dtype))
            else:
                yield name, change


def by_width(averages: Mapping[float, Tensors]) -> dict[str, Tensor]:
    """All averages of some widths, by the names under which they are sent."""
    return {at_width(name, width): tensor for width, own in averages.items() for name, tensor in own.items()}


def first_entries(tensors: Tensors, plan: WidthPlan, names: Iterable[str], width: float) -> dict[str, Tensor]:
    """The parts of some of a module's tensors that remain at a width."""
    indices = plan.indices(plan.first(width))
    return {name: take(tensors[name], indices.get(name, ())) for name in names}


def arrange(
    upload: Upload, positions: Tensors, names: Iterable[str], capacity: float, widths: Sequence[float]
) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, float]]:
    """Put each width's averages in their place; a client holds no entries for a width at which it took no step.

    ``widths`` have averages of their own on the server; those of wider clients are in its module. Returns tensors,
    positions and largest magnitudes for `MeanChange.add`.
    """
    tensors, places, largest = dict(upload.tensors), dict(positions), dict(upload.largest)
    none = next(iter(upload.tensors.values())).new_empty(0)  # on the device of the sums
    used = {capacity}  # the widths at which the client took steps; if it has no narrower ones, its own
    if STEP_COUNTS in upload.tensors:
        own = [*(width for width in widths if width < capacity), capacity]
        used = {w for w, count in zip(own, upload.tensors[STEP_COUNTS].tolist(), strict=True) if count}
    for name in names:
        places_of = {width: at_width(name, width) for width in widths}
        sources = {key: name if width == capacity else key for width, key in places_of.items() if width in used}
        if capacity in used and capacity not in widths:
            sources[name] = name
        for place in (*places_of.values(), name):
            if place in sources:
                tensors[place], largest[place] = upload.tensors[sources[place]], upload.largest[sources[place]]
            else:
                tensors[place], largest[place], places[place] = none, 0.0, torch.empty(0, dtype=torch.int64)
    return tensors, places, largest


def _key(name: str, width: float) -> str:
    return at_width(name, width).replace(".", ":")


def names_of_averages(module: nn.Module) -> list[str]:
    """Names of the running means and variances of a module's normalisation layers."""
    parts = ("running_mean", "running_var")
    return [f"{layer}.{part}" if layer else part for layer in layers_with_averages(module) for part in parts]
