"""What travels between server and devices."""

from lightning_spectral.protocol.records import ClientOutcome, Download, Receipt, RoundSummary, Upload, WorkUnit
from lightning_spectral.protocol.schedule import Schedule

__all__ = ["ClientOutcome", "Download", "Receipt", "RoundSummary", "Schedule", "Upload", "WorkUnit"]
