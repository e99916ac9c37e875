"""The reasons for which a client that was asked to take part is left out of a round's average."""

from __future__ import annotations

from typing import Literal

ExclusionReason = Literal["error", "not_finite", "no_update", "no_data", "dropped_out", "late", "surplus"]

# Phrases that follow one client or several: "clients 3 and 5: training failed".
EXPLANATIONS: dict[ExclusionReason, str] = {
    "error": "training failed",
    "not_finite": "update not finite or too large to be summed",
    "no_update": "no step taken, because `training_step` returned no loss for any batch",
    "no_data": "no training examples",
    "dropped_out": "dropped out",
    "late": "missed the deadline",
    "surplus": "enough other clients finished first",
}
