"""A network as the server sees it: nodes with numbers, to which questions go, and from which answers come or do not."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from lightning_spectral.network.messages import Parts
    from lightning_spectral.protocol.records import ExclusionReason

SHORTEST, LONGEST, GROWTH = 0.02, 1.0, 1.2  # seconds between two looks at the line, and by how much each is longer
TRIES = 5  # of sending one question


@dataclass(frozen=True)
class Question:
    """One message to a node.

    Attributes:
        node: Number of the node.
        kind: What is asked: one of `messages.Kind`.
        parts: The message.
        round_idx: Communication round that it belongs to, which dashboards of the network show.
        seconds: How long to wait, or what is left of that once there is an answer; ``None`` if the network decides.
        most_bytes: Most bytes that the answer may take.
    """

    node: int
    kind: str
    parts: Parts = field(default_factory=dict)
    round_idx: int = 0
    seconds: float | None = None
    most_bytes: float = float("inf")


@dataclass(frozen=True)
class Answer:
    """What came back for a question.

    Attributes:
        ticket: That of the question.
        parts: The answer; empty if there is none.
        reason: Why there is none: the node failed, vanished, or did not answer in time.
        message: What the network says about it.
    """

    ticket: str
    parts: Parts = field(default_factory=dict)
    reason: ExclusionReason | None = None
    message: str = ""


class Line(ABC):
    """A network that may lose messages, and deliver them late, twice or in any order."""

    status: Path | None = None  # file for what a run has seen of its clients; perhaps in a kit, which knows their keys

    @abstractmethod
    def nodes(self) -> Collection[int]:
        """The nodes that are there now."""

    @abstractmethod
    def ask(self, question: Question) -> str | None:
        """Send a question; return its ticket, or ``None`` if it could not be sent."""

    @abstractmethod
    def answers(self, tickets: Collection[str]) -> Iterable[Answer]:
        """The answers to any of these questions that have arrived, each fetched when it is due; it does not wait."""


@dataclass
class Asking:
    """Questions on their way.

    Every question that was `ask`-ed is answered exactly once by `arrived`: with an answer, or with the reason why there
    is none. What was sent is not kept, and answers are yielded one by one, so memory does not grow with their number.

    Attributes:
        line: The network.
        waiting: Each open question, without its parts, and when it is given up, by its ticket.
    """

    line: Line
    waiting: dict[str, tuple[Question, float]] = field(default_factory=dict)
    _lost: list[tuple[Question, Answer]] = field(default_factory=list)
    _looking: Iterator[tuple[Question, Answer]] = field(default_factory=lambda: iter(()))
    _look_at: float = 0.0

    def ask(self, question: Question) -> None:
        """Send a question; one that cannot be sent is answered by ``dropped_out``."""
        asked = replace(question, parts={})
        for _ in range(TRIES):
            if (ticket := self.line.ask(question)) is not None:
                until = time.monotonic() + (float("inf") if question.seconds is None else question.seconds)
                self.waiting[ticket] = asked, until
                return
        message = f"the message could not be sent to node {question.node}, {TRIES} times"
        self._lost.append((asked, Answer("", reason="dropped_out", message=message)))

    def arrived(self, *, wait: bool) -> Iterator[tuple[Question, Answer]]:
        """Yield questions with their answers, as they arrive; a caller that stops early finds the others later.

        Args:
            wait: Whether to wait until none is open, or else to return what is here now, if the last look was not just
                before.
        """
        pause = SHORTEST
        for found in self._looking:  # `yield from` would end it when the caller stops
            yield found
        while (self.waiting or self._lost) and (wait or time.monotonic() >= self._look_at):
            self._looking, count = self.look(), 0
            for found in self._looking:
                count += 1
                yield found
            self._look_at = time.monotonic() + LONGEST
            if not wait:
                return
            pause = SHORTEST if count else min(GROWTH * pause, LONGEST)
            if self.waiting and not count:
                time.sleep(pause)

    def look(self) -> Iterator[tuple[Question, Answer]]:
        """Yield what has arrived by now."""
        lost, self._lost = self._lost, []
        yield from lost
        for answer in self.line.answers(list(self.waiting)):
            if answer.ticket in self.waiting:  # an answer may come twice
                question, until = self.waiting.pop(answer.ticket)
                left = None if question.seconds is None else max(0.0, until - time.monotonic())
                yield replace(question, seconds=left), answer
        now, nodes = time.monotonic(), self.line.nodes() if self.waiting else ()
        for ticket, (question, until) in list(self.waiting.items()):
            if now >= until:
                yield self.waiting.pop(ticket)[0], Answer(ticket, reason="late", message="no answer in time")
            elif question.node not in nodes:
                message = f"node {question.node} is no longer there"
                yield self.waiting.pop(ticket)[0], Answer(ticket, reason="dropped_out", message=message)
