"""Checks and warnings for sub-models that are cut by width."""

from __future__ import annotations

import warnings
from collections.abc import Collection

from torch import nn

from lightning_spectral.arguments import first_match
from lightning_spectral.errors import SpectralWarning
from lightning_spectral.nn.batch_norm import layers_with_averages
from lightning_spectral.protocol.buffer_rules import Rules
from lightning_spectral.sharding.channels import ChannelChoice, PrefixChannels


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
