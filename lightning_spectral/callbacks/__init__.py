"""When things happen: round boundaries, and what watches rounds go by."""

from lightning_spectral.callbacks.alignment import UpdateAlignment
from lightning_spectral.callbacks.boundaries import Aggregation, SubmodelSampling, SVDRefresh
from lightning_spectral.callbacks.diagnostics import SpectralDiagnostics
from lightning_spectral.callbacks.history import RoundHistory
from lightning_spectral.callbacks.ledger import CommunicationLedger
from lightning_spectral.callbacks.progress import RoundProgressBar
from lightning_spectral.callbacks.rounds_as_steps import RoundsAsSteps
from lightning_spectral.callbacks.wandb import WandbRounds

__all__ = [
    "Aggregation",
    "CommunicationLedger",
    "RoundHistory",
    "RoundProgressBar",
    "RoundsAsSteps",
    "SVDRefresh",
    "SpectralDiagnostics",
    "SubmodelSampling",
    "UpdateAlignment",
    "WandbRounds",
]
