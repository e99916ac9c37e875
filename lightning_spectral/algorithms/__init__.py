"""What clients hold, what travels, and how it is averaged."""

from lightning_spectral.algorithms.base import Algorithm
from lightning_spectral.algorithms.costs import cost_table, largest_that_fits
from lightning_spectral.algorithms.fed_avg import DenseHalf, DenseRound, DenseSide, FedAvg
from lightning_spectral.algorithms.fiarse import FIARSE
from lightning_spectral.algorithms.lora import (
    AdapterAggregation,
    AlternatingFactors,
    FoldedTerms,
    FrozenA,
    LoRA,
    OrthonormalA,
    PaddedFactors,
    ParallelTerms,
    RankedProducts,
    SampledTerms,
    StackedProducts,
    TruncatedProducts,
)
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
from lightning_spectral.algorithms.width import WidthSharding
from lightning_spectral.algorithms.zampling import Zampling

__all__ = [
    "FIARSE",
    "AdapterAggregation",
    "Algorithm",
    "AlternatingFactors",
    "DenseHalf",
    "DenseRound",
    "DenseSide",
    "FedAvg",
    "FoldedTerms",
    "FrozenA",
    "LoRA",
    "MatrixMeans",
    "OrthonormalA",
    "PaddedFactors",
    "ParallelTerms",
    "RankedProducts",
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
    "largest_that_fits",
    "spectral_start",
]
