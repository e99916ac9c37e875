"""Federated learning of models that no client can hold whole: spectral model sharding for PyTorch Lightning."""

from lightning_spectral.algorithms import Algorithm, FedAvg, SpectralSharding
from lightning_spectral.allocator import tune_allocator
from lightning_spectral.callbacks import (
    Aggregation,
    CommunicationLedger,
    RoundHistory,
    RoundProgressBar,
    SpectralDiagnostics,
    SubmodelSampling,
    SVDRefresh,
    UpdateAlignment,
)
from lightning_spectral.callbacks.round_callback import RoundCallback
from lightning_spectral.data import FederatedDataModule
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
from lightning_spectral.errors import ClientError, RoundError, SpectralWarning
from lightning_spectral.module import FederatedModule
from lightning_spectral.nn import (
    CostTable,
    SpectralShardedConv1d,
    SpectralShardedConv2d,
    SpectralShardedConv3d,
    SpectralShardedLinear,
    cost_table,
    keep_ratio_for,
    replace_layers,
    validate,
)
from lightning_spectral.nn.optimizer_hooks import EffectiveLRClip, FrobeniusDecay
from lightning_spectral.partition import DirichletPartitioner, IIDPartitioner, NaturalPartitioner, Partitioner
from lightning_spectral.sharding import Collective, PriSM, Scaled, Schatten, ShardingStrategy, TopN, Unbiased

__all__ = [
    "Aggregation",
    "Algorithm",
    "Brewer",
    "ClientError",
    "Collective",
    "CommunicationLedger",
    "ConditionalPoisson",
    "Coordinated",
    "CostTable",
    "Design",
    "DirichletPartitioner",
    "EffectiveLRClip",
    "FedAvg",
    "FederatedDataModule",
    "FederatedModule",
    "FrobeniusDecay",
    "IIDPartitioner",
    "JointDesign",
    "MinimumSupport",
    "NaturalPartitioner",
    "Partitioner",
    "PriSM",
    "RandomSystematic",
    "RoundCallback",
    "RoundError",
    "RoundHistory",
    "RoundProgressBar",
    "SVDRefresh",
    "Scaled",
    "Schatten",
    "ShardingStrategy",
    "SpectralDiagnostics",
    "SpectralShardedConv1d",
    "SpectralShardedConv2d",
    "SpectralShardedConv3d",
    "SpectralShardedLinear",
    "SpectralSharding",
    "SpectralWarning",
    "SubmodelSampling",
    "SuccessiveSampling",
    "Systematic",
    "TopN",
    "Unbiased",
    "UpdateAlignment",
    "cost_table",
    "keep_ratio_for",
    "replace_layers",
    "tune_allocator",
    "validate",
]
