"""Lets devices train, and evaluate, that a network reaches."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any, TypeVar

from lightning_spectral.errors import RecordError, SpectralWarning
from lightning_spectral.network.gate import UploadGate, read_handshake, read_metrics
from lightning_spectral.network.line import Answer, Asking, Question
from lightning_spectral.network.messages import (
    AGREE,
    DIGEST,
    EVALUATE,
    LACKS,
    MODEL,
    PRECISION,
    REFUSED,
    START,
    TRAIN,
    Start,
    digest_of,
    handshake_parts,
    record_parts,
)
from lightning_spectral.network.objects import write_object
from lightning_spectral.network.roster import Roster
from lightning_spectral.protocol.client_store import with_state
from lightning_spectral.protocol.exchange import travelling_tensors
from lightning_spectral.protocol.records import Download, ExclusionReason, Failure, Handshake, Upload, WorkUnit
from lightning_spectral.server.executor import Executor

T = TypeVar("T")


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

    def __init__(
        self,
        roster: Roster,
        start: Start,
        gate: UploadGate,
        deadline: float | None,
        at_once: int | None = None,
        keep_first: int | None = None,
    ) -> None:
        self.roster, self.gate, self.deadline, self.at_once = roster, gate, deadline, at_once
        self.keep_first, self._num_kept = keep_first, 0
        surplus: tuple[ExclusionReason, ...] = () if keep_first is None else ("surplus",)
        self.exclusion_reasons = ("dropped_out", "late", *surplus)
        self._start = write_object(start)
        self._digest = digest_of(self._start)
        self._started: set[int] = set()  # nodes that have the start

    def begin_round(self) -> None:
        """Wait for as many updates as in every round."""
        self._num_kept = 0

    def run(self, downloads: Iterable[Download]) -> Iterator[Upload]:
        """Yield uploads as they arrive, those of the first clients perhaps before the last downloads are drawn."""
        asking, sent = Asking(self.roster.line), dict[int, Download]()
        for download in downloads:
            node = self.roster.node_of(download.unit.client_id)
            if node is None or self._has_enough:
                yield Upload(download.unit, {}, left_out="dropped_out" if node is None else "surplus")
                continue
            sent[node] = download
            self._send(asking, node, download)
            yield from self._uploads(asking, sent, wait=False)
            if len(sent) == self.at_once:
                yield from islice(self._uploads(asking, sent, wait=True), 1)
        yield from self._uploads(asking, sent, wait=True)

    def agree(self, questions: Sequence[Handshake]) -> Iterator[Handshake | Upload]:
        """Yield answers as they arrive."""
        asking, asked = Asking(self.roster.line), dict[int, Handshake]()
        for question in questions:
            if (node := self.roster.node_of(question.unit.client_id)) is None:
                yield Upload(question.unit, {}, left_out="dropped_out")
                continue
            asked[node] = question
            asking.ask(Question(node, AGREE, handshake_parts(question), question.round_idx, self.deadline))
        for sent, answer in asking.arrived(wait=True):
            question = asked[sent.node]
            yield _read(question.unit, answer, partial(read_handshake, question))

    @property
    def _has_enough(self) -> bool:
        return self._num_kept == self.keep_first

    def _send(self, asking: Asking, node: int, download: Download) -> None:
        parts = {**record_parts(download), DIGEST: self._digest}
        if node not in self._started:
            parts[START] = self._start
        asking.ask(Question(node, TRAIN, parts, download.round_idx, self.deadline))

    def _uploads(self, asking: Asking, sent: dict[int, Download], *, wait: bool) -> Iterator[Upload]:
        for question, answer in () if self._has_enough else asking.arrived(wait=wait):
            node = question.node
            if LACKS in answer.parts and node in self._started:  # it was restarted
                self._started.remove(node)
                self._send(asking, node, sent[node])
                continue
            if answer.reason is None and answer.parts.keys().isdisjoint((LACKS, REFUSED)):
                self._started.add(node)
            download = sent.pop(node)
            upload = _read(download.unit, answer, partial(self.gate.read, download))
            self._num_kept += upload.left_out is None and not upload.missing
            yield upload
            if self._has_enough:
                break
        while self._has_enough and sent:
            yield Upload(sent.popitem()[1].unit, {}, left_out="surplus")


def _read(unit: WorkUnit, answer: Answer, read: Callable[[Answer], T]) -> T | Upload:
    """What a device answers; or an upload that says why there is none that can be used."""
    if answer.reason in ("late", "dropped_out"):
        return Upload(unit, {}, left_out=answer.reason)
    try:
        return read(answer)
    except RecordError as error:
        failure = Failure("network", f"The device's answer cannot be used: {error}")
        return Upload(unit, {}, left_out="error", failure=failure)


def evaluate_on_devices(
    roster: Roster, model: str, owner: Any, round_idx: int, client_ids: Sequence[int], deadline: float | None
) -> dict[int, Mapping[str, float]]:
    """The metrics of each client that answers; those that do not are named in a warning.

    Args:
        roster: Who is there.
        model: The model's name; empty if there is only one.
        owner: The `FederatedModule`, whose weights all clients get.
        round_idx: The round, from 0.
        client_ids: Clients to evaluate.
        deadline: Seconds that a client may take; ``None`` for as long as the network allows.
    """
    asking, client_of = Asking(roster.line), dict[int, int]()
    tensors = travelling_tensors(owner.module)
    common = {MODEL: model.encode(), PRECISION: owner.trainer.precision.encode()}
    for client_id in client_ids:
        if (node := roster.node_of(client_id)) is not None:
            client_of[node] = client_id
            download = Download(WorkUnit(client_id, model), 1.0, tensors, round_idx, seed=owner.seed)
            download = with_state(download, owner.client_states)
            asking.ask(Question(node, EVALUATE, {**record_parts(download), **common}, round_idx, deadline))
    found: dict[int, Mapping[str, float]] = {}
    for question, answer in asking.arrived(wait=True):
        client_id = client_of[question.node]
        try:
            found[client_id] = read_metrics(answer)
        except RecordError as error:
            name = roster.names[client_id]
            warnings.warn(
                f"Round {round_idx}: client {name!r} is not evaluated: {error}.", SpectralWarning, stacklevel=2
            )
    return found
