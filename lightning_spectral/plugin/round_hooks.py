"""One round in Lightning's hooks: a training step trains all clients of this process and closes the round."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_spectral.plugin.callbacks.batch_norm_estimation import BatchNormEstimation
from lightning_spectral.plugin.callbacks.boundaries import Aggregation, SubmodelSampling
from lightning_spectral.plugin.callbacks.newly_logged import NewlyLogged
from lightning_spectral.plugin.callbacks.round_callback import RoundCallback
from lightning_spectral.plugin.client_parallel import ClientParallelStrategy
from lightning_spectral.plugin.cohorts import CohortHooks
from lightning_spectral.plugin.host import Share
from lightning_spectral.plugin.member import Member
from lightning_spectral.plugin.precision import full_precision, scaled_by
from lightning_spectral.plugin.round_log import log_round
from lightning_spectral.plugin.stages import stage_profile
from lightning_spectral.plugin.unfinished_rounds import BeforeValidation, call_all, postponing_interrupts
from lightning_spectral.protocol.records import RoundSummary
from lightning_spectral.protocol.work_unit import WorkUnit
from lightning_spectral.server.share import play
from lightning_spectral.server.turn import Turn


@dataclass
class RoundProgress:
    """How far a fit has come.

    Attributes:
        stepped: The last round in which the server has stepped.
        validated: The last round after which it was validated.
        ended: The last round whose epoch has ended, for all but callbacks that save.
        told_to_end: Whether SIGTERM ends the run before the round's last client.
        before_validation: State before the validation of the last finished round.
        logged: Tells a round's metrics from those of earlier rounds.
    """

    stepped: int = -1
    validated: int = -1
    ended: int = -1
    told_to_end: bool = False
    before_validation: BeforeValidation | None = None
    logged: NewlyLogged = field(default_factory=NewlyLogged)


class RoundHooks(CohortHooks):
    """The training half of a federation: everything from the start to the end of a round, for each of its models."""

    _default_dtype: torch.dtype
    _rounds: RoundProgress

    def start_round(self, round_idx: int) -> None:
        """Open the round of every model that some client trains, and call the round callbacks."""
        if isinstance(self.trainer.strategy, ClientParallelStrategy):
            self.trainer.strategy.note_shares(round_idx)
        self._rounds.before_validation = None
        self._rounds.logged.mark(self.trainer)
        units = self.cohort(round_idx)
        for key, member in self.by_key.items():
            own = [unit for unit in units if unit.model == key]
            if own or member.algorithm.steps_without_clients:
                opened = member.open_round(round_idx, own)
                for callback in self._round_callbacks():
                    callback.on_round_start(self.trainer, member, opened.opened)

    def _open_members(self) -> list[Member]:
        return [member for member in self.members.values() if member.engine.round_is_open]

    def training_step(self, batch: Share, batch_idx: int) -> None:
        """Train this process's clients, one model after another; then `Aggregation` ends the round."""
        strategy = self.trainer.strategy
        if isinstance(strategy, ClientParallelStrategy):
            strategy.note_shares(batch.round_idx, batch.everywhere)
        with full_precision(self.device, self._default_dtype):
            for key, member in self.by_key.items():
                self._play(member, [unit for unit in batch.units if unit.model == key])
            self._end_if_told()
            for callback in self._round_callbacks():
                callback.on_cohort_end(self.trainer, self, batch.round_idx)

    def _play(self, member: Member, units: Sequence[WorkUnit]) -> None:
        callbacks = self._round_callbacks()

        def start(turn: Turn) -> None:
            for callback in callbacks:
                callback.on_client_start(self.trainer, member, turn)

        def end(turn: Turn) -> None:
            for callback in callbacks:
                callback.on_client_end(self.trainer, member, turn)

        if units:
            play(member.engine.round, self._until_told(units), start, end)

    def _until_told(self, units: Sequence[WorkUnit]) -> Iterator[WorkUnit]:
        """Yield the units whose turns may begin: none once a process was told to end, by SIGTERM."""
        strategy = self.trainer.strategy
        for unit in units:
            if isinstance(strategy, ClientParallelStrategy):
                strategy.note_turn(self.current_epoch, unit)
                self._rounds.told_to_end |= strategy.is_told_to_end()
            else:
                self._rounds.told_to_end |= self.trainer.received_sigterm
            if self._rounds.told_to_end:
                return
            yield unit

    def _end_if_told(self) -> None:
        """End all processes, as Lightning does for SIGTERM, if any of them was told to before its clients were done."""
        if self.trainer.strategy.reduce_boolean_decision(self._rounds.told_to_end, all=False):
            self.trainer._signal_connector.received_sigterm = True
            raise SIGTERMException

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
        """The round callbacks in the Trainer's order, between those that must come first and `Aggregation`."""
        callbacks: list[pl.Callback] = self.trainer.callbacks  # type: ignore[attr-defined]
        round_callbacks = [callback for callback in callbacks if isinstance(callback, RoundCallback)]
        return sorted(round_callbacks, key=_place)

    def on_train_batch_end(self, outputs: Any, batch: Share, batch_idx: int) -> None:
        """Stop all processes together, as soon as any of them is asked to, or received SIGTERM."""
        if isinstance(self.trainer.strategy, ClientParallelStrategy):
            self.trainer.strategy.end_if_told()
            self.trainer.strategy.note_shares(batch.round_idx)
        self.trainer.should_stop = self.trainer.strategy.reduce_boolean_decision(self.trainer.should_stop, all=False)
        self._rounds.before_validation = BeforeValidation.of(self.trainer, self._rounds.logged)

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
    return isinstance(callback, Aggregation) - isinstance(callback, BatchNormEstimation | SubmodelSampling)


def _nothing() -> None:
    """The closure for an optimizer whose gradients already exist."""
