"""The metrics of a finished round."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from lightning_spectral.protocol.records import ClientOutcome, LoggedValue, RoundSummary

# What every round logs, whatever the algorithm; with several models, after the model's name.
ALWAYS = frozenset(
    f"fl/{name}" for name in ("round", "loss", "clients", "clients_left_out", "examples", "bytes_down", "bytes_up")
)


def round_metrics(summary: RoundSummary) -> dict[str, float]:
    """Collect the metrics to log for a finished round.

    Returns:
        - ``fl/round``: index of the round, from 0; the x axis of all other metrics.
        - ``fl/loss``: training loss per example over the clients in the average.
        - ``fl/values_not_finite``: losses and logged values of these clients that are NaN or infinite, and not in the
          means; only if there are any. A mean of nothing but such values is one of them.
        - ``fl/clients``, ``fl/clients_left_out``, ``fl/examples``: clients in the average, clients left out of it, and
          examples of those in it.
        - ``fl/left_out_<reason>``: clients left out for this reason, for each reason that this run allows.
        - ``fl/bytes_down``, ``fl/bytes_up``: bytes downloaded and uploaded, summed over all clients.
        - ``fl/seconds_<stage>``: wall-clock seconds of each stage.
        - ``fl/measured_clients``, ``fl/measured_examples``, ``fl/bytes_measuring``: what a sampler measured beforehand.
        - ``fl/example_epsilon``: the largest of a client, where examples are hidden.
        - ``fl/<name>``: the algorithm's own metrics, and the sampler's.

        A private round has only its index and what depends on noisy sums alone: ``fl/epsilon``, ``fl/clip``, and the
        algorithm's own metrics.

        With several models, the names of all metrics except ``fl/round`` begin with the model's name. There is no loss
        for a round in which no client took a step or says its loss, nor for a model that no client was asked to train.
    """
    kept, measured = summary.averaged, summary.measured
    own = {
        **({"loss": mean_loss(summary)} if summary.has_losses else {}),  # a NaN would stop a run that monitors it
        "clients": float(len(kept)),
        "clients_left_out": float(len(summary.clients) - len(kept)),
        **{f"left_out_{reason}": float(count) for reason, count in summary.left_out.items()},
        "examples": float(sum(client.num_examples for client in kept)),
        "bytes_down": float(sum(client.downlink_bytes for client in summary.clients)),
        "bytes_up": float(sum(client.uplink_bytes for client in summary.clients)),
        **{f"seconds_{stage}": seconds for stage, seconds in summary.seconds.items()},
    }
    if measured:
        own["measured_clients"] = float(len(measured))
        own["measured_examples"] = float(sum(client.num_examples for client in measured))
        own["bytes_measuring"] = float(sum(client.downlink_bytes + client.uplink_bytes for client in measured))
    said = [client.loss for client in kept if client.num_steps > 0 and not client.is_masked]
    said += [entry.value for client in kept for entry in client.logged.values()]
    if count := sum(not math.isfinite(value) for value in said):
        own["values_not_finite"] = float(count)
    if epsilons := [client.example_epsilon for client in kept if client.example_epsilon is not None]:
        own["example_epsilon"] = max(epsilons)  # unless it is known of all clients of the run
    if summary.is_private:
        own = {}
    own |= summary.diagnostics
    return {"fl/round": float(summary.round_idx), **{summary.metric(f"fl/{n}"): value for n, value in own.items()}}


def logged_by_clients(summary: RoundSummary) -> dict[str, LoggedValue]:
    """The values that clients logged, averaged over a round, by the names under which they are logged."""
    return {summary.metric(name): entry for name, entry in summary.logged.items()}


def mean_loss(summary: RoundSummary) -> float:
    """Training loss per example over the clients in the average; NaN if none took a step."""
    trained = [client for client in summary.averaged if client.num_steps > 0]
    return _weighted_mean([(client.loss, client.num_examples) for client in trained])


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
    """Weighted mean of the finite values, independent of the order; of the others if there is none, NaN of nothing."""
    kept = [(value, size) for value, size in values if math.isfinite(value)] or values
    weight = sum(size for _, size in kept)
    terms = [value * size for value, size in kept]
    add = math.fsum if all(map(math.isfinite, terms)) else sum  # `fsum` may raise on infinities
    return add(terms) / weight if weight else math.nan
