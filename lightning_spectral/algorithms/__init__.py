"""What clients hold, what travels, and how it is averaged."""

from lightning_spectral.algorithms.base import Algorithm
from lightning_spectral.algorithms.costs import CapacityTable, cost_table
from lightning_spectral.algorithms.fed_avg import DenseHalf, DenseRound, DenseSide, FedAvg
from lightning_spectral.algorithms.fiarse import FIARSE
from lightning_spectral.algorithms.lora import (
    AdapterAggregation,
    AlternatingFactors,
    FrozenA,
    LoRA,
    PaddedFactors,
    SampledTerms,
    StackedProducts,
    TruncatedProducts,
)
from lightning_spectral.algorithms.lora.budgets import rank_for
from lightning_spectral.algorithms.lora.costs import LoRACostTable, lora_cost_table
from lightning_spectral.algorithms.memory import Scaffold, StaleUpdates
from lightning_spectral.algorithms.spectral import (
    MatrixMeans,
    SpectralSharding,
    SpectralSide,
    SpectralStart,
    TermAggregation,
    TermMeans,
    spectral_start,
)
from lightning_spectral.algorithms.sub_model_costs import sub_model_cost_table, sub_model_keep_ratio_for
from lightning_spectral.algorithms.width import WidthSharding
from lightning_spectral.algorithms.zampling import Zampling

__all__ = [
    "FIARSE",
    "AdapterAggregation",
    "Algorithm",
    "AlternatingFactors",
    "CapacityTable",
    "DenseHalf",
    "DenseRound",
    "DenseSide",
    "FedAvg",
    "FrozenA",
    "LoRA",
    "LoRACostTable",
    "MatrixMeans",
    "PaddedFactors",
    "SampledTerms",
    "Scaffold",
    "SpectralSharding",
    "SpectralSide",
    "SpectralStart",
    "StackedProducts",
    "StaleUpdates",
    "TermAggregation",
    "TermMeans",
    "TruncatedProducts",
    "WidthSharding",
    "Zampling",
    "cost_table",
    "lora_cost_table",
    "rank_for",
    "spectral_start",
    "sub_model_cost_table",
    "sub_model_keep_ratio_for",
]
