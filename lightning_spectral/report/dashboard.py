"""Tables and histograms that a dashboard logged: spectra of layers, and clients."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import TypeAlias

import numpy as np

from lightning_spectral.report.measures import Numbers
from lightning_spectral.report.names import (
    CLIENT_TABLE,
    LAYER_COLUMN,
    SINGULAR_VALUE_COLUMN,
    SPECTRA_TABLE,
    SPECTRUM,
)
from lightning_spectral.report.runs import Histogram, Media, Run, Table

Spectrum: TypeAlias = Mapping[int, Numbers]  # singular values of a layer, descending, by round


def spectra(run: Run) -> Mapping[str, Spectrum]:
    """Singular values of each layer.

    Values from a histogram are those of the middles of its bins.
    """
    found: dict[str, dict[int, Numbers]] = defaultdict(dict)
    for name, by_round in run.media.items():
        for round_idx, media in by_round.items():
            if name.startswith(SPECTRUM):
                found[name.removeprefix(SPECTRUM)][round_idx] = _descending(_singular_values(media))
            elif name == SPECTRA_TABLE and isinstance(media, Table):
                for layer, values in _by_layer(media).items():
                    found[layer][round_idx] = values
    return found


def client_table(run: Run) -> tuple[int, Table] | None:
    """The last table of clients, and its round."""
    tables = {index: media for index, media in run.media.get(CLIENT_TABLE, {}).items() if isinstance(media, Table)}
    return max(tables.items(), key=lambda item: item[0]) if tables else None


def _by_layer(table: Table) -> dict[str, Numbers]:
    rows: dict[str, list[float]] = defaultdict(list)
    for layer, value in zip(table.column(LAYER_COLUMN), table.column(SINGULAR_VALUE_COLUMN), strict=True):
        rows[str(layer)].append(float(value))
    return {layer: _descending(np.array(values)) for layer, values in rows.items()}


def _singular_values(media: Media) -> Numbers:
    if isinstance(media, Histogram):
        edges = np.array(media.edges)
        return np.repeat((edges[1:] + edges[:-1]) / 2, np.array(media.counts, dtype=int))
    return np.array(media.column(SINGULAR_VALUE_COLUMN), dtype=np.float64)


def _descending(values: Numbers) -> Numbers:
    return np.sort(values)[::-1]
