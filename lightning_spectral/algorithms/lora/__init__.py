"""Federated LoRA: clients train low-rank adapters of different ranks on a frozen model."""

from lightning_spectral.algorithms.lora.aggregation import AdapterAggregation
from lightning_spectral.algorithms.lora.config import LoRA
from lightning_spectral.algorithms.lora.factor_means import AlternatingFactors, FrozenA, PaddedFactors
from lightning_spectral.algorithms.lora.product_means import StackedProducts, TruncatedProducts
from lightning_spectral.algorithms.lora.sampled_terms import SampledTerms

__all__ = [
    "AdapterAggregation",
    "AlternatingFactors",
    "FrozenA",
    "LoRA",
    "PaddedFactors",
    "SampledTerms",
    "StackedProducts",
    "TruncatedProducts",
]
