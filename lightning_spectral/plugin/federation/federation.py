"""Several models, or one, trained in rounds on one population of clients: the same steps whatever runs them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from lightning_spectral.client.forms import postponing_interrupts
from lightning_spectral.plugin.federation.cohorts import Cohorts
from lightning_spectral.plugin.federation.interfaces import Plan, Runtime
from lightning_spectral.plugin.federation.member import Member
from lightning_spectral.plugin.federation.unfinished_rounds import call_all
from lightning_spectral.plugin.host import Share
from lightning_spectral.protocol.records import RoundSummary, WorkUnit
from lightning_spectral.server.turn import Turn, play

ALONE = "YourModule.load_from_checkpoint(path), or of several load_user_module(path, YourModule, name)"


class Federation:
    """The rounds of one model or several.

    Args:
        plan: What was chosen for all of them: who takes part, and the seed.
        members: The models by name; an only model may have an empty one.
        runtime: Whatever runs the rounds.

    Attributes:
        cohorts: Who takes part in which round.
        last_stepped: The last round in which the servers have stepped; -1 before the first.
    """

    def __init__(self, plan: Plan, members: Mapping[str, Member], runtime: Runtime) -> None:
        self.plan, self.members, self.runtime = plan, dict(members), runtime
        self.cohorts = Cohorts(plan, self.members, runtime)
        self.last_stepped = -1
        self.take_members()

    def take_members(self) -> None:
        """Make the models part of this federation; they may have been fitted alone or in another one since."""
        for name, member in self.members.items():
            member.join(name, name if len(self.members) > 1 else "", self.plan, self.runtime)

    def begin_fit(self, resumed: bool) -> None:
        """Begin a fit of all models, new or resumed."""
        for member in self.members.values():
            member.begin_fit(resumed)

    def start_round(self, round_idx: int) -> None:
        """Open the round of every model that some client trains, and call the round callbacks."""
        units = self.cohorts.units(round_idx)
        for member in self.members.values():
            own = _of(member, units)
            if own or member.owner.algorithm.steps_without_clients:
                opened = member.open_round(round_idx, own)
                for callback in self.runtime.round_callbacks():
                    callback.on_round_start(self.runtime.trainer, member.lightning_module, opened.opened)

    def play(self, share: Share) -> None:
        """Train this process's clients, one model after another."""
        for member in self.members.values():
            if own := _of(member, share.units):
                self._play(member, own)

    def _play(self, member: Member, units: Sequence[WorkUnit]) -> None:
        callbacks, trainer, module = self.runtime.round_callbacks(), self.runtime.trainer, member.lightning_module

        def start(turn: Turn) -> None:
            for callback in callbacks:
                callback.on_client_start(trainer, module, turn)

        def end(turn: Turn) -> None:
            for callback in callbacks:
                callback.on_client_end(trainer, module, turn)

        play(member.engine.round, self.runtime.until_told(units), start, end)

    def finish_round(self) -> None:
        """Close the round, step the servers on their pseudo-gradients, step the schedules and log the round."""
        opened = [member for member in self.members.values() if member.engine.round_is_open]
        for member in opened:  # all of them, before anything at a server changes
            member.engine.gather_round()
        with postponing_interrupts():
            closed = {member.name: member.apply_round() for member in opened}
            self.runtime.step([member.optimizers[0] for member in opened])
            for member in opened:
                member.engine.settle()
            for member in self.members.values():
                member.owner.zero_grad()  # of every parameter, including those of no optimizer
            self.last_stepped = self.runtime.round_idx
            summaries = self._complete(closed)
            for member, summary in zip(self.members.values(), summaries, strict=True):
                member.schedules.note(summary)
            # all of them, so that a checkpoint written after one has failed holds the whole round
            call_all(self._announcements(summaries))

    def _complete(self, closed: Mapping[str, RoundSummary]) -> list[RoundSummary]:
        """The round's summaries of all models, even those that no client trained, with the sampler's diagnostics."""
        summaries = []
        for index, (name, member) in enumerate(self.members.items()):
            summary = closed.get(name) or RoundSummary(self.runtime.round_idx, (), {}, {}, {}, model=name)
            summaries.append(self.cohorts.note(index, member.with_learning_rate(summary)))
        return summaries

    def _announcements(self, summaries: Sequence[RoundSummary]) -> Iterator[Callable[[], None]]:
        """What follows the servers' step: schedules, loggers and callbacks, in this order."""
        for member in self.members.values():
            yield partial(member.schedules.step, self.runtime.round_idx)
        yield partial(self.runtime.log, summaries)
        for callback in self.runtime.round_callbacks():
            for member, summary in zip(self.members.values(), summaries, strict=True):
                yield partial(callback.on_round_end, self.runtime.trainer, member.lightning_module, summary)

    def abandon_round(self) -> None:
        """End a round that failed; it has changed nothing at the server and can be repeated."""
        for member in self.members.values():
            member.drop_round()

    def write(self, checkpoint: dict[str, Any]) -> None:
        """Write what lasts between rounds, besides weights, into a checkpoint; an entry without content is left out."""
        members = self.members
        reached = {name: member.first_rounds.unreached for name, member in members.items()}
        sampled = self.cohorts.sampled
        entries = {
            "federation_state": {
                n: state.state_dict() for n, m in members.items() if (state := m.owner.state) is not None
            },
            "federation_clients": {k: entry for m in members.values() for k, entry in m.store.state_dict().items()},
            "federation_frozen": {name: found for name, m in members.items() if (found := m.frozen_base.state_dict())},
            "federation_unreached": {name: names for name, names in reached.items() if names is not None},
            "federation_decisions": {name: dict(m.decisions) for name, m in members.items() if m.decisions},
            "federation_sampler": {} if sampled is None else sampled.state_dict(),
        }
        checkpoint.update({name: entry for name, entry in entries.items() if entry})
        checkpoint["federation_schedules"] = {name: m.schedules.state_dict() for name, m in members.items()}

    def read(self, checkpoint: Mapping[str, Any]) -> None:
        """Restore all that `write` wrote, except schedules, which exist only once optimizers do."""
        clients, frozen = checkpoint.get("federation_clients", {}), checkpoint.get("federation_frozen", {})
        unreached, decisions = checkpoint.get("federation_unreached", {}), checkpoint.get("federation_decisions", {})
        for name, member in self.members.items():
            member.restore(clients, frozen.get(name, {}), unreached.get(name), decisions.get(name, {}))
        if self.cohorts.sampled is not None:
            self.cohorts.sampled.load_state_dict(checkpoint.get("federation_sampler", {}))

    def load_states(self, checkpoint: Mapping[str, Any]) -> None:
        """Restore what the algorithms keep from round to round, which `write` wrote with the rest."""
        saved = checkpoint.get("federation_state", {})
        states = {name: state for name, m in self.members.items() if (state := m.owner.state) is not None}
        try:
            if saved.keys() != states.keys():
                raise RuntimeError(f"It is of {list(saved)}, not of {list(states)}.")
            for name, state in states.items():
                state.load_state_dict(saved[name])
        except RuntimeError as error:
            raise RuntimeError(
                "The checkpoint has state of another algorithm, or lacks that of this one: pass the one of the run, "
                f"load_from_checkpoint(path, algorithm=...), or load your own module alone: {ALONE}. {error}"
            ) from error


def _of(member: Member, units: Sequence[WorkUnit]) -> list[WorkUnit]:
    return [unit for unit in units if unit.model == member.key]
