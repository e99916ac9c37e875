"""What clients hold, what is sent, and how it is averaged."""

from lightning_spectral.algorithms.base import Algorithm, Promises
from lightning_spectral.algorithms.capacities import Capacities, KeepRatios
from lightning_spectral.algorithms.costs import cost_table, largest_that_fits
from lightning_spectral.algorithms.fed_avg import DenseRound, FedAvg
from lightning_spectral.algorithms.fiarse import FIARSE
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
from lightning_spectral.algorithms.lora.algorithm import LoRA, save_peft_adapter
from lightning_spectral.algorithms.memory.controls import FedDyn, Scaffold
from lightning_spectral.algorithms.memory.ditto import Ditto
from lightning_spectral.algorithms.memory.fed_buff import FedBuff
from lightning_spectral.algorithms.memory.stale_updates import StaleUpdates
from lightning_spectral.algorithms.q_fed_avg import QFedAvg
from lightning_spectral.algorithms.spectral.aggregation import MatrixMeans, TermAggregation, TermMeans
from lightning_spectral.algorithms.spectral.algorithm import SpectralSharding
from lightning_spectral.algorithms.spectral.start import SpectralStart, spectral_start
from lightning_spectral.algorithms.width import WidthSharding, narrow_model
from lightning_spectral.algorithms.zampling import Zampling

__all__ = [
    "FIARSE",
    "AdapterAggregation",
    "Algorithm",
    "AlternatingFactors",
    "Capacities",
    "DenseRound",
    "Ditto",
    "FedAvg",
    "FedBuff",
    "FedDyn",
    "FoldedTerms",
    "FrozenA",
    "KeepRatios",
    "LoRA",
    "MatrixMeans",
    "OrthonormalA",
    "PaddedFactors",
    "ParallelTerms",
    "Promises",
    "QFedAvg",
    "RankedProducts",
    "SampledTerms",
    "Scaffold",
    "SpectralSharding",
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
    "narrow_model",
    "save_peft_adapter",
    "spectral_start",
]
