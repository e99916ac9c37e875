"""What the server holds while clients train: as much for many of them as for few."""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import ref

import pytest
from fake_line import FakeLine, remote, toy_line
from federation import Fit, same_state, seeded
from other_process import toy_data
from toy_models import LitMLP

import lightning_spectral as ls
from lightning_spectral.network.messages import TRAIN
from lightning_spectral.network.server.line import Answer, Question


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

    def ask(self, questions: Sequence[Question]) -> list[str | None]:
        """Encode what was asked, so that the question itself can go."""
        (question,) = questions
        if question.kind != TRAIN:
            return super().ask(questions)
        self.sent.append(ref(question))
        ticket = f"{question.round_idx} {question.node} {len(question.parts)}"
        self.held[ticket] = question.node, question.kind, dict(question.parts)
        self.most_open = max(self.most_open, len(self.held))
        return [ticket]

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


@pytest.mark.parametrize("algorithm", [ls.FedAvg(), ls.SpectralSharding(keep_ratio=0.5)], ids=["FedAvg", "spectral"])
def test_answers_are_summed_as_they_arrive_and_questions_are_not_kept(algorithm: Any, fit: Fit) -> None:
    for clients in (3, 12):
        line = Counting(toy_line(LitMLP).there)
        options: dict[str, Any] = {"algorithm": algorithm, "max_epochs": 2, "clients_per_round": clients, "seed": 3}
        ours = fit(seeded(LitMLP), remote(line), **options)
        assert line.most_answers <= 2  # the last one, and the next
        assert line.most_questions <= 1
        assert line.most_open > clients // 2  # they were in flight together, at least in part
        assert same_state(ours.state, fit(seeded(LitMLP), toy_data(), **options).state)


def test_no_more_clients_train_at_once_than_the_user_allows(fit: Fit) -> None:
    line = Counting(toy_line(LitMLP).there)
    options: dict[str, Any] = {"max_epochs": 2, "clients_per_round": 12, "seed": 3}
    ours = fit(seeded(LitMLP), remote(line, at_once=3), **options)
    assert line.most_open == 3
    assert same_state(ours.state, fit(seeded(LitMLP), toy_data(), **options).state)
