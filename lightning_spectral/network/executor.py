"""Lets devices train that a network reaches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import InitVar, dataclass, replace
from functools import partial
from itertools import islice
from typing import TypeVar

from lightning_spectral.errors import RecordError
from lightning_spectral.network.gate import PER_CLIENT, SMALL, UploadGate, read_handshake, shown
from lightning_spectral.network.line import Answer, Asking, Question
from lightning_spectral.network.messages import Kind, Part, Start, digest_of, handshake_parts, record_parts
from lightning_spectral.network.objects import write_object
from lightning_spectral.network.roster import Roster
from lightning_spectral.protocol.records import Download, ExclusionReason, Failure, Handshake, Upload, WorkUnit
from lightning_spectral.server.executor import Executor

T = TypeVar("T")
ABSENT = "late", "dropped_out"  # reasons for which there is no answer, and which are no failure


@dataclass(eq=False)
class RemoteExecutor(Executor):
    """Sends each download to the device of its client, and yields uploads as they arrive.

    A client that is not there has dropped out; one whose answer does not come in time is late; and one that answers
    what cannot be used has failed, with the stage ``"network"``. `Faults` says how the round continues.

    Args:
        roster: Who is there.
        start: What devices need once.
        gate: Reads what they send back.
        deadline: Seconds that a client may take for a round; ``None`` for as long as the network allows.
        at_once: Most clients that train at the same time; ``None`` for all of a round.
        keep_first: Number of updates for which a round waits; ``None`` for all.
    """

    roster: Roster
    start: InitVar[Start]
    gate: UploadGate
    deadline: float | None
    at_once: int | None
    keep_first: int | None

    def __post_init__(self, start: Start) -> None:
        surplus: tuple[ExclusionReason, ...] = () if self.keep_first is None else ("surplus",)
        self.exclusion_reasons = ("dropped_out", "late", *surplus)
        self._start, self._num_kept, self._started = write_object(start), 0, set[int]()  # nodes that have the start
        self._digest = digest_of(self._start)

    def begin_round(self) -> None:
        """Wait for as many updates as in every round."""
        self._num_kept = 0

    def run(self, downloads: Iterable[Download]) -> Iterator[Upload]:
        """Yield uploads as they arrive, those of the first clients perhaps before the last downloads are drawn."""
        asking, sent = Asking(self.roster.line), dict[int, Download]()
        for download in downloads:
            unit = download.unit
            if (node := self.roster.node_of(unit.client_id, unit.model)) is None or self._has_enough:
                if node is None:
                    self.roster.seen_of(unit.client_id).note(0, 0, "dropped_out", "it is not there, or has no examples")
                yield Upload(unit, {}, left_out="dropped_out" if node is None else "surplus")
                continue
            sent[node] = download
            self._send(asking, node, download, self.deadline)
            yield from self._uploads(asking, sent, wait=False)
            if len(sent) == self.at_once:
                yield from islice(self._uploads(asking, sent, wait=True), 1)
        yield from self._uploads(asking, sent, wait=True)
        self.roster.report(now=True)

    def agree(self, questions: Sequence[Handshake]) -> Iterator[Handshake | Upload]:
        asking, asked = Asking(self.roster.line), dict[int, Handshake]()
        for question in questions:
            if (node := self.roster.node_of(question.unit.client_id, question.unit.model)) is None:
                yield Upload(question.unit, {}, left_out="dropped_out")
                continue
            asked[node] = question
            parts, most_bytes = handshake_parts(question), SMALL + PER_CLIENT * len(question.said)
            sent = Question(node, Kind.AGREE, parts, question.round_idx, self.deadline, most_bytes)
            self._ask(asking, question.unit.client_id, sent)
        for sent, answer in asking.arrived(wait=True):
            question = asked[sent.node]
            yield self._read(question.unit, sent.round_idx, answer, partial(read_handshake, question))

    @property
    def _has_enough(self) -> bool:
        return self._num_kept == self.keep_first

    def _send(self, asking: Asking, node: int, download: Download, seconds: float | None) -> None:
        parts = {**record_parts(download), Part.DIGEST: self._digest}
        if node not in self._started:
            parts[Part.START] = self._start
        most_bytes = self.gate.most_bytes(download)
        question = Question(node, Kind.TRAIN, parts, download.round_idx, seconds, most_bytes)
        self._ask(asking, download.unit.client_id, question)

    def _uploads(self, asking: Asking, sent: dict[int, Download], *, wait: bool) -> Iterator[Upload]:
        for question, answer in () if self._has_enough else asking.arrived(wait=wait):
            node = question.node
            if Part.LACKS in answer.parts and node in self._started:  # it was restarted
                self._started.remove(node)
                self._send(asking, node, sent[node], question.seconds)
                continue
            if answer.reason is None and answer.parts.keys().isdisjoint((Part.LACKS, Part.REFUSED)):
                self._started.add(node)
            download = sent.pop(node)
            upload = self._read(download.unit, question.round_idx, answer, partial(self.gate.read, download))
            self._num_kept += upload.left_out is None and not upload.missing
            yield upload
            if self._has_enough:
                break
        while self._has_enough and sent:
            yield Upload(sent.popitem()[1].unit, {}, left_out="surplus")

    def _ask(self, asking: Asking, client_id: int, question: Question) -> None:
        self.roster.seen_of(client_id).sent_bytes += sum(map(len, question.parts.values()))
        asking.ask(question)

    def _read(self, unit: WorkUnit, round_idx: int, answer: Answer, read: Callable[[Answer], T]) -> T | Upload:
        """What a device answers; or an upload that says why there is none that can be used. Either is noted."""
        found: T | Upload
        why, seen = shown(answer.message), self.roster.seen_of(unit.client_id)
        try:
            found = Upload(unit, {}, left_out=answer.reason) if answer.reason in ABSENT else read(answer)
        except RecordError as error:
            failure = Failure("network", f"The device's answer cannot be used: {error}")
            found = Upload(unit, {}, left_out="error", failure=failure)
        if isinstance(found, Upload) and found.failure is not None:
            why = found.failure.message
            found = replace(found, failure=replace(found.failure, message=f"device {seen.client!r}: {why}"))
        reason = found.left_out if isinstance(found, Upload) else None
        seen.note(round_idx, sum(map(len, answer.parts.values())), reason, why)
        self.roster.report(now=reason == "error")  # which may end the run
        return found
