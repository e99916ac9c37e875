"""Every question is answered exactly once, whatever the line does to messages; and the server keeps none of them."""

import random
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import ref

import pytest
from fake_line import FakeLine, remote, toy_line
from federation import Fit, same_state, seeded
from hypothesis import given
from hypothesis import strategies as st
from other_process import toy_data
from toy_models import LitMLP

import lightning_spectral as ls
from lightning_spectral.network import line as network_line
from lightning_spectral.network.line import Answer, Asking, Line, Question
from lightning_spectral.network.messages import Kind


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

    def ask(self, question: Question) -> str | None:
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
        patch.setattr(network_line, "SHORTEST", 0.0)
        patch.setattr(network_line, "LONGEST", 0.0)
        open_ones, answered = Asking(Hazardous(seed, range(number))), Counter[int]()
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


@dataclass
class Slow(Line):
    """Answers its only question after some seconds of a clock that passes only while the server sleeps."""

    seconds: float
    now: float = 0.0
    looks: int = 0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def nodes(self) -> Collection[int]:
        return [0]

    def ask(self, question: Question) -> str | None:
        return "0"

    def answers(self, tickets: Collection[str]) -> Iterable[Answer]:
        self.looks += 1
        return [Answer("0")] if self.now >= self.seconds else []


@pytest.mark.parametrize("seconds", [0.0, 0.1, 0.5, 1.3, 2.3, 30.0])
def test_an_answer_waits_at_most_a_fifth_longer_than_it_took(seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    line = Slow(seconds)
    monkeypatch.setattr(network_line, "time", line)
    asking = Asking(line)
    asking.ask(Question(0, "train"))
    assert len(list(asking.arrived(wait=True))) == 1
    assert line.now <= 1.2 * seconds + 0.03
    assert line.looks <= 20 + seconds


def test_a_line_that_answers_for_another_is_not_believed() -> None:
    line = Hazardous(0, [1])
    line.ask = lambda question: "ours"  # type: ignore[method-assign]
    line.answers = lambda tickets: [Answer("theirs", {"node": b"1"})]  # type: ignore[method-assign]
    open_ones = Asking(line)
    open_ones.ask(Question(1, "train", seconds=0.05))
    assert [answer.reason for _, answer in open_ones.arrived(wait=True)] == ["late"]


@dataclass
class Counting(FakeLine):
    """Answers when all have been asked, each as it is fetched; counts what is alive then.

    Attributes:
        most_answers: Largest number of answers in memory.
        most_questions: Largest number of questions, with what was sent, in memory when an answer is fetched.
        most_open: Largest number of open questions.
    """

    most_answers: int = 0
    most_questions: int = 0
    most_open: int = 0
    held: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.given: list[ref[Answer]] = []
        self.sent: list[ref[Question]] = []

    def ask(self, question: Question) -> str | None:
        """Encode what was asked, so that the question itself can go."""
        if question.kind != Kind.TRAIN:
            return super().ask(question)
        self.sent.append(ref(question))
        ticket = f"{question.round_idx} {question.node} {len(question.parts)}"
        self.held[ticket] = question.node, question.kind, dict(question.parts)
        self.most_open = max(self.most_open, len(self.held))
        return ticket

    def answers(self, tickets: Collection[str]) -> Iterable[Answer]:
        yield from super().answers(tickets)
        yield from self._trained(tickets)

    def _trained(self, tickets: Collection[str]) -> Iterator[Answer]:
        for ticket in tickets:
            if ticket in self.held:
                node, kind, parts = self.held.pop(ticket)
                answer = Answer(ticket, self.there[node].answer(Question(node, kind, parts)))
                self.given.append(ref(answer))
                self.most_answers = max(self.most_answers, alive(self.given))
                self.most_questions = max(self.most_questions, alive(self.sent))
                yield answer
                del answer


def alive(references: Sequence[ref[Any]]) -> int:
    return sum(reference() is not None for reference in references)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("algorithm", "clients", "at_once"),
    [(ls.FedAvg(), 3, None), (ls.SpectralSharding(keep_ratio=0.5), 12, None), (ls.FedAvg(), 12, 3)],
    ids=["FedAvg", "spectral", "at most three at once"],
)
def test_answers_are_summed_as_they_arrive_and_questions_are_not_kept(
    algorithm: Any, clients: int, at_once: int | None, fit: Fit
) -> None:
    line = Counting(toy_line(LitMLP).there)
    options: dict[str, Any] = {"algorithm": algorithm, "max_epochs": 2, "clients_per_round": clients, "seed": 3}
    ours = fit(seeded(LitMLP), remote(line, at_once=at_once), **options)
    assert line.most_answers <= 2  # the last one, and the next
    assert line.most_questions <= 1
    assert line.most_open == at_once if at_once else line.most_open > clients // 2  # in flight together, in part
    assert same_state(ours.state, fit(seeded(LitMLP), toy_data(), **options).state)
