"""Callbacks: the boundaries of a round, and observers of rounds."""

from lightning_spectral.plugin.callbacks.alignment import UpdateAlignment
from lightning_spectral.plugin.callbacks.batch_norm_estimation import BatchNormEstimation
from lightning_spectral.plugin.callbacks.client_evaluation import ClientEvaluation
from lightning_spectral.plugin.callbacks.client_table import ClientRow, ClientTable
from lightning_spectral.plugin.callbacks.dashboard import RoundDashboard, WandbRounds
from lightning_spectral.plugin.callbacks.diagnostics import SpectralDiagnostics
from lightning_spectral.plugin.callbacks.history import RoundHistory
from lightning_spectral.plugin.callbacks.ledger import CommunicationLedger
from lightning_spectral.plugin.callbacks.progress import RoundProgressBar
from lightning_spectral.plugin.callbacks.round_callback import Aggregation, RoundCallback, SubmodelSampling, SVDRefresh
from lightning_spectral.plugin.callbacks.round_lines import RoundLines
from lightning_spectral.plugin.callbacks.sampled_networks import SampledNetworks

__all__ = [
    "Aggregation",
    "BatchNormEstimation",
    "ClientEvaluation",
    "ClientRow",
    "ClientTable",
    "CommunicationLedger",
    "RoundCallback",
    "RoundDashboard",
    "RoundHistory",
    "RoundLines",
    "RoundProgressBar",
    "SVDRefresh",
    "SampledNetworks",
    "SpectralDiagnostics",
    "SubmodelSampling",
    "UpdateAlignment",
    "WandbRounds",
]
