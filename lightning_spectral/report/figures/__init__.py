"""The figures of a report."""

from lightning_spectral.report.figures.curves import bits, coverage, curves, fairness, seconds
from lightning_spectral.report.figures.heat_maps import heat_maps
from lightning_spectral.report.figures.pareto import pareto

__all__ = ["bits", "coverage", "curves", "fairness", "heat_maps", "pareto", "seconds"]
