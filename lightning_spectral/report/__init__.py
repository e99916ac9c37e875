"""Reports on runs: reads what loggers left on the disk and writes a page; it does not depend on training code."""

from lightning_spectral.report.page import main

__all__ = ["main"]
