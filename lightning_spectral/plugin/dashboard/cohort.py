"""Tables of a round's clients, one by one and by keep ratio, and the bytes that they sent and received."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

from lightning_spectral.plugin.dashboard.records import Cell, Table, table
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
