"""What a dashboard shows of an algorithm's round: spectra and draws of sharded layers, or histograms of its state."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import nn

from lightning_spectral.algorithms.capabilities import HasHistograms
from lightning_spectral.algorithms.spectral_round import LayerRound, SpectralRound
from lightning_spectral.plugin.dashboard.records import Histogram, Table, histogram, table

LayerFigures = Mapping[str, Mapping[str, float]]


def algorithm_records(
    opened: object, state: nn.Module | None, round_idx: int, figures: LayerFigures
) -> list[Histogram | Table]:
    """All records of a finished round of one model, apart from its clients; none for a dense algorithm.

    Args:
        opened: The round as the algorithm opened it.
        state: The algorithm's state between rounds, after this round.
        round_idx: Communication round, from 0.
        figures: Figures of each sharded layer, by name: its discrepancy, effective ranks and the like.
    """
    if isinstance(opened, SpectralRound):
        return [*spectral_histograms(opened.layers), layer_table(opened.layers, round_idx, figures)]
    if isinstance(state, HasHistograms):
        return [histogram(name, values) for name, values in state.histograms().items()]
    return []


def spectral_histograms(layers: Mapping[str, LayerRound]) -> Iterator[Histogram]:
    """Each layer's spectrum and, for each keep ratio, inclusion probabilities and multipliers of possible terms."""
    for name, layer in layers.items():
        yield histogram(f"singular_values/{name}", layer.singular_values)
        for ratio, plan in layer.groups.items():
            yield histogram(f"inclusion_probs/{name}/{ratio:g}", plan.inclusion_probs)
            yield histogram(f"multipliers/{name}/{ratio:g}", plan.multipliers[plan.inclusion_probs > 0])


def layer_table(layers: Mapping[str, LayerRound], round_idx: int, figures: LayerFigures) -> Table:
    """One row per sharded layer.

    Args:
        layers: The layers of the round after its clients were added.
        round_idx: Communication round, from 0.
        figures: Further columns of each layer.
    """
    return table(
        "tables/layers",
        [
            {
                "round": round_idx,
                "layer": name,
                "terms": len(layer.singular_values),
                "terms_visited": float(layer.mean.visited.double().mean()),
                "largest_singular_value": float(layer.singular_values.max()),
                **figures.get(name, {}),
            }
            for name, layer in layers.items()
        ],
    )
