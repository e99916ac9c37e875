"""Why a client that was asked to take part is not in the round's average."""

from __future__ import annotations

from typing import Literal

Reason = Literal["error", "not_finite", "no_update", "no_data", "dropped_out", "late", "surplus"]

WHAT_HAPPENED: dict[Reason, str] = {
    "error": "its training failed",
    "not_finite": "its update is not finite or too large to be summed",
    "no_update": "it took no step, because `training_step` returned no loss for any of its batches",
    "no_data": "it has no examples",
    "dropped_out": "it dropped out",
    "late": "it missed the deadline",
    "surplus": "enough others were faster",
}
