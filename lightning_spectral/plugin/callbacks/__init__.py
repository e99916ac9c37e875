"""Callbacks: the boundaries of a round, and observers of rounds."""

from lightning_spectral.plugin.callbacks.batch_norm_estimation import BatchNormEstimation
from lightning_spectral.plugin.callbacks.dashboard import RoundDashboard, WandbRounds
from lightning_spectral.plugin.callbacks.diagnostics import SpectralDiagnostics, UpdateAlignment
from lightning_spectral.plugin.callbacks.evaluation import ClientEvaluation, ClientRow, ClientTable, SampledNetworks
from lightning_spectral.plugin.callbacks.progress import RoundLines, RoundProgressBar
from lightning_spectral.plugin.callbacks.record import CommunicationLedger, LedgerRow, RoundHistory
from lightning_spectral.plugin.callbacks.round_callback import Aggregation, RoundCallback, SubmodelSampling, SVDRefresh

__all__ = [
    "Aggregation",
    "BatchNormEstimation",
    "ClientEvaluation",
    "ClientRow",
    "ClientTable",
    "CommunicationLedger",
    "LedgerRow",
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
