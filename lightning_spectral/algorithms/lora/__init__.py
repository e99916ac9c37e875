"""Federated LoRA: clients train low-rank adapters of different ranks on a frozen model."""

from lightning_spectral.algorithms.lora.aggregation import AdapterAggregation
from lightning_spectral.algorithms.lora.config import LoRA
from lightning_spectral.algorithms.lora.factor_means import AlternatingFactors, FrozenA, PaddedFactors
from lightning_spectral.algorithms.lora.orthonormal import OrthonormalA
from lightning_spectral.algorithms.lora.parallel_terms import ParallelTerms
from lightning_spectral.algorithms.lora.product_means import StackedProducts, TruncatedProducts
from lightning_spectral.algorithms.lora.ranked_products import RankedProducts
from lightning_spectral.algorithms.lora.sampled_terms import FoldedTerms, SampledTerms

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
