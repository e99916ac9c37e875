"""The parts of a round that know neither Lightning nor what an algorithm sends."""

from lightning_spectral.protocol.records import ClientOutcome, ClientTask, Download, RoundSummary, Upload

__all__ = ["ClientOutcome", "ClientTask", "Download", "RoundSummary", "Upload"]
