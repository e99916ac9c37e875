"""One round in Lightning's hooks: a client's turn is a training step, and the last one closes the round."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch

from lightning_spectral.plugin.callbacks.batch_norm_estimation import BatchNormEstimation
from lightning_spectral.plugin.callbacks.boundaries import Aggregation
from lightning_spectral.plugin.callbacks.newly_logged import NewlyLogged
from lightning_spectral.plugin.callbacks.round_callback import RoundCallback
from lightning_spectral.plugin.client_parallel import ClientParallelStrategy
from lightning_spectral.plugin.cohorts import CohortHooks
from lightning_spectral.plugin.host import Slot
from lightning_spectral.plugin.member import Member
from lightning_spectral.plugin.precision import full_precision, scaled_by
from lightning_spectral.plugin.round_log import log_round
from lightning_spectral.plugin.stages import stage_profile
from lightning_spectral.plugin.unfinished_rounds import BeforeValidation, call_all, postponing_interrupts
from lightning_spectral.protocol.records import RoundSummary
from lightning_spectral.protocol.work_unit import WorkUnit
from lightning_spectral.server.turn import Turn


@dataclass
class RoundProgress:
    """How far a fit has come.

    Attributes:
        stepped: The last round in which the server has stepped.
        validated: The last round after which it was validated.
        ended: The last round whose epoch has ended, for all but callbacks that save.
        stop_requested: Whether to stop after the current round.
        before_validation: State before the validation of the last finished round.
        logged: Tells a round's metrics from those of earlier rounds.
    """

    stepped: int = -1
    validated: int = -1
    ended: int = -1
    stop_requested: bool = False
    before_validation: BeforeValidation | None = None
    logged: NewlyLogged = field(default_factory=NewlyLogged)


class RoundHooks(CohortHooks):
    """The training half of a federation: everything from the start to the end of a round, for each of its models."""

    _turn: Turn | None
    _default_dtype: torch.dtype
    _rounds: RoundProgress

    def start_round(self, round_idx: int) -> None:
        """Open the round of every model that some client trains, and call the round callbacks."""
        self._note_turns(round_idx)
        self._rounds.before_validation = None
        self._rounds.logged.mark(self.trainer)
        units = self.cohort(round_idx)
        for key, member in self.by_key.items():
            own = [unit for unit in units if unit.model == key]
            if own or member.algorithm.steps_without_clients:
                opened = member.open_round(round_idx, own)
                for callback in self._round_callbacks():
                    callback.on_round_start(self.trainer, member, getattr(opened.opened, "opened", opened.opened))

    def _open_members(self) -> list[Member]:
        return [member for member in self.members.values() if member.engine.round_is_open]

    def send(self, slot: Slot) -> None:
        """Begin a client's turn: draw its download and send it. An idle slot, or one after a failure, has no turn."""
        self._note_turns(slot.round_idx, slot.everywhere)
        self._turn = None if slot.unit is None else self._begin(slot.unit)

    def _note_turns(self, round_idx: int, units: Sequence[WorkUnit | None] = ()) -> None:
        if isinstance(self.trainer.strategy, ClientParallelStrategy):
            self.trainer.strategy.note_turns(round_idx, units)

    def _begin(self, unit: WorkUnit) -> Turn | None:
        opened = self.by_key[unit.model].engine.round
        if opened.failure is None:
            with opened.containing_failures(unit):
                turn = Turn(opened, unit)
                turn.send()
                return turn
        return None

    def training_step(self, batch: Slot, batch_idx: int) -> None:
        """Run one client's local epochs, then `Aggregation`; after the last client, end the round."""
        with full_precision(self.device, self._default_dtype):
            self._train(self._turn)
            for unit in batch.more:
                self._train(self._begin(unit))
            if self.trainer.is_last_batch:
                for callback in self._round_callbacks():
                    callback.on_cohort_end(self.trainer, self, batch.round_idx)

    def _train(self, turn: Turn | None) -> None:
        if turn is not None:
            with turn.round.containing_failures(turn.unit):
                turn.train()
                for callback in self._round_callbacks():
                    callback.on_client_end(self.trainer, self.by_key[turn.unit.model], turn)

    def abandon_round(self) -> None:
        """End a round that failed; it has changed nothing at the server and can be repeated."""
        for member in self.members.values():
            member.drop_round()

    def finish_round(self) -> None:
        """Close the round, step the server on its pseudo-gradients, step the schedules and log the round."""
        members = self._open_members()
        for member in members:  # all of them, before anything at the server changes
            member.engine.gather_round()
        with postponing_interrupts():
            closed = {member.name: member.apply_round() for member in members}
            self._step_servers(members)
            for member in members:
                member.settle()
            self.zero_grad()  # of every parameter, including those of no optimizer
            self._rounds.stepped = self.current_epoch
            summaries = self._complete(closed)
            for member, summary in zip(self.members.values(), summaries, strict=True):
                member.schedules.note(summary)
            # all of them, so that a checkpoint written after one has failed holds the whole round
            call_all(self._announcements(summaries))

    def _step_servers(self, members: Sequence[Member]) -> None:
        """Step the server optimizers of some models; Lightning counts only the first optimizer's step, for the round.

        That optimizer steps in every round; without a gradient, the step changes nothing.
        """
        optimizers: Any = self.optimizers()
        with stage_profile(self.trainer, "apply"), scaled_by(None, self.trainer.precision_plugin):
            optimizers[0].step()
            for first in (member.seat.first_optimizer for member in members):
                if first:
                    self.trainer.strategy.optimizer_step(optimizers[first].optimizer, _nothing)

    def _complete(self, closed: Mapping[str, RoundSummary]) -> list[RoundSummary]:
        """The round's summaries of all models, even those that no client trained, with the sampler's diagnostics."""
        summaries = []
        for index, (name, member) in enumerate(self.members.items()):
            summary = closed.get(name) or RoundSummary(self.current_epoch, (), {}, {}, {}, model=name)
            summaries.append(self.note_round(index, member.with_learning_rate(summary)))
        return summaries

    def _announcements(self, summaries: Sequence[RoundSummary]) -> Iterator[Callable[[], None]]:
        """What follows the server's step: schedules, loggers and callbacks, in this order."""
        for member in self.members.values():
            yield partial(member.schedules.step, self.current_epoch)
        yield partial(log_round, self.trainer, summaries)
        for callback in self._round_callbacks():
            for member, summary in zip(self.members.values(), summaries, strict=True):
                yield partial(callback.on_round_end, self.trainer, member, summary)

    def _round_callbacks(self) -> list[RoundCallback]:
        """The round callbacks in the Trainer's order, between those that complete the server and that end the round."""
        callbacks: list[pl.Callback] = self.trainer.callbacks  # type: ignore[attr-defined]
        round_callbacks = [callback for callback in callbacks if isinstance(callback, RoundCallback)]
        return sorted(round_callbacks, key=_place)

    def on_train_batch_end(self, outputs: Any, batch: Slot, batch_idx: int) -> None:
        """Postpone a request to stop within a round to its last client.

        Processes stop together, as soon as any of them is asked to. On SIGTERM they end after the current turn.
        """
        self._turn = None
        if isinstance(self.trainer.strategy, ClientParallelStrategy):
            self.trainer.strategy.end_if_told()
            self.trainer.strategy.note_turns(batch.round_idx)
        if self.trainer.is_last_batch:
            stop = self.trainer.should_stop or self._rounds.stop_requested
            self.trainer.should_stop = self.trainer.strategy.reduce_boolean_decision(stop, all=False)
            self._rounds.before_validation = BeforeValidation.of(self.trainer, self._rounds.logged)
        elif self.trainer.should_stop:
            self.trainer.should_stop, self._rounds.stop_requested = False, True

    def on_train_epoch_end(self) -> None:
        """Step the schedules that wait for a metric, which is available now."""
        if self._rounds.stepped == self.current_epoch:
            for member in self.members.values():
                member.schedules.step_on(self.trainer.callback_metrics, self.current_epoch)
        self._rounds.ended = self.current_epoch

    def on_validation_epoch_end(self) -> None:
        """Call the user's hook, and log the round, so that loggers can plot evaluation against it."""
        super().on_validation_epoch_end()
        if self.trainer.state.fn == "fit" and not self.trainer.sanity_checking:
            self.log("fl/round", float(self.current_epoch), batch_size=1)
            self._rounds.validated = self.current_epoch


def _place(callback: RoundCallback) -> int:
    """Whether a callback comes first, in the middle or last among the round callbacks."""
    return isinstance(callback, Aggregation) - isinstance(callback, BatchNormEstimation)


def _nothing() -> None:
    """The closure for an optimizer whose gradients already exist."""
