"""Secure sums: the server gets the sum of a round's updates, but no single update."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from statistics import median
from typing import Any, ClassVar

import torch

from lightning_spectral.algorithms.base import ServerHalf
from lightning_spectral.algorithms.filter import Arrival, Ask, Filter, Fit, Form, Opened, Plan, ServerEnd, Unusable
from lightning_spectral.arguments import Number, check_fields
from lightning_spectral.client.device import DeviceEnd, DeviceTurn
from lightning_spectral.client.masking import context_of, flat, unflat
from lightning_spectral.errors import RoundError, from_extra, warn
from lightning_spectral.filters.bounds import UsualUpdateNorm
from lightning_spectral.protocol.exchange import norm_of
from lightning_spectral.protocol.records import (
    EXPLANATIONS,
    ClientOutcome,
    Download,
    ExclusionReason,
    Handshake,
    Key,
    Masking,
    Step,
    Tensors,
    Upload,
    WorkUnit,
)
from lightning_spectral.sums import MeanChange

MASKED = "masked"  # a figure of arrivals: 1 if the update was masked
REMEMBERED = 5  # rounds whose mean changes have the usual norm
Said = Mapping[int, bytes]
DID: Mapping[Step, str] = {
    "keys": "sent keys",
    "shares": "sent shares",
    "open": "opened shares",
    "publish": "shown the shares that others lack",
    "reveal": "revealed shares",
}


@dataclass(frozen=True)
class SecureSums(Filter):
    """Gives the server the sum of a round's updates, bit for bit the same sum, but no single update.

    Before they train, clients agree on masks that cancel in the sum, and give each other sealed shares of what removes
    the masks of those that drop out (Bonawitz et al. 2017). A client computes what the server would add, in whole steps
    of the grid on which sums are exact, and uploads it masked, as uniform numbers of 64 bits.

    It protects against a server that follows the protocol but looks at all it gets, even together with fewer clients
    than the threshold; `docs/privacy.md` says what it learns all the same. Losses and what clients log stay on devices,
    and updates are not bounded: a round whose mean change is more than ten times as long as is usual changes nothing.
    With several processes, the clients of each, two at least, are a group with masks and a threshold of its own.

    Args:
        threshold: Share of the round's clients that must report, in (0.5, 1]; with fewer the round fails. As many would
            have to collude to see the update of one that took part.

    Note:
        Needs cryptography, the extra ``secure``. Masks are the system's random numbers; results do not depend on them.

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
        if plan.cohort_size < 2:
            raise ValueError("SecureSums needs at least two clients a round: the sum of one is its update.")

    def device(self, half: ServerHalf) -> "MaskEnd":
        return MaskEnd()

    def server(self, fit: Fit) -> "SecureEnd":
        fit.refuse_limits("SecureSums cannot hide")
        return SecureEnd(self)

    def least(self, num_clients: int) -> int:
        """Number of clients without which a round fails, of those asked; never one, whose sum is its update."""
        return max(2, math.ceil(round(self.threshold * num_clients, 9)))


@dataclass(frozen=True)
class MaskEnd(DeviceEnd):
    """Masks what the server would add."""

    hides_values: ClassVar[bool] = True

    def leave(self, turn: DeviceTurn, upload: Upload) -> tuple[Upload, Tensors]:
        return upload if turn.download.masking is None else turn.parties.masked(turn.download, upload), {}

    def sized(self, turn: DeviceTurn, upload: Upload) -> Upload:
        return replace(upload, tensors={n: torch.zeros_like(t, dtype=torch.int64) for n, t in upload.tensors.items()})


class SecureEnd(ServerEnd):
    """Lets the clients of a round agree on masks, adds what they send as it is, and removes the masks from the sum."""

    def __init__(self, choice: SecureSums) -> None:
        self.choice = choice
        self._sum: MaskedSum | None = None  # of the round, once its clients agree
        self._norms = list[float]()  # of the mean changes of the last rounds

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
        by_client, threshold = {unit.client_id: unit for unit in units}, self.choice.least(len(units))
        self._sum = MaskedSum(ask, cohort.round_idx, by_client, threshold, cohort.total, mean)
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
        if self._sum is None:
            return
        self._sum.remove_masks(left_out)
        mean, round_idx = self._sum.mean, self._opened.cohort.round_idx
        norm = norm_of(change for _, change in mean.finish())
        sent, usual = mean.before.values(), median(self._norms) if self._norms else math.nan
        limit = UsualUpdateNorm().limit(lambda: max(norm_of(sent), math.sqrt(sum(map(torch.numel, sent)))), usual)
        if norm > limit:
            who = ", ".join(map(str, sorted(self._sum.arrived)))
            warn(
                f"Round {round_idx}: the mean change of clients {who} has norm {norm:.3g}, and at most {limit:.3g} is "
                "added, so the server's weights are unchanged. If that happens again, look in their devices' logs."
            )
            for steps in mean.steps.values():
                steps.zero_()

    def close(self, outcomes: Sequence[ClientOutcome]) -> Mapping[str, float]:
        sums = (each for each in self._opened.round.sums if isinstance(each, MeanChange))  # of all processes
        norms = filter(None, (norm_of(change for _, change in mean.finish()) for mean in sums))
        self._norms = [*self._norms, *norms][-REMEMBERED:]
        return {}

    def state_dict(self) -> dict[str, Any]:
        return {"norms": self._norms}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self._norms = list(state_dict["norms"])


@dataclass(eq=False)
class MaskedSum:
    """The masked sum of one round."""

    ask: Ask
    round_idx: int
    units: Mapping[int, WorkUnit]  # of one model, by client
    threshold: int  # clients without which the round fails
    total: float  # of the coefficients of the units
    mean: MeanChange
    fallen: dict[Key, Unusable] = field(default_factory=dict)  # why clients that were asked do not take part
    arrived: set[int] = field(default_factory=set)  # the clients of the sum
    _keys: dict[int, bytes] = field(default_factory=dict)  # of clients that take part
    _dealt: dict[int, Said] = field(default_factory=dict)  # by dealer and receiver: sealed shares and their digests
    _shown: dict[int, Said] = field(default_factory=dict)  # likewise, shares that the receiver says it lacks

    def agree(self) -> None:
        """Let the clients agree on masks, before any of them trains.

        Raises:
            RoundError: If fewer than the threshold do.
        """
        from lightning_spectral.sums.masks import BOX_BYTES, are_safe, digests

        keys = dict[int, bytes]()

        def has_keys(client: int, said: Said) -> bool:
            is_right = said.keys() == {client} and are_safe(said[client]) and said[client] not in keys.values()
            keys.update(said if is_right else {})
            return is_right

        self._ask("keys", {client: {} for client in self.units}, has_keys)
        self._dealt = self._ask("shares", dict.fromkeys(keys, keys), lambda _, said: said.keys() == keys.keys())
        sealed = {to: {by: said[to] for by, said in self._dealt.items()} for to in self._dealt}
        opened = self._ask("open", sealed, lambda _, said: said.keys() <= self._dealt.keys())
        lacking = {by: {to: b"" for to, said in opened.items() if by not in said} for by in opened}

        def has_shown(client: int, said: Said) -> bool:
            told = {to: digests(shares) for to, shares in said.items()}
            return told == {to: self._dealt[client][to][BOX_BYTES:] for to in lacking[client]}

        self._shown = self._ask("publish", {by: to for by, to in lacking.items() if to}, has_shown)
        self._keys = {i: keys[i] for i in opened if self.units[i].key not in self.fallen}

    def masked(self, download: Download) -> Download:
        """The download of a client that takes part."""
        return replace(download, masking=Masking(self.total, tuple(self._keys)))

    def add(self, upload: Upload) -> None:
        self.mean.weights.add(self.units[upload.unit.client_id].coefficient)
        for name, steps in self.mean.steps.items():
            steps.add_(upload.tensors[name].to(steps.device))
        self.arrived.add(upload.unit.client_id)

    def remove_masks(self, left_out: Iterable[ExclusionReason]) -> None:
        """Let the clients whose updates arrived reveal what removes all masks, and remove them, or raise as `agree`."""
        self._check(len(self.arrived), "reported", left_out)
        from lightning_spectral.sums.masks import BOX_BYTES, half, remove_masks

        arrived = dict.fromkeys(sorted(self.arrived), b"")

        def has_revealed(client: int, said: Said) -> bool:
            told = {by: half(self._dealt[by][client][BOX_BYTES:], by in arrived) for by in self._keys}
            lacking = {by for by, shown in self._shown.items() if client in shown}
            digests = {by: sha256(share).digest() for by, share in said.items()}
            return digests.items() <= told.items() and told.keys() - digests.keys() <= lacking

        answers = self._ask("reveal", dict.fromkeys(arrived, arrived), has_revealed)
        revealed = {to: dict(said) for to, said in answers.items()}
        for by, shown in self._shown.items():
            for to, shares in shown.items():
                revealed.setdefault(to, {})[by] = half(shares, by in arrived)
        values, unit = flat(self.mean), next(iter(self.units.values()))
        try:
            remove_masks(values, context_of(unit, self.round_idx), self.threshold, self._keys, self.arrived, revealed)
        except ValueError as error:
            raise RoundError(
                f"Round {self.round_idx}: the masks of its sum cannot be removed, so the server's weights are "
                f"unchanged: {error} Leave this client out, and resume."
            ) from error
        sums = self.mean.steps
        for name, steps in unflat(self.mean, values).items():
            sums[name].copy_(steps)

    def _ask(self, step: Step, asked: Mapping[int, Said], is_right: Callable[[int, Said], bool]) -> dict[int, Said]:
        """Ask clients something; return what those say that answer as they must, and note why others do not."""
        from lightning_spectral.sums.masks import SIZES

        found, failed = dict[int, Said](), dict[int, Unusable]()
        for answer in self.ask(
            [Handshake(self.units[i], self.round_idx, step, self.threshold, said) for i, said in asked.items()]
        ):
            client = answer.unit.client_id
            if isinstance(answer, Upload):
                message = "" if answer.failure is None else answer.failure.message
                failed[client] = Unusable(answer.left_out or "dropped_out", message)
            elif not answer.said:  # it was restarted since
                failed[client] = Unusable("dropped_out")
            elif {*map(len, answer.said.values())} <= {SIZES[step]} and is_right(client, answer.said):
                found[client] = answer.said
            else:
                failed[client] = Unusable("error", f"it has not {DID[step]} as the protocol of secure sums asks")
        self.fallen |= {self.units[client].key: why for client, why in failed.items()}
        count = len(found) if step == "reveal" else len(self.units) - len(self.fallen)
        self._check(count, DID[step], [why.reason for why in self.fallen.values()])
        for client, why in failed.items():
            if step == "reveal" and why.reason == "error":  # others are warned of, or raised, as they are left out
                warn(f"Round {self.round_idx}: the update of client {client} is in the sum, although {why}.")
        return found

    def _check(self, count: int, did: str, left_out: Iterable[ExclusionReason]) -> None:
        if count >= self.threshold:
            return
        why = ", ".join(f"{number} {EXPLANATIONS[reason]}" for reason, number in Counter(left_out).items())
        texts = {client: str(fallen).rstrip(".") for (client, _), fallen in self.fallen.items()}
        said = "".join(f" Client {client}: {text}." for client, text in texts.items() if text)
        raise RoundError(
            f"Round {self.round_idx}: {count} of {len(self.units)} clients have {did}, and secure sums need "
            f"{self.threshold}{f' ({why})' if why else ''}; the server's weights are unchanged.{said} Ask more "
            "clients, or lower SecureSums(threshold=...)."
        )
