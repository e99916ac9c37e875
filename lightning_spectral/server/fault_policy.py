"""Policies for client faults: which of them end a run, and which a round tolerates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

from lightning_spectral.arguments import Number, check_fields
from lightning_spectral.errors import RoundError, check_is
from lightning_spectral.protocol.records import EXPLANATIONS, ClientOutcome, ExclusionReason
from lightning_spectral.simulation import Conditions

REMEDIES: dict[ExclusionReason, str] = {
    "error": "The warnings show what failed.",
    "not_finite": "Look at these clients' data.",
    "no_update": "Look at these clients' data, and at which batches `training_step` skips.",
    "no_data": "Use fewer clients or another partitioner.",
    "dropped_out": "Lower the probability of `ClientDropout`.",
    "late": "Raise the `deadline` of `VirtualClock` or `RemoteClients`, or lower the keep ratio.",
}


class FaultPolicy:
    """What to do about a client with a fault: `Raise` or `LeaveOut`."""


@dataclass(frozen=True)
class Raise(FaultPolicy):
    """End the run with an error that names the round and the client."""


@dataclass(frozen=True)
class LeaveOut(FaultPolicy):
    """Continue without the client: it is left out of the average and counted.

    Args:
        max_share: Largest share of a round's clients that may be left out for this reason, in [0, 1]; if more are, the
            run ends with a `RoundError`. With 1, a round may lose every client and then changes nothing.

    Example:
        >>> faults = Faults(on_error=LeaveOut(max_share=0.2))  # FederatedModule(..., faults=faults)
        >>> faults.ends_run("error"), faults.ends_run("not_finite")
        (False, False)
    """

    max_share: float = 0.5

    def __post_init__(self) -> None:
        check_fields(self, max_share=Number(at_least=0, at_most=1))


@dataclass(frozen=True)
class Faults:
    """For each kind of client fault, whether it ends the run or the round continues without the client.

    Args:
        on_error: An exception in the client's local training.
        on_not_finite: An update with a NaN, an infinite value, or one too large to be summed.
        on_no_update: No optimizer step although there was data: ``training_step`` returned ``None`` for every batch.
        on_no_data: A client to which the partition gives no examples. `Raise` rejects such a partition immediately.
        on_dropped_out: A client that drops out, as simulated by `ClientDropout`.
        on_late: A client that misses the deadline of the `VirtualClock`.

    Note:
        Failures of the server's own work (factorising, drawing, averaging) always end the run.

    Example:
        >>> Faults(on_error=LeaveOut(max_share=0.1)).answer("error")
        LeaveOut(max_share=0.1)
        >>> Faults().answer("error")
        Raise()
    """

    on_error: FaultPolicy = Raise()
    on_not_finite: FaultPolicy = LeaveOut()
    on_no_update: FaultPolicy = LeaveOut()
    on_no_data: FaultPolicy = Raise()
    on_dropped_out: FaultPolicy = LeaveOut(max_share=1.0)
    on_late: FaultPolicy = LeaveOut(max_share=1.0)

    def __post_init__(self) -> None:
        for field in fields(self):
            check_is(field.name, getattr(self, field.name), LeaveOut | Raise)

    def answer(self, reason: ExclusionReason) -> Raise | LeaveOut:
        """Return the policy for a client left out for this reason; ``"surplus"`` and ``"spent"`` never end the run."""
        answer: Raise | LeaveOut = LeaveOut(1.0) if reason in ("surplus", "spent") else getattr(self, f"on_{reason}")
        return answer

    def ends_run(self, reason: ExclusionReason) -> bool:
        """Whether one client with this fault ends the run."""
        return isinstance(self.answer(reason), Raise)

    def check_private(self) -> None:
        """Raise ``ValueError`` if a client could end the run by its data, and so say something of them."""
        for field in fields(self):
            answer = getattr(self, field.name)
            if field.name != "on_no_data" and not (isinstance(answer, LeaveOut) and answer.max_share == 1.0):
                raise ValueError(
                    f"A client of a private run must not end it, whatever its data; `Faults({field.name}={answer})` "
                    "lets it. Leave `faults` out, or write LeaveOut(max_share=1.0)."
                )

    def exclusion_reasons(
        self, conditions: Conditions, of_executor: Sequence[ExclusionReason] = ()
    ) -> tuple[ExclusionReason, ...]:
        """The reasons for which a run may leave clients out of its rounds."""
        own: tuple[ExclusionReason, ...] = ("error", "not_finite", "no_update", "no_data")
        found = dict.fromkeys([*own, *conditions.exclusion_reasons, *of_executor])
        return tuple(reason for reason in found if not self.ends_run(reason))

    def check_round(self, round_idx: int, outcomes: Sequence[ClientOutcome], smaller_updates: str = "") -> None:
        """Check that a round lost no more clients than allowed.

        Args:
            round_idx: Communication round, from 0.
            outcomes: Of its clients.
            smaller_updates: What the user can do about updates that are too large, without a full stop.

        Raises:
            RoundError: If it lost more; the message names the reason, the clients and what to do.
        """
        for reason, client_ids in clients_by_reason(outcomes).items():
            answer = self.answer(reason)
            if isinstance(answer, LeaveOut) and len(client_ids) / len(outcomes) > answer.max_share:
                *others, last = map(str, sorted(client_ids))
                who = f"clients {', '.join(others)} and {last}" if others else f"client {last}"
                remedy = f"{smaller_updates}. " if reason == "not_finite" and smaller_updates else ""
                raise RoundError(
                    f"Round {round_idx}: {len(client_ids)} of {len(outcomes)} clients are left out "
                    f"({who}: {EXPLANATIONS[reason]}), more than the share of "
                    f"{answer.max_share:g} that `Faults.on_{reason}` allows; the server's weights are unchanged. "
                    f"{remedy}{REMEDIES[reason]}"
                )


FORGIVING = Faults(*[LeaveOut(1.0)] * 3)  # of a private run


def clients_by_reason(outcomes: Sequence[ClientOutcome]) -> dict[ExclusionReason, list[int]]:
    """Ids of the clients that were left out, by reason."""
    by_reason: dict[ExclusionReason, list[int]] = {}
    for outcome in outcomes:
        if outcome.left_out is not None:
            by_reason.setdefault(outcome.left_out, []).append(outcome.client_id)
    return by_reason
