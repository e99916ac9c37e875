"""Robust means: updates are combined by a rule that a few clients who lie cannot move far; and lies to try it on."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor

from lightning_spectral.algorithms.filter import Arrival, Filter, Fit, Opened, Plan, ServerEnd
from lightning_spectral.arguments import Number, OneOf, Whole, check_fields, each
from lightning_spectral.errors import check_is, warn
from lightning_spectral.filters.robust_rules import Changes, RobustRule
from lightning_spectral.protocol.exchange import both_ways
from lightning_spectral.protocol.per_client import assign
from lightning_spectral.protocol.records import ClientOutcome, Key
from lightning_spectral.protocol.rng import derived_generator
from lightning_spectral.sums.exact_mean import Peers

Lie = Literal["scale", "noise", "alie", "ipm"]
Told = tuple[dict[str, Tensor], dict[str, Tensor]]  # what a client has changed, and where


@dataclass(frozen=True)
class Robust(Filter):
    """Combines a round's updates by a robust rule in place of their mean.

    The server holds all of them back until the last has arrived, on the CPU: as much memory as the sub-models of a
    round. Then each client's change is replaced by the rule's center at the entries that it holds, or only those that
    the rule chooses go on; the algorithm averages what it gets, as ever. So entries are compared among the clients that
    hold them: singular terms with the same terms, channels with the same channels. Factors are compared, not products.

    Args:
        rule: `Krum`, `MultiKrum`, `Median`, `TrimmedMean` or `GeometricMedian` of ``lightning_spectral.server``. It
            helps against a minority of any round, and costs accuracy where nobody lies: unequal data look like lies.

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
        if plan.cohort_size < self.rule.least:
            raise ValueError(
                f"{self.rule} needs at least {self.rule.least} clients a round, got clients_per_round="
                f"{plan.cohort_size}; raise it, or lower the numbers of the rule."
            )

    def server(self, fit: Fit) -> "RobustEnd":
        fit.refuse_limits("Robust does not protect")
        return RobustEnd(self.rule)


@dataclass(eq=False)
class RobustEnd(ServerEnd):
    """Holds updates back, and passes on what a rule makes of them."""

    rule: RobustRule

    def begin(self, opened: Opened) -> None:
        self._opened, self._held, self._num_used = opened, dict[Key, Arrival](), 0

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
                warn(
                    f"Round {self._opened.cohort.round_idx}: {self.rule} needs at least {self.rule.least} updates, and "
                    f"{len(everybody)} arrived; the server's weights are unchanged."
                )
            return
        keys = sorted(everybody)
        changes = Changes(*zip(*(everybody[key] for key in keys), strict=True))
        for key, center in zip(keys, self.passed_on(keys, changes), strict=True):
            self._num_used += center is not None
            if center is not None and key in self._held:
                yield self._moved(self._held[key], center)

    def passed_on(self, keys: Sequence[Key], changes: Changes) -> Sequence[Mapping[str, Tensor] | None]:
        """What stands for the change of each unit, in their order; ``None`` for one that is left out."""
        return self.rule.passed_on(changes)

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
        moved = {n: (sent[n].double() + own.to(sent[n].device)).to(returned[n].dtype) for n, own in center.items()}
        like = next(iter(sent.values()), torch.empty(0)).device
        tensors = {name: moved[name] if name in moved else tensor.to(like) for name, tensor in returned.items()}
        return replace(arrival, upload=replace(arrival.upload, tensors=tensors), is_held=False)


@dataclass(frozen=True)
class Attack(Filter):
    r"""Simulates clients that lie about their change :math:`\Delta`, to see what a rule saves; the last of all filters.

    Liars know the mean :math:`\mu` and the standard deviation :math:`\sigma` of what honest clients change in a round.

    Args:
        lie: ``"scale"``: they send :math:`c\Delta`, -1 flips signs. ``"noise"``: :math:`\Delta + \mathcal{N}(0, c^2)`.
            ``"alie"`` (Baruch et al., 2019): :math:`\mu - c\sigma`. ``"ipm"`` (Xie et al., 2020): :math:`-c\mu`.
        strength: The number c; of noise, in units of the weights.
        clients: Who lies: a share of all clients, which are drawn, or their numbers.

    Example:
        >>> Attack("scale", -1.0, clients=0.3)  # filters=[ls.Robust(ls.Krum(3)), ls.Attack(...)]
        Attack(lie='scale', strength=-1.0, clients=0.3)
    """

    reads_single: ClassVar[bool] = True
    needs: ClassVar[Sequence[str]] = ("new_values",)
    least: ClassVar[int] = 0  # clients below which it cannot be applied

    lie: Lie
    strength: float
    clients: float | Sequence[int]

    def __post_init__(self) -> None:
        share, listed = Number(above=0, at_most=1), partial(each, rule=Whole(at_least=0))
        who = listed if isinstance(self.clients, Sequence) else share
        check_fields(self, lie=OneOf(get_args(Lie)), strength=Number(), clients=who)

    def check(self, plan: Plan) -> None:
        if plan.filters[-1] != self:
            raise ValueError(f"Attack must be the last filter; put {type(plan.filters[-1]).__name__} before it.")

    def server(self, fit: Fit) -> "AttackEnd":
        number = len(fit.sizes())
        if isinstance(self.clients, Sequence) and max(self.clients) >= number:
            raise ValueError(f"`clients` must be below their number {number}, got {max(self.clients)}.")
        return AttackEnd(self, number)


@dataclass(eq=False)
class AttackEnd(RobustEnd):
    """Holds updates back, and passes on those of liars as lies."""

    rule: Any
    num_clients: int

    def passed_on(self, keys: Sequence[Key], changes: Changes) -> Sequence[Mapping[str, Tensor] | None]:
        cohort, c, who = self._opened.cohort, self.rule.strength, self.rule.clients
        if not isinstance(who, Sequence):
            liars = assign({True: who, False: 1.0 - who}, self.num_clients, cohort.seed, "liars")
            who = liars.indices.logical_not().nonzero()
        lie = torch.tensor([client in who for client, _ in keys])
        told: list[dict[str, Tensor]] = [{} for _ in keys]
        for name in changes.names:
            values, held = changes.stacked(name)
            honest = values.masked_fill(~held | lie[:, None], torch.nan)
            mean = honest.nanmean(0).nan_to_num()
            if self.rule.lie == "scale":
                moved = c * values
            elif self.rule.lie == "noise":
                draw = derived_generator(cohort.seed, "lies", cohort.round_idx, keys[0][1], name)
                moved = values + c * torch.randn(values.shape, dtype=values.dtype, generator=draw)
            else:
                deviation = (honest - mean).square().nanmean(0).sqrt().nan_to_num()
                moved = (mean - c * deviation if self.rule.lie == "alie" else -c * mean).expand_as(values)
            for index in (lie & held.any(1)).nonzero()[:, 0].tolist():
                told[index][name] = changes.at(index, name, moved[index])
        return told
