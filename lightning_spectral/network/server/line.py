"""The interface of a network, as the server sees it: nodes with numbers, to which questions go and answers come."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from lightning_spectral.network.messages import Parts
from lightning_spectral.protocol.records import ExclusionReason


@dataclass(frozen=True)
class Question:
    """One message to a node.

    Attributes:
        node: Number of the node.
        kind: What is asked, `WHO` or `TRAIN`.
        parts: The message.
        round_idx: Communication round that it belongs to, which dashboards of the network show.
        seconds: How long the answer is waited for; ``None`` for as long as the network allows.
    """

    node: int
    kind: str
    parts: Parts = field(default_factory=dict)
    round_idx: int = 0
    seconds: float | None = None


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

    @abstractmethod
    def nodes(self) -> Collection[int]:
        """The nodes that are there now."""

    @abstractmethod
    def ask(self, questions: Sequence[Question]) -> list[str | None]:
        """Send questions; return the ticket of each, or ``None`` for those that could not be sent."""

    @abstractmethod
    def answers(self, tickets: Collection[str]) -> Iterable[Answer]:
        """The answers to any of these questions that have arrived, each fetched when it is due; it does not wait."""
