"""Robust means: updates are combined by a rule that a few clients who lie cannot move far."""

# Annotations are evaluated eagerly here, as in `algorithms/base.py`.

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from lightning_spectral.algorithms.filter import Arrival, Filter, Fit, Opened, Plan, ServerEnd
from lightning_spectral.errors import SpectralWarning, check_is
from lightning_spectral.filters.own import both_ways
from lightning_spectral.filters.robust_rules import Changes, RobustRule
from lightning_spectral.participation import UniformParticipation
from lightning_spectral.protocol.records import ClientOutcome, Key
from lightning_spectral.sums.exact_mean import Peers

Told = tuple[dict[str, Tensor], dict[str, Tensor]]  # what a client has changed, and where


@dataclass(frozen=True)
class Robust(Filter):
    """Combines a round's updates by a robust rule in place of their mean.

    The server holds all of them back until the last has arrived, on the CPU: as much memory as the sub-models of a
    round. Then each client's change is replaced by the rule's center at the entries that it holds, or only those that
    the rule chooses go on; the algorithm averages what it gets, as ever. So entries are compared among the clients that
    hold them: singular terms with the same terms, channels with the same channels. Changes of factors are compared, not
    of their products.

    Args:
        rule: `Krum`, `MultiKrum`, `Median`, `TrimmedMean` or `GeometricMedian` of ``lightning_spectral.server``.

    Note:
        A rule helps against a minority of any round. Honest clients with unequal data look like liars to it, so it
        costs accuracy where nobody lies, and more so the fewer clients it keeps. An entry is protected only if it is
        held by many: one liar of two holders of a term moves that term.

    Example:
        >>> from lightning_spectral.server import Median
        >>> Robust(Median())
        Robust(rule=Median())
    """

    reads_single: ClassVar[bool] = True
    needs: ClassVar[Sequence[str]] = ("new_values",)

    rule: RobustRule

    def __post_init__(self) -> None:
        check_is("rule", self.rule, RobustRule)

    def check(self, plan: Plan) -> None:
        who = plan.participation
        if isinstance(who, UniformParticipation) and who.clients_per_round < self.rule.least:
            raise ValueError(
                f"{self.rule} needs at least {self.rule.least} clients a round, got clients_per_round="
                f"{who.clients_per_round}; raise it, or expect fewer liars."
            )

    def server(self, fit: Fit) -> "RobustEnd":
        fit.refuse_limits("Robust does not protect")
        return RobustEnd(self.rule)


@dataclass(eq=False)
class RobustEnd(ServerEnd):
    """Holds updates back, and passes on what a rule makes of them."""

    rule: RobustRule

    def begin(self, opened: Opened) -> None:
        self._opened, self._held = opened, dict[Key, Arrival]()
        self._num_used = 0

    def arrive(self, arrival: Arrival) -> Arrival:
        upload = arrival.upload
        kept = {name: tensor.detach().to("cpu", copy=True) for name, tensor in upload.tensors.items()}
        held = replace(arrival, upload=replace(upload, tensors=kept), is_held=True)
        self._held[arrival.receipt.unit.key] = held
        return held

    @torch.no_grad()
    def gather(self, processes: Peers) -> Iterable[Arrival]:
        told = {key: self._told(arrival) for key, arrival in self._held.items()}
        everybody: dict[Key, Told] = {key: own for part in processes.gather(told) for key, own in part.items()}
        if len(everybody) < self.rule.least:
            if everybody:
                warnings.warn(
                    f"Round {self._opened.cohort.round_idx}: {self.rule} needs at least {self.rule.least} updates, and "
                    f"{len(everybody)} arrived; the server's weights are unchanged.",
                    SpectralWarning,
                    stacklevel=2,
                )
            return
        keys = sorted(everybody)
        changes = Changes(*zip(*(everybody[key] for key in keys), strict=True))
        for key, center in zip(keys, self.rule.passed_on(changes), strict=True):
            self._num_used += center is not None
            if center is not None and key in self._held:
                yield self._moved(self._held[key], center)

    def close(self, outcomes: Sequence[ClientOutcome]) -> Mapping[str, float]:
        return {"updates_used": float(self._num_used)}

    def _told(self, arrival: Arrival) -> Told:
        """What a client has changed of the tensors that were sent both ways, and where parts of them belong."""
        sent, returned = arrival.sent.tensors, arrival.upload.tensors
        changes = {name: returned[name].double() - before.cpu().double() for name, before in both_ways(sent, returned)}
        places = self._opened.round.positions(arrival.receipt)
        return changes, {name: where.cpu() for name, where in places.items() if name in changes}

    def _moved(self, arrival: Arrival, center: Mapping[str, Tensor]) -> Arrival:
        """An update that has moved by the center instead, as far as there is one."""
        sent, returned = arrival.sent.tensors, arrival.upload.tensors
        moved = {
            name: (sent[name].double() + change.to(sent[name].device)).to(returned[name].dtype)
            for name, change in center.items()
        }
        like = next(iter(sent.values()), torch.empty(0)).device
        tensors = {name: moved[name] if name in moved else tensor.to(like) for name, tensor in returned.items()}
        return replace(arrival, upload=replace(arrival.upload, tensors=tensors), is_held=False)
