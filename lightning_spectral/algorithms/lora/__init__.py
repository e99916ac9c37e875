"""Federated LoRA: clients train low-rank adapters of different ranks on a frozen model."""

from lightning_spectral.algorithms.lora.aggregation import (
    AdapterAggregation,
    AlternatingFactors,
    FoldedTerms,
    FrozenA,
    OrthonormalA,
    PaddedFactors,
    ParallelTerms,
    RankedProducts,
    SampledTerms,
    StackedProducts,
    TruncatedProducts,
)
from lightning_spectral.algorithms.lora.algorithm import LoRA

__all__ = [
    "AdapterAggregation",
    "AlternatingFactors",
    "FoldedTerms",
    "FrozenA",
    "LoRA",
    "OrthonormalA",
    "PaddedFactors",
    "ParallelTerms",
    "RankedProducts",
    "SampledTerms",
    "StackedProducts",
    "TruncatedProducts",
]
