"""What travels between server and devices."""

from lightning_spectral.protocol.per_client import Schedule
from lightning_spectral.protocol.records import ClientOutcome, Download, Receipt, RoundSummary, Upload, WorkUnit

__all__ = ["ClientOutcome", "Download", "Receipt", "RoundSummary", "Schedule", "Upload", "WorkUnit"]
