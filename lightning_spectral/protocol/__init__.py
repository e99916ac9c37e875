"""What travels between server and devices."""

from lightning_spectral.protocol.records import ClientOutcome, Download, Receipt, RoundSummary, Upload
from lightning_spectral.protocol.schedule import Schedule
from lightning_spectral.protocol.work_unit import WorkUnit

__all__ = ["ClientOutcome", "Download", "Receipt", "RoundSummary", "Schedule", "Upload", "WorkUnit"]
