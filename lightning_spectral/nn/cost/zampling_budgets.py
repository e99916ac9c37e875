"""The smallest compression of Zampling that a device can afford."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from torch import nn

from lightning_spectral.arguments import Whole, as_patterns
from lightning_spectral.nn.cost.budgets import only_budget
from lightning_spectral.nn.cost.zampling_costs import ZamplingCost, zampling_costs_of
from lightning_spectral.nn.zampling.compressed import DOWNLINK_BITS, Compression

# All of them grow with the number of probabilities, which the search relies on.
NEEDS: Mapping[str, Callable[[ZamplingCost], int]] = MappingProxyType(
    {
        "budget_bytes": lambda cost: cost.round_bytes,
        "budget_uplink_bytes": lambda cost: cost.uplink_bytes,
        "budget_downlink_bytes": lambda cost: cost.downlink_bytes,
        "budget_params": lambda cost: cost.parameters,
    }
)


def compression_for(
    module: nn.Module,
    *,
    budget_bytes: float | None = None,
    budget_uplink_bytes: float | None = None,
    budget_downlink_bytes: float | None = None,
    budget_params: float | None = None,
    degree: int = 10,
    downlink_bits: int | None = None,
    exclude: Sequence[str] = (),
    include: Sequence[str] = (),
    keep_buffers: Sequence[str] = (),
) -> float:
    """The smallest compression of `Zampling` whose cost fits a budget, which has the most probabilities.

    Give exactly one budget. All clients share one compression, so give the budget of the weakest client.

    Args:
        module: Any module; it is not changed.
        budget_bytes: Bytes that may be sent in a client's turn, down and up together, without frozen parameters, which
            are sent only once.
        budget_uplink_bytes: Bytes that may be sent up.
        budget_downlink_bytes: Bytes that may be sent down.
        budget_params: Number of parameters that a client may train or hold.
        degree: As in `zampling_cost_table`.
        downlink_bits: As in `zampling_cost_table`.
        exclude: As in `zampling_cost_table`.
        include: As in `zampling_cost_table`.
        keep_buffers: As in `zampling_cost_table`.

    Returns:
        The number of weights for each probability, at least 1, as `Zampling` takes it.

    Example:
        >>> mlp = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))  # 19,210 weights
        >>> compression_for(mlp, budget_uplink_bytes=200)  # 1,600 bits
        12.00625
    """
    given = {
        "budget_bytes": budget_bytes,
        "budget_uplink_bytes": budget_uplink_bytes,
        "budget_downlink_bytes": budget_downlink_bytes,
        "budget_params": budget_params,
    }
    name, budget = only_budget(given)
    if isinstance(budget, Sequence):
        raise TypeError(f"`{name}` must be one number, since all clients share one compression; give the smallest.")
    degree = Whole(at_least=1)("degree", degree)
    downlink_bits = DOWNLINK_BITS("downlink_bits", downlink_bits)
    keep_buffers = as_patterns("keep_buffers", keep_buffers)
    how = Compression(1, degree, exclude=exclude, include=include)
    num_weights = how.matrix(how.weights_of(module), seed=0).num_rows
    costs = zampling_costs_of(module, how, downlink_bits=downlink_bits, keep_buffers=keep_buffers)

    def needed(num_probs: int) -> int:
        return NEEDS[name](costs.at(num_probs))

    num_probs = bisect_right(range(1, num_weights + 1), budget, key=needed)
    if num_probs < degree:
        raise ValueError(
            f"No compression fits `{name}={budget:,}`: with as many probabilities as the degree, {degree}, it takes "
            f"{needed(degree):,}. Raise the budget, lower the degree, or compress more parameters with `include=`."
        )
    return _factor(num_weights, num_probs)


def _factor(num_weights: int, num_probs: int) -> float:
    """The smallest factor whose number of probabilities, the ceiling of m / factor, is not larger than n."""
    factor = num_weights / num_probs
    while math.ceil(num_weights / factor) > num_probs:  # rounded down
        factor = math.nextafter(factor, math.inf)
    return factor
