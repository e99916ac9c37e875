"""Federated learning of models that no client can hold whole: spectral model sharding for PyTorch Lightning."""

from lightning.pytorch.strategies import StrategyRegistry

from lightning_spectral.algorithms import (
    FIARSE,
    AdapterAggregation,
    Algorithm,
    AlternatingFactors,
    FedAvg,
    FrozenA,
    LoRA,
    MatrixMeans,
    PaddedFactors,
    SampledTerms,
    Scaffold,
    SpectralSharding,
    StackedProducts,
    StaleUpdates,
    TermAggregation,
    TermMeans,
    TruncatedProducts,
    WidthSharding,
    Zampling,
)
from lightning_spectral.algorithms.lora.budgets import rank_for
from lightning_spectral.algorithms.lora.costs import LoRACostTable, lora_cost_table
from lightning_spectral.algorithms.spectral import SpectralStart, spectral_start
from lightning_spectral.algorithms.sub_model_costs import sub_model_cost_table, sub_model_keep_ratio_for
from lightning_spectral.client.local_hooks import GradientClip, LocalHook, ProximalTerm
from lightning_spectral.client.masked_logits import MaskedLogits
from lightning_spectral.designs import (
    Brewer,
    ConditionalPoisson,
    Coordinated,
    Design,
    JointDesign,
    MinimumSupport,
    RandomSystematic,
    SuccessiveSampling,
    Systematic,
)
from lightning_spectral.errors import ClientError, LostProcessError, RoundError, SpectralWarning
from lightning_spectral.functional.images import standardize_images
from lightning_spectral.functional.zampling.links import Clip, Link, Sigmoid
from lightning_spectral.nn import (
    CostTable,
    LayerChoices,
    SpectralShardedConv1d,
    SpectralShardedConv2d,
    SpectralShardedConv3d,
    SpectralShardedLinear,
    ZamplingCostTable,
    compression_for,
    cost_table,
    keep_ratio_for,
    replace_layers,
    validate,
    zampling_cost_table,
)
from lightning_spectral.nn.optimizer_hooks import EffectiveLRClip, FrobeniusDecay
from lightning_spectral.nn.width.plan import WidthPlan
from lightning_spectral.nn.width.planner import width_plan
from lightning_spectral.nn.zampling.zample import unzample, zample
from lightning_spectral.participation import (
    FullParticipation,
    LossVarianceReduced,
    RoundRobin,
    Sampler,
    StaleUpdateVarianceReduced,
    Uniform,
    UpdateVarianceReduced,
)
from lightning_spectral.partition import (
    DirichletPartitioner,
    IIDPartitioner,
    NaturalPartitioner,
    PachinkoPartitioner,
    Partitioner,
)
from lightning_spectral.plugin.allocator import tune_allocator
from lightning_spectral.plugin.callbacks import (
    Aggregation,
    BatchNormEstimation,
    ClientEvaluation,
    ClientRow,
    ClientTable,
    CommunicationLedger,
    RoundDashboard,
    RoundHistory,
    RoundLines,
    RoundProgressBar,
    SampledNetworks,
    SpectralDiagnostics,
    SubmodelSampling,
    SVDRefresh,
    UpdateAlignment,
)
from lightning_spectral.plugin.callbacks.round_callback import RoundCallback
from lightning_spectral.plugin.checkpoint_files import AtomicCheckpointIO, latest_checkpoint
from lightning_spectral.plugin.client_parallel import ClientParallelStrategy
from lightning_spectral.plugin.data import FederatedDataModule
from lightning_spectral.plugin.exports import narrow_model, save_peft_adapter
from lightning_spectral.plugin.module import FederatedModule
from lightning_spectral.plugin.multi_model import MultiModelModule
from lightning_spectral.plugin.multi_model_data import MultiModelDataModule
from lightning_spectral.plugin.run_estimate import RunEstimate, estimate
from lightning_spectral.plugin.saved_modules import load_user_module
from lightning_spectral.protocol.schedule import Schedule
from lightning_spectral.server.fault_policy import Faults, LeaveOut, Raise
from lightning_spectral.server.optimizers import FedAdagrad, FedAdam, FedAvgM, FedYogi
from lightning_spectral.sharding import (
    ChannelChoice,
    Collective,
    EffectiveCohort,
    PrefixChannels,
    PriSM,
    RandomChannels,
    RollingChannels,
    Scaled,
    Schatten,
    ShardingStrategy,
    TopN,
    Unbiased,
)
from lightning_spectral.simulation import ClientDropout, DeviceProfile, VirtualClock

__version__ = "0.1.0"

__all__ = [
    "FIARSE",
    "AdapterAggregation",
    "Aggregation",
    "Algorithm",
    "AlternatingFactors",
    "AtomicCheckpointIO",
    "BatchNormEstimation",
    "Brewer",
    "ChannelChoice",
    "ClientDropout",
    "ClientError",
    "ClientEvaluation",
    "ClientParallelStrategy",
    "ClientRow",
    "ClientTable",
    "Clip",
    "Collective",
    "CommunicationLedger",
    "ConditionalPoisson",
    "Coordinated",
    "CostTable",
    "Design",
    "DeviceProfile",
    "DirichletPartitioner",
    "EffectiveCohort",
    "EffectiveLRClip",
    "Faults",
    "FedAdagrad",
    "FedAdam",
    "FedAvg",
    "FedAvgM",
    "FedYogi",
    "FederatedDataModule",
    "FederatedModule",
    "FrobeniusDecay",
    "FrozenA",
    "FullParticipation",
    "GradientClip",
    "IIDPartitioner",
    "JointDesign",
    "LayerChoices",
    "LeaveOut",
    "Link",
    "LoRA",
    "LoRACostTable",
    "LocalHook",
    "LossVarianceReduced",
    "LostProcessError",
    "MaskedLogits",
    "MatrixMeans",
    "MinimumSupport",
    "MultiModelDataModule",
    "MultiModelModule",
    "NaturalPartitioner",
    "PachinkoPartitioner",
    "PaddedFactors",
    "Partitioner",
    "PrefixChannels",
    "PriSM",
    "ProximalTerm",
    "Raise",
    "RandomChannels",
    "RandomSystematic",
    "RollingChannels",
    "RoundCallback",
    "RoundDashboard",
    "RoundError",
    "RoundHistory",
    "RoundLines",
    "RoundProgressBar",
    "RoundRobin",
    "RunEstimate",
    "SVDRefresh",
    "SampledNetworks",
    "SampledTerms",
    "Sampler",
    "Scaffold",
    "Scaled",
    "Schatten",
    "Schedule",
    "ShardingStrategy",
    "Sigmoid",
    "SpectralDiagnostics",
    "SpectralShardedConv1d",
    "SpectralShardedConv2d",
    "SpectralShardedConv3d",
    "SpectralShardedLinear",
    "SpectralSharding",
    "SpectralStart",
    "SpectralWarning",
    "StackedProducts",
    "StaleUpdateVarianceReduced",
    "StaleUpdates",
    "SubmodelSampling",
    "SuccessiveSampling",
    "Systematic",
    "TermAggregation",
    "TermMeans",
    "TopN",
    "TruncatedProducts",
    "Unbiased",
    "Uniform",
    "UpdateAlignment",
    "UpdateVarianceReduced",
    "VirtualClock",
    "WidthPlan",
    "WidthSharding",
    "Zampling",
    "ZamplingCostTable",
    "compression_for",
    "cost_table",
    "estimate",
    "keep_ratio_for",
    "latest_checkpoint",
    "load_user_module",
    "lora_cost_table",
    "narrow_model",
    "rank_for",
    "replace_layers",
    "save_peft_adapter",
    "spectral_start",
    "standardize_images",
    "sub_model_cost_table",
    "sub_model_keep_ratio_for",
    "tune_allocator",
    "unzample",
    "validate",
    "width_plan",
    "zample",
    "zampling_cost_table",
]

# The only side effect of importing: `Trainer(strategy="client_parallel")` finds the class by its name in this table.
ClientParallelStrategy.register_strategies(StrategyRegistry)
