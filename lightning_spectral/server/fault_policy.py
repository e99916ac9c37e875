"""Policies for client faults: which of them end a run, which a round tolerates, and how far one client may go."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial

import torch

from lightning_spectral.algorithms.base import Algorithm
from lightning_spectral.arguments import Number, check_fields
from lightning_spectral.errors import RoundError, check_is
from lightning_spectral.protocol.records import EXPLANATIONS, ClientOutcome, Download, ExclusionReason, Tensors, Upload
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
        on_no_update: No optimizer step, although there was something to train: ``training_step`` returned ``None``
            for every batch.
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
            answer = getattr(self, field.name)
            if not isinstance(answer, Raise | LeaveOut):
                check_is(field.name, answer, LeaveOut)

    def answer(self, reason: ExclusionReason) -> Raise | LeaveOut:
        """Return the policy for a client left out for this reason; a surplus client never ends the run."""
        answer: Raise | LeaveOut = LeaveOut(1.0) if reason == "surplus" else getattr(self, f"on_{reason}")
        return answer

    def ends_run(self, reason: ExclusionReason) -> bool:
        """Whether one client with this fault ends the run."""
        return isinstance(self.answer(reason), Raise)

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


def clients_by_reason(outcomes: Sequence[ClientOutcome]) -> dict[ExclusionReason, list[int]]:
    """Ids of the clients that were left out, by reason."""
    by_reason: dict[ExclusionReason, list[int]] = defaultdict(list)
    for outcome in outcomes:
        if outcome.left_out is not None:
            by_reason[outcome.left_out].append(outcome.client_id)
    return dict(by_reason)


@torch.no_grad()
def update_norm(sent: Tensors, returned: Tensors, expected: Tensors | None = None) -> float:
    """Euclidean norm of what came back minus what was sent, over the tensors that were sent both ways.

    Args:
        sent: The tensors that a device was sent, by name.
        returned: The tensors that it sent back.
        expected: The change that the server expects, which is subtracted; ``None`` for none. Tensors without an entry
            are expected to stay unchanged.

    Returns:
        The norm, in units of the weights.

    Example:
        >>> sent, returned = {"w": torch.zeros(2), "steps": torch.tensor(3)}, {"w": torch.tensor([3.0, 4.0])}
        >>> update_norm(sent, returned), update_norm(sent, returned, expected={"w": torch.tensor([3.0, 0.0])})
        (5.0, 4.0)
    """
    return _norm(
        _single(returned[name]) - _single(before) - (expected or {}).get(name, 0.0)
        for name, before in _both_ways(sent, returned)
    )


def _single(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of a precision in which differences of half-precision numbers do not overflow."""
    return tensor.float() if tensor.element_size() < 4 else tensor


def _norm(tensors: Iterable[torch.Tensor]) -> float:
    """Euclidean norm of all values together."""
    squares = [tensor.double().square().sum() for tensor in tensors]
    return math.sqrt(float(torch.stack(squares).sum())) if squares else 0.0


def _scale(sent: Tensors, both: Tensors) -> float:
    weights = [tensor for tensor in sent.values() if tensor.is_floating_point()]
    return max(_norm(weights), math.sqrt(sum(tensor.numel() for tensor in both.values())))


def _both_ways(sent: Tensors, returned: Tensors) -> Iterator[tuple[str, torch.Tensor]]:
    """Those of the tensors sent that came back in the same shape, and that can be changed in part."""
    for name, before in sent.items():
        if name in returned and before.is_floating_point() and before.shape == returned[name].shape:
            yield name, before


class UpdateBound(ABC):
    r"""Shortens a client's update whose norm is larger than a bound, at the server and before it is summed.

    The update becomes :math:`\Delta \min(1, b / \|\Delta\|)`, with the norm over all tensors that are sent both ways:
    for sharded layers over the change of the factors, not of their product. Each round counts the clients whose update
    was shortened, as ``fl/clients_bounded``. A device that sends plausible values within the bound still changes the
    average by as much as its weight allows; and where terms are averaged over those who hold them, the only holder of a
    term decides it alone, whatever its weight.
    """

    @abstractmethod
    def limit(self, sent: Callable[[], float], usual: float) -> float:
        """The bound b, in units of the weights.

        Args:
            sent: Returns the norm of what the client was sent, or of as many ones as it sends back if that is larger.
            usual: Median norm of the updates of an earlier round; NaN if there is none.
        """

    def check(self, algorithm: Algorithm) -> None:
        """Raise ``ValueError`` if an algorithm's uploads are not new values of what was sent."""
        if not algorithm.updates_have_norms:
            name = type(self).__name__
            raise ValueError(
                f"{name} needs update norms, which {type(algorithm).__name__} does not provide; leave it out."
            )

    @torch.no_grad()
    def applied(self, download: Download, upload: Upload, usual: float = math.nan, norm: float | None = None) -> Upload:
        """An upload whose values are finite, shortened if that is needed; otherwise the same object.

        Args:
            download: What the client was sent.
            upload: What it sent back.
            usual: As for `limit`.
            norm: That of the update, if it is known.
        """
        sent, returned = download.tensors, upload.tensors
        both = dict(_both_ways(sent, returned))
        norm = update_norm(sent, returned) if norm is None else norm
        limit = self.limit(partial(_scale, sent, both), usual)
        if norm <= limit:
            return upload
        shortened = {
            name: _single(before).lerp(_single(returned[name]), limit / norm).to(before)
            for name, before in both.items()
        }
        return replace(upload, tensors={**returned, **shortened})


@dataclass(frozen=True)
class MaxUpdateNorm(UpdateBound):
    """Shortens updates whose norm is larger than a number; see `UpdateBound`.

    Args:
        norm: The bound, in units of the weights, positive.

    Example:
        >>> from lightning_spectral.protocol.records import WorkUnit
        >>> download = Download(WorkUnit(3), 1.0, {"w": torch.zeros(2)})
        >>> upload = Upload(WorkUnit(3), {"w": torch.tensor([3.0, 4.0])})
        >>> MaxUpdateNorm(1.0).applied(download, upload).tensors
        {'w': tensor([0.6000, 0.8000])}
        >>> MaxUpdateNorm(5.0).applied(download, upload) is upload
        True
    """

    norm: float

    def __post_init__(self) -> None:
        check_fields(self, norm=Number(above=0))

    def limit(self, sent: Callable[[], float], usual: float) -> float:
        return self.norm


@dataclass(frozen=True)
class UsualUpdateNorm(UpdateBound):
    """Shortens updates that are many times as long as is usual; see `UpdateBound`.

    What is usual is the median norm of the updates of the last round in which clients changed anything, which no
    minority of them can move far. Until there is one, a client changes what it is sent by at most its norm, or the norm
    of as many ones if that is larger.

    Args:
        times: The bound, in units of the median norm, positive.

    Example:
        >>> bound = UsualUpdateNorm(times=10.0)
        >>> bound.limit(lambda: 3.0, usual=0.2), bound.limit(lambda: 3.0, usual=math.nan)
        (2.0, 3.0)
    """

    times: float = 10.0

    def __post_init__(self) -> None:
        check_fields(self, times=Number(above=0))

    def limit(self, sent: Callable[[], float], usual: float) -> float:
        return sent() if math.isnan(usual) else self.times * usual
