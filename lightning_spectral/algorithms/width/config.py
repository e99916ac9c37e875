"""Sub-models by width: clients train some channels of every layer."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar

from torch import nn

from lightning_spectral.algorithms.base import Algorithm, ByKeepRatio, ServerHalf
from lightning_spectral.algorithms.width.averages import (
    WidthAverages,
    running_averages,
)
from lightning_spectral.algorithms.width.halves import WidthHalf
from lightning_spectral.arguments import Number, as_patterns, check_fields, first_match, flag
from lightning_spectral.errors import SpectralWarning, check_is
from lightning_spectral.nn.torch_modules import layers_with_averages
from lightning_spectral.nn.width.plan import WidthPlan, cut_outputs, cut_to
from lightning_spectral.nn.width.planner import check_cut, width_plan
from lightning_spectral.protocol.buffer_rules import Rules, as_rules, buffer_rules
from lightning_spectral.protocol.exchange import copy_module, load_tensors
from lightning_spectral.protocol.per_client import (
    PerClient,
    check_per_client,
    entries_of,
)
from lightning_spectral.sharding.channels import ChannelChoice, PrefixChannels

KEEP_RATIO = Number(above=0, at_most=1, hint="it is the share of a layer's channels that a client holds")


def as_widths(argument: str, widths: object) -> tuple[float, ...]:
    """Distinct keep ratios, ascending."""
    if isinstance(widths, str) or not isinstance(widths, Sequence):
        raise TypeError(f"`{argument}` is a sequence of keep ratios, such as (0.5, 1.0), got {widths!r}.")
    return tuple(sorted({KEEP_RATIO(argument, width) for width in widths}))


@dataclass(frozen=True)
class WidthSharding(ByKeepRatio):
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
        buffers: Rules for buffers by patterns of their names, as in `FedAvg`.
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

    updates_have_norms: ClassVar[bool] = True

    channels: ChannelChoice = field(default_factory=PrefixChannels)
    keep_ratio: PerClient[float] = 0.5
    scaler: bool = False
    exclude: Sequence[str] = ()
    buffers: Rules = field(default_factory=dict)
    step_widths: Sequence[float] = ()
    averages_per_width: bool = False
    plan: WidthPlan | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_fields(
            self,
            keep_ratio=partial(check_per_client, rule=KEEP_RATIO),
            scaler=flag,
            exclude=as_patterns,
            buffers=as_rules,
            step_widths=as_widths,
            averages_per_width=flag,
        )
        check_is("channels", self.channels, ChannelChoice)
        if self.plan is not None:
            check_is("plan", self.plan, WidthPlan)
        if self.step_widths:
            check_step_widths(self.step_widths, self.channels, entries_of(self.keep_ratio), self.scaler)
        elif self.averages_per_width:
            raise ValueError("`averages_per_width` needs widths: give `step_widths`, or leave it out.")

    def check(self, server: nn.Module) -> None:
        plan = self.plan_for(server)
        if not plan.groups:
            warn_of_uncut_module(server)
        if self.scaler and {*entries_of(self.keep_ratio)} != {1.0}:
            warn_of_scaled_averages(server, self.buffers)
        if self.averages_per_width and not self._averages(server):
            warn_of_missing_averages(server)
        if self.step_widths:
            check_step_widths_can_be_drawn(server)
        for keep_ratio in sorted({*entries_of(self.keep_ratio), *self.step_widths} - {1.0}):
            check_cut(server, plan, keep_ratio)

    def plan_for(self, server: nn.Module) -> WidthPlan:
        """Which channels belong together, from the choice's own plan if it has one."""
        if self.plan is None:
            return width_plan(server, exclude=self.exclude)
        self.plan.check_module(server)
        return self.plan

    def cut_sizes(self, server: nn.Module) -> set[int]:
        return {group.num_units for group in self.plan_for(server).groups}

    def planned(self, server: nn.Module) -> WidthSharding:
        return replace(self, plan=self.plan_for(server))

    def _averages(self, server: nn.Module) -> tuple[str, ...]:
        return running_averages(server, self.buffers) if self.averages_per_width else ()

    @property
    def widest(self) -> float:
        return max(entries_of(self.keep_ratio))

    def new_state(self, server: nn.Module, seed: int) -> WidthAverages | None:
        names, widths = self._averages(server), [width for width in self.step_widths if width < self.widest]
        return WidthAverages(server, self.plan_for(server), names, widths) if names and widths else None

    def bind(
        self,
        server: nn.Module,
        state: nn.Module | None = None,
        *,
        untrained: Collection[str] = (),
        decisions: Mapping[str, Any] | None = None,
    ) -> ServerHalf:
        plan = self.plan_for(server)
        return WidthHalf(
            server,
            state if isinstance(state, WidthAverages) else None,
            plan,
            self.channels,
            sorted({*entries_of(self.keep_ratio)}),
            buffers=buffer_rules(server, self.buffers, decisions),
            scaled=cut_outputs(server, plan) if self.scaler else (),
            step_widths=tuple(self.step_widths),
            averages=self._averages(server),
        )

    def check_average_estimation(self) -> None:
        check_estimation(self.averages_per_width, self.widest)


def narrowed(algorithm: Algorithm, server: nn.Module, state: nn.Module | None, width: float) -> nn.Module:
    """A copy of the server's module at a smaller width, in (0, 1].

    Raises:
        ValueError: If the algorithm does not train models by width, or no model of this one.
    """
    if not isinstance(algorithm, WidthSharding):
        raise ValueError(
            f"Only a federation with WidthSharding trains models by width, got {type(algorithm).__name__}; train "
            "with algorithm=WidthSharding(...), or take the whole model: `model.module`."
        )
    keep_ratio = KEEP_RATIO("width", width)
    check_narrow(algorithm.channels, algorithm.scaler)
    averages = state.widths if isinstance(state, WidthAverages) and state.has_begun else {}
    if averages and keep_ratio < algorithm.widest and keep_ratio not in averages:
        raise ValueError(
            f"`width={keep_ratio:g}` has no running averages: with `averages_per_width` only the widths of "
            f"`step_widths={algorithm.step_widths}` have some."
        )
    warn_of_untrained_channels(keep_ratio, algorithm.widest)
    small: nn.Module = copy_module(server)
    cut_to(small, algorithm.plan_for(server), keep_ratio)
    load_tensors(small, averages.get(keep_ratio, {}))
    return small


def check_step_widths(
    step_widths: Collection[float], channels: ChannelChoice, keep_ratios: Collection[float], scaler: bool
) -> None:
    """Raise ``ValueError`` if widths cannot be drawn for each step."""
    if not isinstance(channels, PrefixChannels):
        raise ValueError(f"`step_widths` needs nested sub-models: channels=PrefixChannels(), not {channels!r}.")
    if scaler:
        raise ValueError("`step_widths` and `scaler` exclude each other: FjORD has no Scaler. Leave one of them out.")
    if missing := {*keep_ratios} - {*step_widths}:
        raise ValueError(
            f"`step_widths` must have the keep ratios of all clients, got {step_widths}: {sorted(missing)} is missing, "
            "so that some channels of a client would never be trained."
        )


def check_step_widths_can_be_drawn(server: nn.Module) -> None:
    """Raise ``ValueError`` if the module takes its steps itself."""
    if not getattr(server, "automatic_optimization", True):
        raise ValueError(
            "`step_widths` draws one width for each `training_step`, which with manual optimisation takes steps of "
            "its own: set `automatic_optimization = True`, or leave `step_widths` out."
        )


def warn_of_uncut_module(server: nn.Module) -> None:
    """Warn that no channel of a module can be cut."""
    warnings.warn(
        f"WidthSharding cuts no channel of {type(server).__name__}: clients train all of it, as with FedAvg(). "
        "`width_plan` says why.",
        SpectralWarning,
        stacklevel=4,
    )


def warn_of_missing_averages(server: nn.Module) -> None:
    """Warn that a module has no averages that each width could have for itself."""
    warnings.warn(
        f"`averages_per_width` finds no BatchNorm with running averages in {type(server).__name__}; leave it out.",
        SpectralWarning,
        stacklevel=4,
    )


def warn_of_untrained_channels(keep_ratio: float, widest: float) -> None:
    """Warn about the channels of a narrow model that no client holds."""
    if keep_ratio > widest:
        warnings.warn(
            f"No client trains the channels of width {keep_ratio:g} above {widest:g}, the largest `keep_ratio`; this "
            f"model has them as they were. Take width={widest:g} or less.",
            SpectralWarning,
            stacklevel=4,
        )


def check_narrow(channels: ChannelChoice, scaler: bool) -> None:
    """Raise ``ValueError`` if clients do not train the first channels as a model of their own."""
    if not isinstance(channels, PrefixChannels):
        raise ValueError(
            f"Narrow models have the first channels, which {channels!r} does not train alone; train with "
            "PrefixChannels(), or take the whole model: `model.module`."
        )
    if scaler:
        raise ValueError(
            "With `scaler` clients train outputs that are divided, which those of a narrow model are not; train with "
            "scaler=False, or take the whole model: `model.module`."
        )


def warn_of_scaled_averages(server: nn.Module, buffers: Rules) -> None:
    """Warn about layers whose averages come from clients, with outputs that are scaled in training only."""
    layers = [name for name in layers_with_averages(server) if first_match(f"{name}.running_mean", buffers) != "server"]
    if layers:
        warnings.warn(
            f"`scaler` divides outputs while clients train and not in evaluation, which reads the averages that "
            f"{', '.join(layers)} learned of the divided ones. Use scaler=False, which a BatchNorm makes up for; "
            "buffers={'*.running_*': 'server'} with the callback BatchNormEstimation, as HeteroFL evaluates; "
            "`lightning_spectral.nn.use_batch_statistics`; or another norm.",
            SpectralWarning,
            stacklevel=4,
        )


def check_estimation(averages_per_width: bool, widest: float) -> None:
    """Raise ``ValueError`` if the module's averages are those of a narrower model: the whole model's are estimated."""
    if averages_per_width and widest < 1:
        raise ValueError(
            "BatchNormEstimation estimates averages of the whole model, and with `averages_per_width` the module has "
            f"those of width {widest:g}, the largest `keep_ratio`; leave the callback out, or set "
            "averages_per_width=False."
        )
