"""Opens and closes rounds, in plain torch: callbacks decide when, an algorithm decides what."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from lightning_spectral.errors import RoundError
from lightning_spectral.protocol.records import RoundSummary, WorkUnit
from lightning_spectral.server.executor import Executor
from lightning_spectral.server.round import OpenRound
from lightning_spectral.server.run import Run


class Engine:
    """Opens and closes the rounds of a run.

    Args:
        run: Settings and state shared by all rounds.
        make_executor: Creates the executor that runs the device half; called when the first round opens.
        make_measuring: Creates the executor that measures clients before a round; ``None`` to use the same one.
    """

    def __init__(
        self, run: Run, make_executor: Callable[[], Executor], make_measuring: Callable[[], Executor] | None = None
    ) -> None:
        self.run = run
        self._make_measuring = make_measuring
        self._measuring: Executor | None = None
        self.round_is_open = False
        self.server_is_stepping = False
        self._make_executor = make_executor
        self._executor: Executor | None = None
        self._round: OpenRound | None = None

    @property
    def round(self) -> OpenRound:
        """The open round."""
        assert self._round is not None, "SVDRefresh opens a round before its first client"
        return self._round

    def open_round(self, round_idx: int, units: Iterable[WorkUnit]) -> OpenRound:
        """Open a round and prepare it for its cohort, from the server's weights.

        Args:
            round_idx: Communication round, from 0.
            units: The units that take part, in the cohort's order.
        """
        executor = self.executor
        self._round = OpenRound(self.run, executor, round_idx, units)
        self.round_is_open = True
        executor.begin_round()
        return self._round

    @property
    def executor(self) -> Executor:
        """The executor that runs the device half; created when first needed."""
        if self._executor is None:
            self._executor = self._make_executor()
        return self._executor

    @property
    def measuring_executor(self) -> Executor:
        """The executor that measures clients before a round."""
        if self._make_measuring is None:
            return self.executor
        if self._measuring is None:
            self._measuring = self._make_measuring()
        return self._measuring

    def close_round(self) -> RoundSummary:
        """Finish the average: afterwards the parameters of the server, or of its state, hold the pseudo-gradient.

        All processes call it together and get the same result. If no client is left, and `Faults` allows that, there is
        no gradient, and the server's step changes nothing.

        Raises:
            ClientError: If a client failed in one of several processes.
            RoundError: If more clients were left out than `Faults` allows; the server's weights are as before the
                round.
        """
        self.gather_round()
        return self.apply_round()

    def gather_round(self) -> None:
        """The first half of `close_round`, which may still raise: add up the sums of all processes."""
        self.round.executor.end_round()
        self.round.gather()

    def apply_round(self) -> RoundSummary:
        """The second half of `close_round`: from here on the server's weights change."""
        self.server_is_stepping = True
        summary = self.round.apply()
        self.round_is_open, self._round = False, None
        return summary

    def abandon_round(self) -> None:
        """Discard the open round, if there is one, and the executors; the round will not be finished."""
        if self._executor is not None:
            self._executor.end_round()
        self._executor = self._measuring = self._round = None

    def settle(self) -> None:
        """Update the server's module from the algorithm's state, after the server optimizer's step."""
        self.run.half.settle()
        self.server_is_stepping = False

    def check_server_rests(self) -> None:
        """Raise ``RoundError`` if the server's step began but did not end, so that its weights belong to no round."""
        if self.server_is_stepping:
            raise RoundError(
                "The server's step was interrupted: its weights belong to no round and are not saved. Resume from the "
                "last checkpoint."
            )
