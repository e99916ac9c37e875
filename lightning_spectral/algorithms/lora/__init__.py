"""Federated LoRA: clients train low-rank adapters of different ranks on a frozen model."""

from lightning_spectral.algorithms.lora.aggregation import AdapterAggregation
from lightning_spectral.algorithms.lora.config import LoRA
from lightning_spectral.algorithms.lora.products import RankedProducts, StackedProducts, TruncatedProducts
from lightning_spectral.algorithms.lora.terms import (
    AlternatingFactors,
    FoldedTerms,
    FrozenA,
    OrthonormalA,
    PaddedFactors,
    ParallelTerms,
    SampledTerms,
)

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
