"""Layers that hold sampled singular terms, and their substitution for a user's own layers."""

from lightning_spectral.nn.cost import Cost, CostTable
from lightning_spectral.nn.layers.conv import (
    SpectralShardedConv1d,
    SpectralShardedConv2d,
    SpectralShardedConv3d,
    SpectralShardedGroupedConv1d,
    SpectralShardedGroupedConv2d,
    SpectralShardedGroupedConv3d,
    SpectralShardedSpatialConv2d,
)
from lightning_spectral.nn.layers.linear import (
    SpectralShardedLinear,
    SpectralShardedSplitLinear,
    SpectralShardedSplitTransposedLinear,
    SpectralShardedTransposedLinear,
)
from lightning_spectral.nn.layers.sequences import (
    SpectralShardedGRU,
    SpectralShardedLSTM,
    SpectralShardedMultiheadAttention,
)
from lightning_spectral.nn.layers.sharded import ShardedLayer, SpectralShardedLayer
from lightning_spectral.nn.layers.terms import SingularTerms, WeightBlock, sharded_layers
from lightning_spectral.nn.layers.tucker import TuckerConv
from lightning_spectral.nn.optimizer_hooks import EffectiveLRClip, FrobeniusDecay
from lightning_spectral.nn.plan.module_plan import BufferPlan, LayerChoices, LayerPlan, ModulePlan
from lightning_spectral.nn.plan.planner import allocate_terms, plan_layers, plan_of, replace_layers, validate
from lightning_spectral.nn.torch_modules import use_batch_statistics
from lightning_spectral.nn.width.plan import WidthPlan
from lightning_spectral.nn.width.planner import width_plan
from lightning_spectral.nn.zampling import unzample, zample

__all__ = [
    "BufferPlan",
    "Cost",
    "CostTable",
    "EffectiveLRClip",
    "FrobeniusDecay",
    "LayerChoices",
    "LayerPlan",
    "ModulePlan",
    "ShardedLayer",
    "SingularTerms",
    "SpectralShardedConv1d",
    "SpectralShardedConv2d",
    "SpectralShardedConv3d",
    "SpectralShardedGRU",
    "SpectralShardedGroupedConv1d",
    "SpectralShardedGroupedConv2d",
    "SpectralShardedGroupedConv3d",
    "SpectralShardedLSTM",
    "SpectralShardedLayer",
    "SpectralShardedLinear",
    "SpectralShardedMultiheadAttention",
    "SpectralShardedSpatialConv2d",
    "SpectralShardedSplitLinear",
    "SpectralShardedSplitTransposedLinear",
    "SpectralShardedTransposedLinear",
    "TuckerConv",
    "WeightBlock",
    "WidthPlan",
    "allocate_terms",
    "plan_layers",
    "plan_of",
    "replace_layers",
    "sharded_layers",
    "unzample",
    "use_batch_statistics",
    "validate",
    "width_plan",
    "zample",
]
