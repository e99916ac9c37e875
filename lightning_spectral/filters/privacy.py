"""Differential privacy of clients: how much each contributes, how much noise hides it, and the epsilon that results."""

import math
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar

import torch

from lightning_spectral.algorithms.filter import Arrival, Filter, Fit, Opened, Plan, ServerEnd
from lightning_spectral.arguments import Number, Whole, check_fields, first_of
from lightning_spectral.client.forms import Forms
from lightning_spectral.client.kept_state import KeptState
from lightning_spectral.errors import RoundError, check_is, warn
from lightning_spectral.filters.private_sums import PrivateSums
from lightning_spectral.functional.privacy import LEAST_NOISE, Rounds, calibrated, epsilon, warn_of_delta
from lightning_spectral.participation import Uniform
from lightning_spectral.protocol.records import ClientOutcome, Key, WorkUnit
from lightning_spectral.protocol.rng import SecretNormals
from lightning_spectral.sums import MeanChange
from lightning_spectral.sums.exact_mean import Peers

LARGEST_CLIP = 1024.0  # what exact sums have room for
MOST_FOR_VOTES = 1.25  # noise on updates with votes on the clip, relative to that without
ROUNDS = "_private_rounds"  # attribute of a module: the rounds in which it was trained privately
VOTERS = 20.0  # expected clients for each standard deviation of the noise of votes, as published


@dataclass(frozen=True, kw_only=True)
class ClientPrivacy(Filter):
    r"""Differential privacy of clients: whoever sees the model cannot tell whether any one client has taken part.

    It hides a client with all of its data: a hospital with all of its patients. With a dozen clients, the noise that
    hides one leaves little to learn; `ExamplePrivacy` hides single patients.

    In each round every client takes part with the same probability q, independently. Its change is shortened to the
    norm ``clip``, over all that the server sums, and has the same weight as any other client's. The sum gets Gaussian
    noise of standard deviation ``noise_multiplier * clip`` in every coordinate, and is divided by the expected number
    of clients. After each round, `fl/epsilon` is the epsilon of all rounds so far.

    Args:
        clip: Bound on the norm of a client's change, in units of the weights, at most 1024.
        delta: The probability that the guarantee fails, well below one over the number of clients.
        noise_multiplier: Standard deviation of the noise, in units of ``clip``, at least 0.05.
        target_epsilon: The budget. The fit ends before a round that would exceed it.
        num_rounds: Instead of ``noise_multiplier``: the rounds in which ``target_epsilon`` is spent.
        clip_quantile: The share of clients whose change is to be within the bound, which is then adapted after each
            round, from ``clip`` on; ``None`` to keep it.
        clip_rate: How fast it adapts: the factor is at most ``exp(clip_rate)`` a round.
        noise_seed: For tests, a seed that decides the noise; cohorts are then drawn from the run's ``seed``. Whoever
            knows it can subtract the noise, so there is no privacy. ``None`` for secrets of the system's generator.
        after: Path of the checkpoint of an earlier private run, in another process, from whose weights this one begins:
            its rounds count too. ``None`` if there is none, or if this run is resumed.

    Note:
        Neighbours are data sets with and without the data of one client, which then contributes nothing; the list of
        clients is not secret. `docs/privacy.md` says what is promised, against whom, and what is not.

    Reference:
        McMahan et al. (2018), "Learning differentially private recurrent language models"; Andrew et al. (2021),
        "Differentially private learning with adaptive clipping".

    Example:
        >>> ClientPrivacy(clip=1.0, noise_multiplier=1.1, delta=1e-5).target_epsilon is None
        True
    """

    needs: ClassVar[Sequence[str]] = ("noise_hides",)
    reads_single: ClassVar[bool] = True  # to shorten them
    hides_clients: ClassVar[bool] = True
    equal_weights: ClassVar[bool] = True
    outlasts_faults: ClassVar[bool] = True

    clip: float
    delta: float
    noise_multiplier: float | None = None
    target_epsilon: float | None = None
    num_rounds: int | None = None
    clip_quantile: float | None = None
    clip_rate: float = 0.2
    noise_seed: int | None = None
    after: str | None = field(default=None, repr=False, compare=False)  # a checkpoint has what it brought

    def __post_init__(self) -> None:
        check_budget(self, "num_rounds")
        check_fields(self, clip_quantile=Number(above=0, below=1, optional=True), clip_rate=Number(above=0))
        check_is("after", self.after, str | None)

    def earlier_rounds(self) -> list["Rounds"]:
        """The private rounds of the run whose checkpoint is given, of one model; none if none is."""
        if self.after is None:
            return []
        saved = torch.load(self.after, map_location="cpu", weights_only=True).get("federation_lasting", {})
        found = [model[self.name] for model in saved.get("models", {}).values() if self.name in model]
        if len(found) != 1:
            raise ValueError(
                f"`after={self.after!r}` is no checkpoint of a run with ClientPrivacy; give that of the run from whose "
                "weights this one begins, or leave it out."
            )
        return [tuple(rounds) for rounds in found[0]["rounds"]]

    @property
    def secret_cohorts(self) -> bool:
        return self.noise_seed is None

    def check(self, plan: Plan) -> None:
        """Raise ``ValueError`` if clients do not take part independently, or a callback shows single ones."""
        who = plan.participation
        if not (who is None or (type(who) is Uniform and who.design is None and not who.normalize)):
            raise ValueError(
                "ClientPrivacy needs clients that take part independently of each other and of their data: "
                f"participation=Uniform(active=10), without `design` and `normalize`; got {who}."
            )
        if shown := plan.callback_that("shows_clients"):
            raise ValueError(f"{shown} shows clients' data without noise; leave it out where there is ClientPrivacy.")

    def server(self, fit: Fit) -> "PrivateEnd":
        fit.refuse_averages("ClientPrivacy")  # a variance with noise may be negative
        if paths := KeptState(fit.half.server).not_kept():  # what one client leaves there could move the next one
            raise ValueError(
                f"ClientPrivacy needs all clients to begin with the same module, and {first_of(paths, 3)} is too large "
                "to be put back after each of them; register it as a buffer."
            )
        return PrivateEnd(self, fit)


def check_budget(choice: Any, lasting: str) -> None:
    """Check how much noise a choice asks for; ``lasting`` is its field that says how long a budget lasts."""
    check_fields(
        choice,
        clip=Number(above=0, at_most=LARGEST_CLIP),
        delta=Number(above=0, below=1),
        noise_multiplier=Number(at_least=LEAST_NOISE, optional=True),
        target_epsilon=Number(above=0, optional=True),
        noise_seed=Whole(at_least=0, optional=True),
        **{lasting: Whole(at_least=1, optional=True)},
    )
    kind, multiplier, length = type(choice).__name__, choice.noise_multiplier, getattr(choice, lasting)
    if (multiplier is None) == (length is None):
        raise ValueError(
            f"{kind} needs `noise_multiplier`, or `{lasting}` with `target_epsilon`, and not both; got "
            f"noise_multiplier={multiplier}, {lasting}={length}."
        )
    if length is not None and choice.target_epsilon is None:
        raise ValueError(f"`{lasting}={length}` says how long a budget is to last; give `target_epsilon`.")


def joined(before: Sequence[Rounds], own: Rounds) -> list[Rounds]:
    """Rounds, or steps, and some more, in stretches with the same noise and draws."""
    if before and before[-1][:2] == own[:2]:
        before, own = before[:-1], (*own[:2], before[-1][2] + own[2])
    return [*before, own] if own[2] or not before else [*before]


def epsilon_of(stretches: Sequence[Rounds], delta: float) -> float:
    """The epsilon of all of them."""
    *before, last = stretches
    return epsilon(*last, delta, tuple(before))


class PrivateFit:
    """What a choice of privacy means for the clients of one fit.

    Rounds ``before`` the fit keep the probability that they had, and new ones have their noise; ``active`` is the
    expected number of clients in a round, and ``num_clients`` the number of those that can take part.

    Attributes:
        rate, weight: Probability of each client to take part, and its weight in a sum.
        multiplier: Standard deviation of the noise on all that a round releases, in units of a client's contribution.
        sum_multiplier, vote_noise: Those on the sums, larger if votes on the bound are released too, and on these.
    """

    def __init__(
        self,
        choice: ClientPrivacy,
        active: float,
        num_clients: int,
        before: Iterable[Rounds] = (),
        first_round: int | None = None,
    ) -> None:
        self.choice, self.rate, self.weight = choice, min(1.0, active / num_clients), 1 / active
        self.before = list(before)
        self.first_round = sum(count for _, _, count in self.before) if first_round is None else first_round
        if self.before:  # a budget was planned for all rounds at the start
            self.multiplier = self.before[-1][1]
        elif choice.noise_multiplier is not None:
            self.multiplier = choice.noise_multiplier
            self.epsilon(1)  # here, if the accountant is missing
        else:
            assert choice.target_epsilon is not None, "checked with `num_rounds`"
            self.multiplier = calibrated(self.rate, choice.target_epsilon, choice.num_rounds or 1, choice.delta)
        self.vote_noise = active / VOTERS if choice.clip_quantile is not None else 0.0
        if choice.clip_quantile is not None and self.multiplier >= 2 * self.vote_noise:
            raise ValueError(
                f"`clip_quantile={choice.clip_quantile}` needs more than {VOTERS / 2:g} clients a round for each unit "
                f"of the noise multiplier of {self.multiplier:.3g}, got {active:g}; raise `active`, or leave it out."
            )
        # of a release of both, with less noise than either: see Andrew et al., Theorem 1
        votes = 0.0 if not self.vote_noise else (2 * self.vote_noise) ** -2
        self.sum_multiplier = (self.multiplier**-2 - votes) ** -0.5
        if self.sum_multiplier > MOST_FOR_VOTES * self.multiplier:
            warn(
                f"With {active:g} clients a round, votes on the clip take much of what may be released, so the noise "
                f"on updates is {self.sum_multiplier:.3g} times the clip instead of {self.multiplier:.3g}. Raise "
                "`active`, or leave `clip_quantile` out."
            )
        warn_of_delta(choice.delta, num_clients, "clients")

    def __str__(self) -> str:
        known = "" if self.choice.noise_seed is None else " The noise follows from `noise_seed`, so it hides nothing."
        return (
            f"privacy: noise of {self.sum_multiplier:.4g} times the clip, clients take part with probability "
            f"{self.rate:.4g}; epsilon is {self.epsilon(self.first_round + 1):.3g} after the next round. It hides "
            "whole clients, each with all of its examples. Left out, because it has no noise: losses, what clients "
            f"log, how many take part and fail, their bytes and seconds, and the ledger's rows.{known}"
        )

    def rounds(self, num_rounds: int) -> list[Rounds]:
        """All rounds of the model until the fit has counted to a number."""
        return joined(self.before, (self.rate, self.multiplier, num_rounds - self.first_round))

    def epsilon(self, num_rounds: int) -> float:
        """The epsilon of all rounds of the model until the fit has counted to a number."""
        return epsilon_of(self.rounds(num_rounds), self.choice.delta)


class PrivateEnd(ServerEnd):
    """Shortens what each client contributes, adds noise to the sums, and counts the epsilon of all rounds.

    The rounds in which a module was trained privately stay with it, so that any later fit goes on counting.
    """

    releases: ClassVar[bool] = True

    def __init__(self, choice: ClientPrivacy, fit: Fit) -> None:
        self._choice, self._fit = choice, fit
        self._before: list[Rounds] = list(vars(fit.half.server).get(ROUNDS, choice.earlier_rounds()))
        self.clip = choice.clip  # in the next round
        self._next_round = fit.first_round

    @cached_property
    def fit(self) -> PrivateFit:
        who = self._choice, self._fit.active, int(self._fit.sizes().count_nonzero())
        return PrivateFit(*who, self._before, self._next_round)

    def remarks(self) -> Sequence[str]:
        return [str(self.fit)]

    @cached_property
    def _possible_units(self) -> Mapping[Key, WorkUnit]:
        """The units of all clients that may take part, so that nobody's download or weight depends on others."""
        units = (WorkUnit(i, coefficient=self.fit.weight) for i in self._fit.sizes().nonzero().squeeze(1).tolist())
        return {unit.key: unit for unit in units}

    def weigh(self, units: Sequence[WorkUnit]) -> Sequence[WorkUnit]:
        return list({**self._possible_units, **{unit.key: unit for unit in units}}.values())

    def begin(self, opened: Opened) -> None:
        """Fix the sums' divisors, which are those of one client with the weight of a whole round, untrained."""
        round_idx = self._round_idx = opened.cohort.round_idx
        if self.is_spent(round_idx):
            raise RoundError(
                f"Round {round_idx} would exceed target_epsilon={self._choice.target_epsilon:g}: epsilon would be "
                f"{self.fit.epsilon(round_idx + 1):.4g}. Lower the Trainer's `max_epochs` or `min_epochs`."
            )
        unit, half = next(iter(self._possible_units.values())), self._fit.half
        download, receipt = opened.round.send(unit._replace(coefficient=min(1.0, opened.cohort.total)))
        download, side = replace(download, round_idx=round_idx), half.client_side
        with Forms(half.server, side.take_form).client(download.capacity) as client:
            side.load(client, download)
            opened.round.add(receipt, side.collect(client, download))
        sums = [mean for mean in opened.round.sums if isinstance(mean, MeanChange)]
        if len(sums) < len(opened.round.sums):
            kind = type(opened.round).__name__
            raise TypeError(f"{kind} has sums of other kinds than MeanChange, which get no noise.")
        for mean in sums:
            mean.fix()
        self._sums = PrivateSums(sums, self.fit.weight, self.clip, self.fit.sum_multiplier)

    def added(self, arrival: Arrival) -> None:
        self._sums.take()

    def gather(self, processes: Peers) -> Iterable[Arrival]:
        """Add up the sums of all processes, with noise from the first of them."""
        normals, seed = None, self._choice.noise_seed
        if processes.rank == 0:
            key = secrets.token_bytes(32) if seed is None else str(seed).encode()
            normals = SecretNormals(self._round_idx.to_bytes(8, "big") + key)
        self._sums.release(processes, normals, self.fit.vote_noise)
        return ()

    def close(self, outcomes: Sequence[ClientOutcome]) -> Mapping[str, float]:
        self._next_round = self._round_idx + 1
        figures = {"epsilon": self.fit.epsilon(self._next_round), "clip": self.clip}
        if self._choice.clip_quantile is not None:
            share = min(max(self._sums.votes * self.fit.weight + 0.5, 0.0), 1.0)
            factor = math.exp(self._choice.clip_rate * (self._choice.clip_quantile - share))
            self.clip = min(self.clip * factor, LARGEST_CLIP)
        vars(self._fit.half.server)[ROUNDS] = self.fit.rounds(self._next_round)
        return figures

    def is_spent(self, num_rounds: int) -> bool:
        target = self._choice.target_epsilon
        return target is not None and self.fit.epsilon(num_rounds + 1) > target

    def state_dict(self) -> dict[str, Any]:
        rounds = vars(self._fit.half.server).get(ROUNDS, self._before)
        return {"rounds": list(rounds), "clip": self.clip, "next_round": self._next_round} if rounds else {}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self._before, self.clip = [tuple(rounds) for rounds in state_dict["rounds"]], state_dict["clip"]
        if self._fit.first_round is None:  # a resumed run counts its own rounds, not those that were before it
            self._next_round = state_dict["next_round"]
