"""An executor whose clients train on their own devices, which a network reaches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import ClassVar

from lightning_spectral.errors import RecordError
from lightning_spectral.network.messages import (
    DIGEST,
    LACKS,
    REFUSED,
    START,
    TRAIN,
    Parts,
    Start,
    digest_of,
    record_of,
    record_parts,
)
from lightning_spectral.network.objects import write_object
from lightning_spectral.network.server.asking import Asking
from lightning_spectral.network.server.line import Answer, Question
from lightning_spectral.network.server.reply_checks import ReplyChecks
from lightning_spectral.network.server.roster import Roster
from lightning_spectral.protocol.records import Download, ExclusionReason, Failure, Upload
from lightning_spectral.server.executor import Executor


class RemoteExecutor(Executor):
    """Sends each download to the device of its client, and yields uploads as they arrive.

    A client that is not there has dropped out; one whose answer does not come in time is late; and one that answers
    what cannot be used has failed, with the stage ``"network"``. What becomes of them is for `Faults` to say.

    Args:
        roster: Who is there.
        start: What devices need once.
        checks: Of what they send back.
        deadline: Seconds that a client may take for a round; ``None`` for as long as the network allows.
        at_once: Most clients that train at the same time; ``None`` for all of a round.
    """

    exclusion_reasons: ClassVar[tuple[ExclusionReason, ...]] = ("dropped_out", "late")

    def __init__(
        self, roster: Roster, start: Start, checks: ReplyChecks, deadline: float | None, at_once: int | None = None
    ) -> None:
        self.roster, self.checks, self.deadline, self.at_once = roster, checks, deadline, at_once
        self._start = write_object(start)
        self._digest = digest_of(self._start)
        self._started: set[int] = set()  # nodes that have the start

    def run(self, downloads: Iterable[Download]) -> Iterator[Upload]:
        """Yield uploads as they arrive, those of the first clients perhaps before the last downloads are drawn."""
        asking, sent = Asking(self.roster.line), dict[int, _Sent]()
        for download in downloads:
            node = self.roster.node_of(download.unit.client_id)
            if node is None:
                yield Upload(download.unit, {}, left_out="dropped_out")
                continue
            sent[node] = _Sent(download, has_start=node in self._started)
            asking.ask(self._question(node, sent[node]))
            yield from self._uploads(asking, sent, wait=False)
            if len(sent) == self.at_once:
                yield from islice(self._uploads(asking, sent, wait=True), 1)
        yield from self._uploads(asking, sent, wait=True)

    def _question(self, node: int, sent: _Sent) -> Question:
        parts = {**record_parts(sent.download), DIGEST: self._digest}
        if not sent.has_start:
            parts[START] = self._start
        return Question(node, TRAIN, parts, sent.download.round_idx, self.deadline)

    def _uploads(self, asking: Asking, sent: dict[int, _Sent], *, wait: bool) -> Iterator[Upload]:
        for question, answer in asking.arrived(wait=wait):
            node = question.node
            if LACKS in answer.parts and sent[node].has_start:
                sent[node] = replace(sent[node], has_start=False)
                asking.ask(self._question(node, sent[node]))
                continue
            if answer.reason is None and REFUSED not in answer.parts:
                self._started.add(node)
            yield self._upload(sent.pop(node).download, answer)

    def _upload(self, download: Download, answer: Answer) -> Upload:
        if answer.reason in ("late", "dropped_out"):
            return Upload(download.unit, {}, left_out=answer.reason)
        try:
            upload = record_of(usable(answer), Upload)
            self.checks.check(download, upload)
        except RecordError as error:
            failure = Failure("network", f"The device's answer cannot be used: {error}")
            return Upload(download.unit, {}, left_out="error", failure=failure)
        return replace(upload, unit=download.unit)  # with the server's own coefficient


@dataclass(frozen=True)
class _Sent:
    """What a node was sent, which it may have to be sent again, and whether it should have the start already."""

    download: Download
    has_start: bool


def usable(answer: Answer) -> Parts:
    """The parts of an answer; raise ``RecordError`` if there is none."""
    if answer.reason is not None:
        raise RecordError(answer.message or "there is none")
    if REFUSED in answer.parts:
        raise RecordError(f"it refuses, {answer.parts[REFUSED].decode(errors='replace')}")
    return answer.parts
