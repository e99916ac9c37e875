"""Sharding strategies: how likely each singular term is to be in a client's shard; and choices of channels."""

from lightning_spectral.sharding.channels import ChannelChoice, PrefixChannels, RandomChannels, RollingChannels
from lightning_spectral.sharding.strategies import (
    Collective,
    EffectiveCohort,
    PriSM,
    Scaled,
    Schatten,
    ShardingStrategy,
    TopN,
    Unbiased,
)

__all__ = [
    "ChannelChoice",
    "Collective",
    "EffectiveCohort",
    "PrefixChannels",
    "PriSM",
    "RandomChannels",
    "RollingChannels",
    "Scaled",
    "Schatten",
    "ShardingStrategy",
    "TopN",
    "Unbiased",
]
