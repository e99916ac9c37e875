"""The metrics of a finished round."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from lightning_spectral.protocol.records import ClientOutcome, LoggedValue, RoundSummary


def round_metrics(summary: RoundSummary) -> dict[str, float]:
    """Collect the metrics to log for a finished round.

    Returns:
        - ``fl/round``: index of the round, from 0; the x axis of all other metrics.
        - ``fl/loss``: training loss per example over the clients in the average; NaN if none took a step.
        - ``fl/clients``, ``fl/clients_left_out``, ``fl/examples``: clients in the average, clients left out of it,
          examples of those in it.
        - ``fl/left_out_<reason>``: clients left out for this reason, for each reason that this run allows.
        - ``fl/bytes_down``, ``fl/bytes_up``: bytes that travelled, summed over all clients.
        - ``fl/seconds_<stage>``: wall-clock seconds of each stage.
        - ``fl/<name>``: the algorithm's own metrics.
    """
    kept = [client for client in summary.clients if not client.left_out]
    return {
        "fl/round": float(summary.round_idx),
        "fl/loss": mean_loss(summary),
        "fl/clients": float(len(kept)),
        "fl/clients_left_out": float(len(summary.clients) - len(kept)),
        **{f"fl/left_out_{reason}": float(count) for reason, count in summary.left_out.items()},
        "fl/examples": float(sum(client.num_examples for client in kept)),
        "fl/bytes_down": float(sum(client.downlink_bytes for client in summary.clients)),
        "fl/bytes_up": float(sum(client.uplink_bytes for client in summary.clients)),
        **{f"fl/seconds_{stage}": seconds for stage, seconds in summary.seconds.items()},
        **{f"fl/{name}": value for name, value in summary.diagnostics.items()},
    }


def mean_loss(summary: RoundSummary) -> float:
    """Training loss per example over the clients in the average; NaN if none took a step."""
    kept = [client for client in summary.clients if not client.left_out and client.num_steps > 0]
    return _weighted_mean([(client.loss, client.num_examples) for client in kept])


def round_means(clients: Sequence[ClientOutcome]) -> dict[str, LoggedValue]:
    """Average each logged value over the clients that logged it, weighted by their numbers of examples."""
    by_name: dict[str, list[tuple[LoggedValue, int]]] = {}
    for client in clients:
        for name, entry in client.logged.items():
            by_name.setdefault(name, []).append((entry, client.num_examples))
    return {
        name: replace(entries[0][0], value=_weighted_mean([(entry.value, size) for entry, size in entries]))
        for name, entries in by_name.items()
    }


def _weighted_mean(values: Sequence[tuple[float, int]]) -> float:
    """Weighted mean, independent of the order; NaN if there are no values."""
    weight = sum(size for _, size in values)
    terms = [value * size for value, size in values]
    if not weight or not all(map(math.isfinite, terms)):  # `fsum` may raise on infinities
        return sum(terms) / weight if weight else math.nan
    return math.fsum(terms) / weight
