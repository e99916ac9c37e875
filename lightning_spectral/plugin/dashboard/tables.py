"""What a dashboard shows of a round: its clients, one by one and by keep ratio, and its spectra or state."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from torch import Tensor, nn

from lightning_spectral.algorithms.base import Round
from lightning_spectral.algorithms.capabilities import HasHistograms
from lightning_spectral.algorithms.term_draws import TermDraws
from lightning_spectral.plugin.dashboard.drawings import spectra_drawing
from lightning_spectral.plugin.dashboard.records import Cell, Histogram, Shown, Table, histogram, table
from lightning_spectral.protocol.records import ClientOutcome, RoundSummary
from lightning_spectral.server.metrics import mean_loss

ClientColumns = Mapping[str, Mapping[int, float]]


def round_bytes(summary: RoundSummary) -> int:
    """Bytes sent in a model's round, in both directions, including those of measuring before it."""
    return sum(client.downlink_bytes + client.uplink_bytes for client in (*summary.clients, *summary.measured))


def client_table(summary: RoundSummary, more: Sequence[ClientColumns] = ()) -> Table:
    """One row per client of a round, in the cohort's order.

    Args:
        summary: The finished round of one model.
        more: Further columns by title, each with values by client; a client without a value has an empty cell.
    """
    titles = {title: values for columns in more for title, values in columns.items()}
    return table(
        "tables/clients",
        [
            {**_row(client), **{title: values.get(client.client_id) for title, values in titles.items()}}
            for client in summary.clients
        ],
    )


def _row(client: ClientOutcome) -> dict[str, Cell]:
    return {
        "round": client.round_idx,
        "client": client.client_id,
        "keep_ratio": client.keep_ratio,
        "examples": client.num_examples,
        "steps": client.num_steps,
        "loss": client.loss,
        "bytes_down": client.downlink_bytes,
        "bytes_up": client.uplink_bytes,
        "seconds": client.seconds,
        "virtual_seconds": client.virtual_seconds,
        "left_out": client.left_out or "",
    }


def keep_ratio_table(summary: RoundSummary) -> Table:
    """One row per keep ratio of a round's clients, ascending."""
    groups: dict[float, list[ClientOutcome]] = defaultdict(list)
    for client in summary.clients:
        groups[client.keep_ratio].append(client)
    return table(
        "tables/keep_ratios",
        [_group_row(ratio, replace(summary, clients=tuple(groups[ratio]))) for ratio in sorted(groups)],
    )


def _group_row(keep_ratio: float, group: RoundSummary) -> dict[str, Cell]:
    return {
        "round": group.round_idx,
        "keep_ratio": keep_ratio,
        "clients": len(group.averaged),
        "clients_left_out": len(group.clients) - len(group.averaged),
        "examples": sum(client.num_examples for client in group.averaged),
        "loss": mean_loss(group),
        "bytes_down": sum(client.downlink_bytes for client in group.clients),
        "bytes_up": sum(client.uplink_bytes for client in group.clients),
    }


LayerFigures = Mapping[str, Mapping[str, float]]


def algorithm_records(
    opened: Round, state: nn.Module | None, round_idx: int, figures: LayerFigures, draws: bool = False
) -> list[Shown]:
    """All records of a finished round of one model, apart from its clients; none for a dense algorithm.

    Args:
        opened: The round.
        state: The algorithm's state.
        round_idx: The round's index.
        figures: Further figures of each layer, for the table.
        draws: Whether to draw the spectra as well.
    """
    if opened.term_draws:
        pictures = [spectra_drawing(opened.term_draws)] if draws else []
        return [*spectral_histograms(opened.term_draws), layer_table(opened, round_idx, figures), *pictures]
    shown: Mapping[str, Tensor] = state.histograms() if isinstance(state, HasHistograms) else {}
    return [histogram(name, values) for name, values in shown.items()]


def spectral_histograms(layers: Mapping[str, TermDraws]) -> Iterator[Histogram]:
    """Each layer's spectrum and, for each keep ratio, inclusion probabilities and multipliers of possible terms."""
    for name, layer in layers.items():
        yield histogram(f"singular_values/{name}", layer.singular_values)
        for ratio, plan in layer.groups.items():
            yield histogram(f"inclusion_probs/{name}/{ratio:g}", plan.inclusion_probs)
            yield histogram(f"multipliers/{name}/{ratio:g}", plan.multipliers[plan.inclusion_probs > 0])


def layer_table(opened: Round, round_idx: int, figures: LayerFigures) -> Table:
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
