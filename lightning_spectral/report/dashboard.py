"""Tables and histograms that `RoundDashboard` logged: spectra of layers, and clients."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import TypeAlias

import numpy as np

from lightning_spectral.report.measures import Numbers
from lightning_spectral.report.media import LoggedHistogram, LoggedTable
from lightning_spectral.report.names import CLIENT_TABLE, SPECTRUM
from lightning_spectral.report.runs import LoggedRun

MAX_TERMS = 1_000_000  # of a layer; no matrix has a dimension that large
Spectrum: TypeAlias = Mapping[int, Numbers]  # singular values of a layer in descending order, by round


def spectra(run: LoggedRun) -> Mapping[str, Spectrum]:
    """Singular values of each layer, to within the width of a bin; with several models, by model and layer."""
    found: dict[str, dict[int, Numbers]] = defaultdict(dict)
    for name, by_round in run.media.items():
        model, is_spectrum, layer = name.rpartition(SPECTRUM)
        for round_idx, media in by_round.items():
            if is_spectrum and isinstance(media, LoggedHistogram) and 0 < sum(media.counts) <= MAX_TERMS:
                found[model + layer][round_idx] = _descending(media)
    return {layer: own for layer, own in found.items() if any(values.max() > 0 for values in own.values())}


def client_tables(run: LoggedRun) -> dict[str, tuple[int, LoggedTable]]:
    """The last client table of each model, and its round."""
    found: dict[str, tuple[int, LoggedTable]] = {}
    for name, by_round in run.media.items():
        tables = {index: media for index, media in by_round.items() if isinstance(media, LoggedTable)}
        if name.endswith(CLIENT_TABLE) and tables:
            found[name.removesuffix(CLIENT_TABLE).rstrip("/")] = max(tables.items(), key=lambda item: item[0])
    return found


def _descending(histogram: LoggedHistogram) -> Numbers:
    edges = np.array(histogram.edges)
    middles = (edges[1:] + edges[:-1]) / 2
    return np.repeat(middles, np.array(histogram.counts, dtype=int))[::-1]
