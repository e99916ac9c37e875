"""What a dashboard shows of an algorithm's round: spectra and draws of sharded layers, or histograms of its state."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import Tensor, nn

from lightning_spectral.algorithms.capabilities import DrawsTerms, HasHistograms
from lightning_spectral.algorithms.term_draws import TermDraws
from lightning_spectral.plugin.dashboard.records import Histogram, Table, histogram, table

LayerFigures = Mapping[str, Mapping[str, float]]


def algorithm_records(
    opened: object, state: nn.Module | None, round_idx: int, figures: LayerFigures
) -> list[Histogram | Table]:
    """All records of a finished round of one model, apart from its clients; none for a dense algorithm."""
    if isinstance(opened, DrawsTerms):
        return [*spectral_histograms(opened.term_draws), layer_table(opened, round_idx, figures)]
    shown: Mapping[str, Tensor] = state.histograms() if isinstance(state, HasHistograms) else {}
    return [histogram(name, values) for name, values in shown.items()]


def spectral_histograms(layers: Mapping[str, TermDraws]) -> Iterator[Histogram]:
    """Each layer's spectrum and, for each keep ratio, inclusion probabilities and multipliers of possible terms."""
    for name, layer in layers.items():
        yield histogram(f"singular_values/{name}", layer.singular_values)
        for ratio, plan in layer.groups.items():
            yield histogram(f"inclusion_probs/{name}/{ratio:g}", plan.inclusion_probs)
            yield histogram(f"multipliers/{name}/{ratio:g}", plan.multipliers[plan.inclusion_probs > 0])


def layer_table(opened: DrawsTerms, round_idx: int, figures: LayerFigures) -> Table:
    """One row per sharded layer, of a round whose clients were added, with further figures of each layer."""
    visited = opened.visited_terms()
    return table(
        "tables/layers",
        [
            {
                "round": round_idx,
                "layer": name,
                "terms": len(layer.singular_values),
                "terms_visited": float(visited[name].double().mean()),
                "largest_singular_value": float(layer.singular_values.max()),
                **figures.get(name, {}),
            }
            for name, layer in opened.term_draws.items()
        ],
    )
