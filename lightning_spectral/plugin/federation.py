"""Several models, or one, trained in rounds on one population of clients, by a Trainer or a plain loop."""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import lightning.pytorch as pl
from torch.optim import Optimizer

from lightning_spectral.algorithms.base import promises_of
from lightning_spectral.client.forms import postponing_interrupts
from lightning_spectral.filters.own import FROZEN
from lightning_spectral.participation import Sampler, UniformParticipation
from lightning_spectral.participation.cohorts import SampledCohorts
from lightning_spectral.plugin.checks import check_sampler
from lightning_spectral.plugin.member import ADVICE, Member
from lightning_spectral.plugin.runtime import Runtime, Shared
from lightning_spectral.plugin.user_hooks import Host, Share
from lightning_spectral.protocol.records import RoundSummary, WorkUnit
from lightning_spectral.protocol.rng import derived_generator
from lightning_spectral.server.lasting import Lasting
from lightning_spectral.server.processes import predicted_work, shares
from lightning_spectral.sums.exact_mean import MOST_TERMS

OF_A_FIT = ("schedules", "server optimizer", ADVICE, FROZEN)  # parts that go on only from a checkpoint
ALONE = "YourModule.load_from_checkpoint(path), or of several load_user_module(path, YourModule, name)"


class Federation(Shared):
    """The rounds of one model or several.

    Args:
        members: The models by name; the name may be empty if there is only one.
        plan, runtime: As of `Shared`.

    Attributes:
        cohorts: Who takes part in which round.
        last_stepped: The last round in which the servers have stepped; -1 before the first.
    """

    def __init__(self, plan: Host, members: Mapping[str, Member], runtime: Runtime) -> None:
        self.plan, self.runtime, self.members = plan, runtime, dict(members)
        self.cohorts = Cohorts(plan, self.members, runtime)
        self.last_stepped = -1
        self.take_members()

    def take_members(self) -> None:
        """Make the models part of this federation; they may have been fitted alone or in another one since."""
        for name, member in self.members.items():
            member.name, member.key, member.shared = name, name if len(self.members) > 1 else "", self

    def begin_fit(self, resumed: bool) -> None:
        if resumed:
            self.cohorts.count_again()
        for member in self.members.values():
            member.begin_fit(resumed)

    def start_round(self, round_idx: int) -> None:
        """Open the round of every model that some client trains, and call the round callbacks."""
        units = self.cohorts.units(round_idx)
        for member in self.members.values():
            own = [unit for unit in units if unit.model == member.key]
            if own or promises_of(member.algorithm).steps_without_clients or member.engine.is_private:
                self.call("on_round_start", member, member.open_round(round_idx, own).algorithm_round)

    def play(self, share: Share) -> None:
        """Train this process's clients, one model after another."""
        for member in self.members.values():
            if units := [unit for unit in share.units if unit.model == member.key]:
                member.engine.round.agree(units)
                start, end = (partial(self.call, hook, member) for hook in ("on_client_start", "on_client_end"))
                member.engine.round.play(self.runtime.until_stopped(units), start, end)

    def call(self, hook: str, module: pl.LightningModule, *args: Any) -> None:
        """Call a hook of all round callbacks."""
        trainer = self.runtime.trainer
        for callback in self.runtime.round_callbacks():
            getattr(callback, hook)(trainer, module, *args)

    def finish_round(self) -> None:
        """Close the round, step the servers on their pseudo-gradients, step the schedules and log the round."""
        members, runtime = list(self.members.values()), self.runtime
        opened = [member for member in members if member.engine.round_is_open]
        for member in opened:  # all of them, before anything at a server changes
            member.engine.round.gather()
        with postponing_interrupts():
            closed = {member.name: member.apply_round() for member in opened}
            runtime.step([cast(Optimizer, member.stepper) for member in opened])
            for member in opened:
                member.engine.settle()
            for member in members:
                member.zero_grad()  # of every parameter, including those of no optimizer
            self.last_stepped = runtime.round_idx
            summaries = []
            for index, member in enumerate(members):
                rate = member.templates[0].param_groups[0].get("lr")  # none of an optimizer that chooses its own
                summary = closed.get(member.name, RoundSummary(runtime.round_idx, (), {}, {}, {}, model=member.name))
                own = {**summary.diagnostics, "lr": math.nan if rate is None else float(rate)}
                summaries.append(self.cohorts.note(index, replace(summary, diagnostics=own)))
                member.schedules.note(summaries[-1])
            # all of them, so that a checkpoint written after one has failed holds the whole round
            calls: list[Callable[[], None]] = [partial(m.schedules.step, runtime.round_idx) for m in members]
            calls.append(partial(runtime.log, summaries))
            for callback in runtime.round_callbacks():
                for member, summary in zip(members, summaries, strict=True):
                    calls.append(partial(callback.on_round_end, runtime.trainer, member, summary))
            _call_all(calls)

    @property
    def is_spent(self) -> bool:
        """Whether another round after the last one would exceed a budget."""
        ends = (end for member in self.members.values() for end in member.engine.filters.values())
        return any(end.is_spent(self.last_stepped + 1) for end in ends)

    def abandon_round(self) -> None:
        """End a round that failed; it has changed nothing at the server and can be repeated."""
        for member in self.members.values():
            if member.engine_or_none is not None:
                member.engine_or_none.abandon_round()

    def begin(self) -> None:
        """Begin a fit, before anything is restored: what belongs to single fits is new."""
        for member in self.members.values():
            member.lasting.drop(OF_A_FIT)

    def state_dict(self) -> dict[str, Any]:
        """What lasts between rounds, besides weights: of each model, and of all together."""
        models = {name: member.lasting.state_dict() for name, member in self.members.items()}
        return {"models": models, "together": self.cohorts.lasting.state_dict()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned.

        Raises:
            RuntimeError: If it is not of these models, or of other algorithms.
        """
        models = state_dict.get("models", {})
        try:
            saved = {name for name, kept in models.items() if "algorithm" in kept}
            own = {name for name, member in self.members.items() if member.state is not None}
            if saved != own:
                raise RuntimeError(f"It is of {sorted(saved)}, not of {sorted(own)}.")
            for name, member in self.members.items():
                member.lasting.load_state_dict(models.get(name, {}))
            self.cohorts.lasting.load_state_dict(state_dict.get("together", {}))
        except RuntimeError as error:
            raise RuntimeError(
                "The checkpoint has state of another algorithm, or lacks that of this one: pass the one of the run, "
                f"load_from_checkpoint(path, algorithm=...), or load your own module alone: {ALONE}. {error}"
            ) from error


def _call_all(calls: Iterable[Callable[[], None]]) -> None:
    """Call every function, even if an earlier one fails, and then raise the first error."""
    errors: list[BaseException] = []
    for each in calls:
        try:
            each()
        except BaseException as error:  # Ctrl-C in one callback must not keep the round from the others
            errors.append(error)
    if errors:
        raise errors[0]


class Cohorts:
    """The cohorts of a federation's fits, drawn uniformly or by a sampler, and who trains them.

    Attributes:
        limit: Largest number of clients in a cohort, or the largest share of them.
        sampled: The sampler's cohorts, in a fit that has a sampler.
        lasting: What all models keep together from round to round.
    """

    def __init__(self, plan: Host, members: Mapping[str, Member], runtime: Runtime) -> None:
        self._plan, self._members, self._runtime = plan, members, runtime
        self.limit: int | float = 1.0
        self.sampled: SampledCohorts | None = None
        self.lasting = Lasting()
        self._resumed: tuple[int, list[WorkUnit]] = -1, []

    def begin(self, limit: int | float) -> None:
        """Begin a fit: limit each cohort to a number of clients, or to a share of it, as ``limit_train_batches`` does.

        Raises:
            ValueError: If nobody would train, or more than can be summed exactly, or a sampler's clients be left out.
        """
        self.limit, self.sampled, self._resumed = limit, None, (-1, [])
        sampler = self._plan.participation
        if isinstance(sampler, Sampler):
            trainer: Any = self._runtime.trainer
            if limit and self._is_cut and not trainer.fast_dev_run:
                raise ValueError(
                    f"limit_train_batches={limit} would leave out clients that a sampler drew, and bias the average, "
                    "since its coefficients are meant for all of them; lower its `active` instead."
                )
            for member in self._members.values():
                check_sampler(sampler, member)
            keys = [member.key for member in self._members.values()]
            seed = int(self._plan.seed)
            if any(each.secret_cohorts for member in self._members.values() for each in member.filters):
                seed = self._runtime.processes.gather(secrets.randbits(256))[0]  # nobody may know who takes part
            self.sampled = SampledCohorts(sampler, self._plan.population(), keys, seed)
            self.lasting.drop(["sampler"])
            self.lasting.attach("sampler", self.sampled)
        if limit and not self._most_units:
            raise ValueError(f"limit_train_batches={limit} of {self.usual_size} clients trains none; raise it.")
        if self._most_units > (most := MOST_TERMS * len(self._members)):
            raise ValueError(
                f"A round must have at most {most} turns, so that its updates can be summed exactly, got "
                f"{self._most_units}; lower `active` or `clients_per_round`."
            )

    def count_again(self) -> None:
        """Draw from clients as a restored checkpoint numbers them: they may be elsewhere, and perhaps not all there."""
        if (before := self.sampled) is not None:
            self.sampled = SampledCohorts(before.sampler, self._plan.population(), before.keys, before.seed)
            rows = min(len(before.figures), len(self.sampled.figures))
            self.sampled.figures[:rows] = before.figures[:rows]
            self.lasting.parts["sampler"] = self.sampled

    @property
    def usual_size(self) -> int:
        """Number of units in a round; if it is random, a number that is hardly ever exceeded."""
        if self.sampled is not None:
            return self.sampled.usual_size
        if self._plan.participation is None:
            raise ValueError(
                "FederatedModule does not know who takes part in a round; give it `clients_per_round=10`, or "
                "`participation=LossVarianceReduced(active=10)`."
            )
        (name,) = self._members
        return cast(UniformParticipation, self._plan.participation).size(self._plan.data_of(name).num_clients)

    @property
    def _is_cut(self) -> bool:
        return self.limit != 1.0 or isinstance(self.limit, int)

    @property
    def _most_units(self) -> int:
        size, limit = self.usual_size, self.limit
        return min(size, limit) if isinstance(limit, int) else int(size * limit)

    def units(self, round_idx: int) -> list[WorkUnit]:
        """The units of a round, as a pure function of the seed, the round and what the sampler has seen."""
        for member in self._members.values():
            if member.engine_or_none is not None:  # with a sampler, cohorts can be drawn without a fit
                member.engine_or_none.clients.begin_round(round_idx)
        if self._resumed[0] == round_idx:
            return self._resumed[1]
        if self.sampled is None:
            with self._runtime.profile("plan"):
                (member,) = self._members.values()
                participation = cast(UniformParticipation, self._plan.participation)
                generator = derived_generator(self._plan.seed, "participation", round_idx)
                draw, num_clients = participation.cohort, member.engine.clients.num_clients
                if promises_of(member.algorithm).draws_cohorts:
                    draw = partial(cast(Any, member.state).cohort, participation)
                cohort = draw(num_clients, generator).tolist()[: self._most_units]
                sizes = member.engine.clients.sizes_of(cohort)
                return [WorkUnit(client_id, coefficient=size) for client_id, size in zip(cohort, sizes, strict=True)]
        if self.sampled.drawn is None or self.sampled.drawn[0] != round_idx:
            with self._runtime.profile("plan"):
                for index, member in enumerate(self._members.values()):
                    if due := self.sampled.due(round_idx, index):  # clients whose figures are to be measured
                        self.sampled.measured[index] = outcomes = member.engine.measure(round_idx, due)
                        self.sampled.note(index, outcomes)
                self.sampled.draw(round_idx, self._most_units if self._is_cut else None)  # only in a quick try
        return self.sampled.units

    def resume(self, round_idx: int, units: Sequence[WorkUnit]) -> None:
        """Restore the cohort of a round whose servers have stepped: measured and drawn now, it would be another one."""
        self._resumed = round_idx, list(units)

    def note(self, index: int, summary: RoundSummary) -> RoundSummary:
        """Let the sampler learn from a round of one model, and add its diagnostics to the round's summary."""
        if self.sampled is None or summary.is_private:
            return summary
        own = self.sampled.diagnostics(index, summary.clients)
        measured = tuple(self.sampled.measured.get(index, ()))
        self.sampled.note(index, summary.clients)
        return replace(summary, diagnostics={**summary.diagnostics, **own}, measured=measured)

    def share(self, round_idx: int) -> Share:
        """The clients that this process trains in a round, and those of the others."""
        units, processes, work = self.units(round_idx), self._runtime.processes, []
        members = {member.key: member for member in self._members.values()}
        for unit in units if processes.size > 1 else ():
            member = members[unit.model]
            clients = member.engine.clients
            examples = clients.epoch_of(unit.client_id) * member.engine.passes_of(unit.client_id)
            predicted = predicted_work(examples, clients.capacity_of(unit.client_id))
            work.append(predicted * (sum(p.numel() for p in member.module.parameters()) if len(members) > 1 else 1))
        return Share(round_idx, shares(units, work, processes.size), processes.rank)
