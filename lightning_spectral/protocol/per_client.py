"""Which client has which keep ratio."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from lightning_spectral.functional.factors import check_keep_ratio
from lightning_spectral.protocol.rng import derived_generator

KeepRatio = float | Mapping[float, float] | Sequence[float]


def check_keep_ratios(keep_ratio: KeepRatio) -> None:
    """Raise ``ValueError`` unless every ratio is in (0, 1] and shares are positive and sum to 1."""
    ratios = _distinct(keep_ratio)
    if not ratios or not all(isinstance(ratio, float | int) for ratio in ratios):
        raise ValueError(
            f"`keep_ratio` must be a number, {{ratio: share}} or a list with one number per client, got {keep_ratio!r}."
        )
    for ratio in ratios:
        check_keep_ratio(ratio)
    if isinstance(keep_ratio, Mapping):
        _check_shares(keep_ratio)


def assign_keep_ratios(keep_ratio: KeepRatio, num_clients: int, seed: int) -> Tensor:
    """Keep ratio of every client.

    Shares are exact: each ratio gets its share of the clients rounded down, and the clients left over go to the
    largest remainders. Which client gets which is drawn from the seed alone.

    Args:
        keep_ratio: One ratio for all; or ``{ratio: share of clients}``; or one ratio per client.
        num_clients: Number of clients.
        seed: The run's seed.

    Returns:
        Shape ``(num_clients,)``, float64.

    Raises:
        ValueError: If a list of ratios has another length than ``num_clients``.

    Example:
        >>> ratios = assign_keep_ratios({0.2: 0.6, 0.4: 0.4}, num_clients=10, seed=0)
        >>> [(ratios == r).sum().item() for r in (0.2, 0.4)]
        [6, 4]
    """
    if isinstance(keep_ratio, Mapping):
        ratios = torch.tensor(list(keep_ratio), dtype=torch.float64)
        in_order = ratios.repeat_interleave(_exact_counts(list(keep_ratio.values()), num_clients))
        return in_order[torch.randperm(num_clients, generator=derived_generator(seed, "keep ratios"))]
    if isinstance(keep_ratio, Sequence):
        if len(keep_ratio) != num_clients:
            raise ValueError(
                f"`keep_ratio` lists {len(keep_ratio)} ratios for {num_clients} clients; give one per client, "
                "one for all, or {ratio: share}."
            )
        return torch.tensor(keep_ratio, dtype=torch.float64)
    return torch.tensor(keep_ratio, dtype=torch.float64).expand(num_clients)  # one number in memory


def _distinct(keep_ratio: KeepRatio) -> list[float]:
    return list(keep_ratio) if isinstance(keep_ratio, Mapping | Sequence) else [keep_ratio]


def _check_shares(shares: Mapping[float, float]) -> None:
    for ratio, share in shares.items():
        if not share > 0.0:
            raise ValueError(f"Shares of `keep_ratio` must be positive, got {share!r} for ratio {ratio}; leave it out.")
    if abs(sum(shares.values()) - 1.0) > 1e-9:
        raise ValueError(
            f"Shares of `keep_ratio` must sum to 1, got {dict(shares)} with sum {sum(shares.values()):g}; "
            "write {ratio: share of clients}, e.g. {0.2: 0.6, 0.4: 0.4}."
        )


def _exact_counts(shares: Sequence[float], num_clients: int) -> Tensor:
    wanted = torch.tensor(shares, dtype=torch.float64) * num_clients
    counts = (wanted + 1e-9).floor().long()
    left_over = num_clients - int(counts.sum())
    order = (counts - wanted).argsort(stable=True)
    counts[order[:left_over]] += 1
    return counts
