"""Reports on runs: reads what loggers left on the disk and writes a page; it knows nothing of training."""

from lightning_spectral.report.command import main

__all__ = ["main"]
