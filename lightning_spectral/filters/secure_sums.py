"""Secure sums: the server gets the sum of a round's updates, but no single update."""

# Annotations are evaluated eagerly here, as in `algorithms/base.py`.

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch

from lightning_spectral.algorithms.base import ServerHalf
from lightning_spectral.algorithms.filter import Arrival, Ask, Filter, Fit, Form, Opened, Plan, ServerEnd, Unusable
from lightning_spectral.arguments import Number, check_fields
from lightning_spectral.client.device import DeviceEnd, DeviceTurn
from lightning_spectral.client.masking import context_of, flat, unflat
from lightning_spectral.errors import RoundError, from_extra
from lightning_spectral.participation import UniformParticipation
from lightning_spectral.protocol.records import (
    EXPLANATIONS,
    Download,
    ExclusionReason,
    Handshake,
    Key,
    Masking,
    Tensors,
    Upload,
    WorkUnit,
)
from lightning_spectral.sums import MeanChange

MASKED = "masked"  # a figure of arrivals: 1 if the update was masked
Said = Mapping[int, bytes]
Step = Literal["keys", "shares", "reveal"]


@dataclass(frozen=True)
class SecureSums(Filter):
    """Gives the server the sum of a round's updates, bit for bit the same sum, but no single update.

    Before they train, clients agree on masks that cancel in the sum, and give each other sealed shares of what removes
    the masks of those that drop out (Bonawitz et al. 2017). A client computes what the server would add, in whole steps
    of the grid on which sums are exact, and uploads it masked, as uniform numbers of 64 bits.

    - *It protects* against a server that follows the protocol but looks at all it gets, even together with fewer
      clients than the threshold. It learns the sum over the clients that reported, and what is not masked: who takes
      part, their numbers of examples, which are their weights, of steps, seconds and bytes, and why one is left out.
    - *It does not protect* against a server that breaks the protocol. Clients' keys pass through it and are not signed,
      so it could impersonate all others; it also sets each client's weight, and could ask for no masks at all. Devices
      refuse to reveal twice, or for fewer clients than the threshold.
    - Losses and what clients log stay on devices, and updates are not bounded. A client that moves a tensor by more
      than 4096 times its size is left out as not finite.

    With several processes, the clients of each, two at least, are a group with masks and a threshold of its own.

    Args:
        threshold: Share of the round's clients that must report, in (0.5, 1]; with fewer the round fails. As many would
            have to collude to see the update of one that took part.

    Note:
        Needs cryptography, the extra ``secure``. Masks are drawn by the system's generator; no bit of the result
        depends on them.

    Reference:
        Bonawitz et al. (2017), "Practical secure aggregation for privacy-preserving machine learning".

    Example:
        >>> SecureSums().least(10), SecureSums(threshold=0.9).least(5), SecureSums().least(2)
        (6, 5, 2)
    """

    gives: ClassVar[Form | None] = Form.MASKED
    needs: ClassVar[Sequence[str]] = ("new_values", "one_sum")
    hides_clients: ClassVar[bool] = True

    threshold: float = 0.6

    def __post_init__(self) -> None:
        threshold = Number(above=0.5, at_most=1, hint="above half, or two groups could reveal different secrets of one")
        check_fields(self, threshold=threshold)
        with from_extra("secure"):
            import cryptography  # noqa: F401

    def check(self, plan: Plan) -> None:
        who = plan.participation
        if isinstance(who, UniformParticipation) and who.clients_per_round < 2:
            raise ValueError("SecureSums needs at least two clients a round: the sum of one is its update.")

    def device(self, half: ServerHalf) -> "MaskEnd":
        return MaskEnd()

    def server(self, fit: Fit) -> "SecureEnd":
        fit.refuse_limits("SecureSums cannot hide")
        return SecureEnd(self)

    def least(self, num_clients: int) -> int:
        """Number of clients without which a round fails, of those that were asked."""
        # never one, whose sum is its update
        return max(2, math.ceil(round(self.threshold * num_clients, 9)))


@dataclass(frozen=True)
class MaskEnd(DeviceEnd):
    """Masks what the server would add."""

    hides_values: ClassVar[bool] = True

    def leave(self, turn: DeviceTurn, upload: Upload) -> tuple[Upload, Tensors]:
        return upload if turn.download.masking is None else turn.parties.masked(turn.download, upload), {}

    def sized(self, turn: DeviceTurn, upload: Upload) -> Upload:
        steps = {name: torch.zeros_like(tensor, dtype=torch.int64) for name, tensor in upload.tensors.items()}
        return replace(upload, tensors=steps)


class SecureEnd(ServerEnd):
    """Lets the clients of a round agree on masks, adds what they send as it is, and removes the masks from the sum."""

    def __init__(self, choice: SecureSums) -> None:
        self.choice = choice
        self._sum: MaskedSum | None = None  # of the round, once its clients agree

    def remarks(self) -> Sequence[str]:
        return [
            "SecureSums: updates are masked, and clients keep their losses and what they log: there is no `fl/loss`, "
            "and no update is bounded."
        ]

    def begin(self, opened: Opened) -> None:
        self._opened, self._sum = opened, None

    def agree(self, units: Sequence[WorkUnit], ask: Ask) -> None:
        mean, *others = self._opened.round.sums
        if others or not isinstance(mean, MeanChange):
            name = type(self._opened.round).__name__
            raise TypeError(f"{name} has other sums than one `MeanChange`; its algorithm must not promise `one_sum`.")
        cohort = self._opened.cohort
        self._sum = MaskedSum(self.choice, ask, cohort.round_idx, units, cohort.total, mean)
        self._sum.agree()

    def send(self, download: Download) -> Download:
        if self._sum is None:
            return download
        if (why := self._sum.fallen.get(download.unit.key)) is not None:
            raise why
        return self._sum.masked(download)

    def arrive(self, arrival: Arrival) -> Arrival:
        if self._sum is None:
            return arrival
        self._sum.add(arrival.upload)
        return replace(arrival, is_held=True, figures={**arrival.figures, MASKED: 1.0})

    def collected(self, left_out: Sequence[ExclusionReason]) -> None:
        if self._sum is not None:
            self._sum.remove_masks(left_out)


class MaskedSum:
    """The masked sum of one round.

    Args:
        choice: The user's choice.
        ask: Asks the clients' devices.
        round_idx: Communication round, from 0.
        units: The units of the round, of one model.
        total: Sum of the coefficients of the round's units.
        mean: The sum of the round.

    Attributes:
        fallen: Why clients that were asked do not take part.
    """

    def __init__(
        self,
        choice: SecureSums,
        ask: Ask,
        round_idx: int,
        units: Sequence[WorkUnit],
        total: float,
        mean: MeanChange,
    ) -> None:
        self.ask, self.round_idx, self.total, self.mean = ask, round_idx, total, mean
        self.units = {unit.client_id: unit for unit in units}
        self.threshold = choice.least(len(units))
        self.fallen: dict[Key, Unusable] = {}
        self._keys: dict[int, bytes] = {}  # of clients whose shares the others get
        self._sealed: dict[int, Said] = {}  # by sender and receiver
        self._arrived: set[int] = set()

    def agree(self) -> None:
        """Let the clients agree on masks, before any of them trains.

        Raises:
            RoundError: If fewer than the threshold do.
        """
        own = {client: {client} for client in self.units}
        said = self._ask("keys", {client: {} for client in self.units}, own)
        keys = {client: found[client] for client, found in said.items()}
        others = {client: keys.keys() - {client} for client in keys}
        self._sealed = self._ask("shares", dict.fromkeys(keys, keys), others)
        self._keys = {client: keys[client] for client in self._sealed}

    def masked(self, download: Download) -> Download:
        """The download of a client that takes part, with what others have sealed for it."""
        receiver = download.unit.client_id
        sealed = {sender: boxes[receiver] for sender, boxes in self._sealed.items() if sender != receiver}
        return replace(download, masking=Masking(self.total, sealed))

    def add(self, upload: Upload) -> None:
        """Add a client's masked update."""
        self.mean.weights.add(self.units[upload.unit.client_id].coefficient)
        for name, steps in self.mean.steps.items():
            steps.add_(upload.tensors[name].to(steps.device))
        self._arrived.add(upload.unit.client_id)

    def remove_masks(self, left_out: Iterable[ExclusionReason]) -> None:
        """Let the clients whose updates arrived reveal what removes all masks, and remove them.

        Args:
            left_out: Why clients were left out.

        Raises:
            RoundError: If fewer than the threshold are left, or what they reveal is wrong.
        """
        self._check(len(self._arrived), "reported", left_out)
        arrived = dict.fromkeys(sorted(self._arrived), b"")
        members = dict.fromkeys(arrived, self._keys.keys())
        revealed = self._ask("reveal", dict.fromkeys(arrived, arrived), members)
        from lightning_spectral.sums.masks import remove_masks

        values, unit = flat(self.mean), next(iter(self.units.values()))
        try:
            remove_masks(values, context_of(unit, self.round_idx), self.threshold, self._keys, self._arrived, revealed)
        except ValueError as error:
            raise RoundError(
                f"Round {self.round_idx}: the masks of its sum cannot be removed, so the server's weights are "
                f"unchanged: {error} A device may be faulty, or lie; leave it out, and resume."
            ) from error
        sums = self.mean.steps
        for name, steps in unflat(self.mean, values).items():
            sums[name].copy_(steps)

    def _ask(self, step: Step, said: Mapping[int, Said], expected: Mapping[int, Collection[int]]) -> dict[int, Said]:
        """Ask clients something; return what those say that answer as expected, and note why others do not."""
        from lightning_spectral.sums.masks import SIZES

        found: dict[int, Said] = {}
        asked = [Handshake(self.units[i], self.round_idx, step, self.threshold, said[i]) for i in said]
        for answer in self.ask(asked):
            client = answer.unit.client_id
            if isinstance(answer, Upload):
                message = "" if answer.failure is None else answer.failure.message
                self.fallen[answer.unit.key] = Unusable(answer.left_out or "dropped_out", message)
            elif answer.said.keys() == set(expected[client]) and {*map(len, answer.said.values())} <= {SIZES[step]}:
                found[client] = answer.said
            elif not answer.said:  # it was restarted since
                self.fallen[answer.unit.key] = Unusable("dropped_out")
            else:
                message = f"The device's {step} for secure sums are not what was asked for."
                self.fallen[answer.unit.key] = Unusable("error", message)
        did = {"keys": "sent keys", "shares": "sent shares", "reveal": "revealed shares"}[step]
        self._check(len(found), did, [why.reason for why in self.fallen.values()])
        return found

    def _check(self, count: int, did: str, left_out: Iterable[ExclusionReason]) -> None:
        if count >= self.threshold:
            return
        why = ", ".join(f"{number} {EXPLANATIONS[reason]}" for reason, number in Counter(left_out).items())
        said = next((f" {fallen}" for fallen in self.fallen.values() if str(fallen)), "")
        raise RoundError(
            f"Round {self.round_idx}: {count} of {len(self.units)} clients have {did}, and secure sums need "
            f"{self.threshold}{f' ({why})' if why else ''}; the server's weights are unchanged.{said} Ask more "
            "clients, or lower SecureSums(threshold=...)."
        )
