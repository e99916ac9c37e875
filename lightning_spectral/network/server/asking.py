"""Asks nodes and waits for their answers, which may be lost, late, doubled or out of order."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace

from lightning_spectral.network.server.line import Answer, Line, Question

SHORTEST, LONGEST = 0.02, 1.0  # seconds between two looks at the line
TRIES = 5  # of sending one question


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
            (ticket,) = self.line.ask([question])
            if ticket is not None:
                until = time.monotonic() + (float("inf") if question.seconds is None else question.seconds)
                self.waiting[ticket] = asked, until
                return
        message = f"the message could not be sent to node {question.node}, {TRIES} times"
        self._lost.append((asked, Answer("", reason="dropped_out", message=message)))

    def arrived(self, *, wait: bool) -> Iterator[tuple[Question, Answer]]:
        """Yield questions with their answers, as they arrive; whoever stops early finds the others later.

        Args:
            wait: Whether to wait until none is open, or else to return what is here now, if the last look was not just
                before.
        """
        pause = SHORTEST
        for found in self._looking:  # `yield from` would end it when the caller stops
            yield found
        while (self.waiting or self._lost) and (wait or time.monotonic() >= self._look_at):
            self._looking, count = self._look(), 0
            for found in self._looking:
                count += 1
                yield found
            self._look_at = time.monotonic() + LONGEST
            if not wait:
                return
            pause = SHORTEST if count else min(2 * pause, LONGEST)
            if self.waiting and not count:
                time.sleep(pause)

    def _look(self) -> Iterator[tuple[Question, Answer]]:
        lost, self._lost = self._lost, []
        yield from lost
        for answer in self.line.answers(list(self.waiting)):
            if (open_one := self.waiting.pop(answer.ticket, None)) is not None:  # an answer may come twice
                yield open_one[0], answer
        now, nodes = time.monotonic(), self._nodes()
        for ticket, (question, until) in list(self.waiting.items()):
            if now >= until:
                yield self.waiting.pop(ticket)[0], Answer(ticket, reason="late", message="no answer in time")
            elif nodes is not None and question.node not in nodes:
                message = f"node {question.node} is no longer there"
                yield self.waiting.pop(ticket)[0], Answer(ticket, reason="dropped_out", message=message)

    def _nodes(self) -> Collection[int] | None:
        """The nodes that are there; ``None`` if it does not matter now."""
        return self.line.nodes() if self.waiting else None
