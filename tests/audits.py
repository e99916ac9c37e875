"""What runs with and without one client, or one example, say of the epsilon that hides it."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy.stats import beta


def lower_bound(scores_in: Sequence[float], scores_out: Sequence[float], delta: float) -> float:
    """A bound on epsilon from below, wrong with a probability under 1e-3: Jagielski et al. (2020).

    The threshold is chosen on the first half of the runs and its rates are bounded on the second.
    """
    half = len(scores_in) // 2
    first_in, first_out = np.array(scores_in[:half]), np.array(scores_out[:half])
    rest_in, rest_out = np.array(scores_in[half:]), np.array(scores_out[half:])

    def bound(hits: int, alarms: int) -> float:
        least_hits = beta.ppf(5e-4, hits, half - hits + 1) if hits else 0.0
        most_alarms = beta.ppf(1 - 5e-4, alarms + 1, half - alarms) if alarms < half else 1.0
        return math.log(max(least_hits - delta, 1e-9) / most_alarms)

    def at(threshold: float, with_client: Any, without: Any) -> float:
        return bound(int((with_client > threshold).sum()), int((without > threshold).sum()))

    best = max(np.quantile(first_in, np.linspace(0.02, 0.98, 49)), key=lambda t: at(t, first_in, first_out))
    return at(best, rest_in, rest_out)
