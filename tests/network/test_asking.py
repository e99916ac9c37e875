"""Every question is answered exactly once, whatever the line does to messages."""

import random
from collections import Counter
from collections.abc import Collection, Iterable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_spectral.network.server import asking
from lightning_spectral.network.server.asking import Asking
from lightning_spectral.network.server.line import Answer, Line, Question


class Hazardous(Line):
    """Refuses, loses, doubles, delays and reorders, and loses nodes; an answer holds the question's node."""

    def __init__(self, seed: int, nodes: Collection[int]) -> None:
        self.chance, self.there, self.ready = random.Random(seed), set(nodes), list[Answer]()
        self.delivered = list[Answer]()
        self.count = 0

    def nodes(self) -> Collection[int]:
        if self.chance.random() < 0.1 and self.there:
            self.there.remove(self.chance.choice(sorted(self.there)))
        return self.there

    def ask(self, questions: Sequence[Question]) -> list[str | None]:
        return [self._ask(question) for question in questions]

    def _ask(self, question: Question) -> str | None:
        self.count += 1
        if self.chance.random() < 0.3:
            return None
        if self.chance.random() < 0.7:  # or else the answer is lost
            self.ready.append(Answer(str(self.count), {"node": bytes([question.node])}))
        return str(self.count)

    def answers(self, tickets: Collection[str]) -> Iterable[Answer]:
        self.chance.shuffle(self.ready)
        number = self.chance.randint(0, len(self.ready))
        now, self.ready = self.ready[:number], self.ready[number:]
        again = [answer for answer in self.delivered if self.chance.random() < 0.3]
        self.delivered += now
        return [*again, *now]


@given(st.integers(0, 2**16), st.integers(1, 8))
def test_every_question_is_answered_once(seed: int, number: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(asking, "SHORTEST", 0.0)
        patch.setattr(asking, "LONGEST", 0.0)
        line = Hazardous(seed, range(number))
        open_ones, answered = Asking(line), Counter[int]()
        for node in range(number):
            open_ones.ask(Question(node, "train", seconds=0.01))
            answered.update(_checked(question, answer) for question, answer in open_ones.arrived(wait=False))
        answered.update(_checked(question, answer) for question, answer in open_ones.arrived(wait=True))
    assert answered == Counter(range(number))
    assert not open_ones.waiting


def _checked(question: Question, answer: Answer) -> int:
    """The question's node, to which the answer must belong if there is one."""
    assert answer.reason in (None, "late", "dropped_out")
    assert answer.reason is not None or answer.parts["node"] == bytes([question.node])
    return question.node


def test_a_line_that_answers_for_another_is_not_believed() -> None:
    line = Hazardous(0, [1])
    line.ask = lambda questions: ["ours"]  # type: ignore[method-assign]
    line.answers = lambda tickets: [Answer("theirs", {"node": b"1"})]  # type: ignore[method-assign]
    open_ones = Asking(line)
    open_ones.ask(Question(1, "train", seconds=0.05))
    assert [answer.reason for _, answer in open_ones.arrived(wait=True)] == ["late"]
