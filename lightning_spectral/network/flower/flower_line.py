"""Flower's grid as a line: messages to nodes, pulled as often as we like."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from flwr.app import DEFAULT_TTL, Message
from flwr.serverapp import Grid

from lightning_spectral.network.flower.wire import as_records, parts_of
from lightning_spectral.network.server.line import Answer, Line, Question
from lightning_spectral.protocol.records import ExclusionReason

# Flower's error codes that do not say that the code on the device failed
REASONS: dict[int, ExclusionReason] = {3: "dropped_out", 4: "late", 5: "dropped_out"}
AT_A_TIME = 8  # messages that are asked for together: so many answers may be in memory
SLACK = 60.0  # seconds that Flower keeps a message after we have given it up


class FlowerLine(Line):
    """The nodes of a Flower run.

    Flower deletes an answer when it is pulled, so each arrives at most once. Its own way to wait sleeps three seconds
    between two looks, and returns all answers of a round together; this one is asked as often as its caller likes.

    Args:
        grid: The grid that Flower gives to a server's main function.
    """

    def __init__(self, grid: Grid) -> None:
        self._grid = grid

    def nodes(self) -> Collection[int]:
        """The nodes that are connected."""
        return list(self._grid.get_node_ids())

    def ask(self, questions: Sequence[Question]) -> list[str | None]:
        """Push messages; a body that Flower refuses as too large has no ticket."""
        tickets = list(self._grid.push_messages([_message(question) for question in questions]))
        return [ticket or None for ticket in tickets] if len(tickets) == len(questions) else [None] * len(questions)

    def answers(self, tickets: Collection[str]) -> Iterator[Answer]:
        """Pull what has arrived, a few answers at a time."""
        open_ones = list(tickets)
        for begin in range(0, len(open_ones), AT_A_TIME):
            yield from map(_answer, self._grid.pull_messages(open_ones[begin : begin + AT_A_TIME]))


def _message(question: Question) -> Message:
    ttl = DEFAULT_TTL if question.seconds is None else question.seconds + SLACK
    group = str(question.round_idx)
    content = as_records(question.parts)
    return Message(content, dst_node_id=question.node, message_type=question.kind, ttl=ttl, group_id=group)


def _answer(reply: Message) -> Answer:
    ticket = reply.metadata.reply_to_message_id
    if reply.has_error():
        reason = REASONS.get(reply.error.code, "error")
        return Answer(ticket, reason=reason, message=reply.error.reason or f"Flower's error {reply.error.code}")
    return Answer(ticket, parts_of(reply.content))
