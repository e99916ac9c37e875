"""Sharding strategies: how likely each singular term is to be in a client's shard; and choices of channels."""

from lightning_spectral.sharding.base import ShardingStrategy
from lightning_spectral.sharding.channels import ChannelChoice, PrefixChannels, RandomChannels, RollingChannels
from lightning_spectral.sharding.collective import Collective
from lightning_spectral.sharding.effective_cohort import EffectiveCohort
from lightning_spectral.sharding.prism import PriSM
from lightning_spectral.sharding.scaled import Scaled
from lightning_spectral.sharding.schatten import Schatten
from lightning_spectral.sharding.top_n import TopN
from lightning_spectral.sharding.unbiased import Unbiased

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
