"""Plays a process's share of a round: all its downloads in one call of the executor, and uploads as they arrive."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from lightning_spectral.protocol.records import Download, Upload
from lightning_spectral.protocol.work_unit import WorkUnit
from lightning_spectral.server.resending import uploads_of
from lightning_spectral.server.round import OpenRound, client_error
from lightning_spectral.server.turn import Turn

Act = Callable[[Turn], object]


def play(opened: OpenRound, units: Iterable[WorkUnit], start: Act = Turn.send, end: Act = Turn.receive) -> None:
    """Play the turns of some units.

    Units are taken, and their downloads drawn, as the executor asks for them. So an executor that trains one client
    after another needs the memory of one download, however many there are. Uploads are received as they arrive.

    Args:
        opened: The round.
        units: Whose turns to play.
        start: Called when a client's download is due; it must send it.
        end: Called when a client's upload has arrived; it must receive it.

    Raises:
        ClientError: If a turn fails; with several processes, only when they meet.
    """
    _Share(opened, start, end).play(units)


class _Share:
    """The turns of one process in one round; after a failure that is held back, no more of them begin."""

    def __init__(self, opened: OpenRound, start: Act, end: Act) -> None:
        self.opened, self.start, self.end = opened, start, end
        self.waiting: dict[tuple[int, str], Turn] = {}  # sent, and not back yet
        self.latest: WorkUnit | None = None

    def play(self, units: Iterable[WorkUnit]) -> None:
        uploads = self._uploads(units)
        while (upload := self._next(uploads)) is not None:
            self._receive(upload)

    def _uploads(self, units: Iterable[WorkUnit]) -> Iterator[Upload]:
        yield from uploads_of(self.opened.executor, self._downloads(units))

    def _downloads(self, units: Iterable[WorkUnit]) -> Iterator[Download]:
        """Send each client its download; one that will not report back has its whole turn here."""
        for self.latest in units:
            with self.opened.containing_failures(self.latest):
                turn = self._begin(self.latest)
            if self.opened.failure is not None:
                return
            if turn.download is not None and turn.takes_part:
                yield turn.download

    def _begin(self, unit: WorkUnit) -> Turn:
        turn = Turn(self.opened, unit)
        self.start(turn)
        if turn.takes_part:
            self.waiting[unit.key] = turn
        else:
            turn.skip()
            self.end(turn)
        return turn

    def _next(self, uploads: Iterator[Upload]) -> Upload | None:
        """The next upload, if there is one and nothing has failed."""
        try:
            return None if self.opened.failure is not None else next(uploads, None)
        except Exception as error:  # of the executor: most likely about the client that was sent to last
            self.opened.contain(error, self.latest)
            return None

    def _receive(self, upload: Upload) -> None:
        with self.opened.containing_failures(upload.unit):
            turn = self.waiting.pop(upload.unit.key, None)
            if turn is None:
                message = "its executor returned an upload that nobody waits for, or returned it twice."
                raise client_error(self.opened.round_idx, upload.unit, "", message)
            turn.accept(upload)
            self.end(turn)
