"""A network within the tests' process, which loses, delays, doubles and reorders messages as it is told."""

import os
import random
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from other_process import toy_data
from torch.utils.data import TensorDataset
from toy_models import LitMLP

import lightning_spectral as ls
from lightning_spectral.network import RemoteClients
from lightning_spectral.network.device import ClientData, DeviceService
from lightning_spectral.network.line import Answer, Line, Question
from lightning_spectral.network.messages import Kind
from lightning_spectral.network.roster import Roster
from lightning_spectral.network.status import FILE, SERVER

TRUSTED = ("toy_models", "other_process", "masked_heads")


@dataclass
class Node:
    """One device.

    Attributes:
        make: Makes its service, as a process that has just been started would.
        forgets: Whether its process ends after every message.
    """

    make: Callable[[], DeviceService]
    forgets: bool = False

    def answer(self, question: Question) -> dict[str, bytes]:
        """Answer in a process of its own, which lasts if it can."""
        return (self.make() if self.forgets else self._service).answer(question.kind, question.parts)

    @cached_property
    def _service(self) -> DeviceService:
        return self.make()


@dataclass
class FakeLine(Line):
    """Nodes that answer as soon as they are asked.

    Attributes:
        there: The devices, by number.
        hazards: Seed of what goes wrong; ``None`` for a line on which nothing does.
        asked: Every question, in order.
        spoil: Changes answers to questions of the kinds ``spoilt``; called with the question and the answer.
    """

    there: dict[int, Node]
    hazards: int | None = None
    asked: list[Question] = field(default_factory=list)
    spoil: Callable[[Question, dict[str, bytes]], Answer | dict[str, bytes]] = lambda question, answer: answer
    spoilt: Collection[str] = (Kind.TRAIN,)

    def __post_init__(self) -> None:
        self._chance = random.Random(self.hazards)
        self._ready: dict[str, Answer] = {}
        self._answered: list[Answer] = []

    def _happens(self, share: float) -> bool:
        return self.hazards is not None and self._chance.random() < share

    def nodes(self) -> Collection[int]:
        return list(self.there)

    def ask(self, question: Question) -> str | None:
        if question.node not in self.there or self._happens(0.2):
            return None
        self.asked.append(question)
        ticket = f"ticket {len(self.asked)}"
        answer: Any = self.there[question.node].answer(question)
        assert sum(map(len, answer.values())) <= question.most_bytes < float("inf"), "an honest answer is small enough"
        if question.kind in self.spoilt:
            answer = self.spoil(question, answer)
        self._ready[ticket] = Answer(ticket, answer) if isinstance(answer, dict) else answer
        return ticket

    def answers(self, tickets: Collection[str]) -> Iterable[Answer]:
        here = [ticket for ticket in list(tickets) if ticket in self._ready and not self._happens(0.3)]
        arrived = [self._ready.pop(ticket) for ticket in here]
        self._chance.shuffle(arrived) if self.hazards is not None else None
        again = [answer for answer in self._answered if self._happens(0.2)]
        self._answered += arrived
        return [*arrived, *again]


def toy_client_data() -> list[TensorDataset]:
    """Twelve clients' own examples: those of `toy_data`."""
    data = toy_data()
    whole: Any = data.train
    parts = map(data.partition.__getitem__, range(12))
    return [TensorDataset(*(tensor[indices] for tensor in whole.tensors)) for indices in parts]


def data_of_node(config: Mapping[str, Any]) -> ClientData:
    """What a device of the toy federation has; its process leaves its number in a folder."""
    if "folder" in config:
        (Path(config["folder"]) / str(os.getpid())).touch()
    return ClientData(toy_client_data()[int(config["client"])], batch_size=4)


def line_of(
    modules: Sequence[Mapping[str, Callable[[], Any]]],
    data: Sequence[Mapping[str, ClientData]],
    *,
    forgets: bool = False,
    accelerator: str = "cpu",
    share_errors: bool = False,
    **options: Any,
) -> FakeLine:
    """Nodes numbered from 100, in an order that is not that of their clients."""

    def node(client: int) -> Node:
        own = modules[client], data[client], str(client), TRUSTED, accelerator, share_errors
        return Node(lambda: DeviceService(*own), forgets=forgets)

    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(0)).tolist()
    return FakeLine({100 + number: node(client) for number, client in enumerate(order)}, **options)


def toy_line(
    lit: Callable[[], Any] | Mapping[str, Callable[[], Any]],
    keep_ratios: Mapping[int, float] | None = None,
    budgets: Mapping[int, float] | None = None,
    folder: Path | None = None,
    **options: Any,
) -> FakeLine:
    """The toy federation's clients, who may say their keep ratios or budgets, and may have a folder for their state."""
    lits: Mapping[str, Callable[[], Any]] = {"": lit} if callable(lit) else lit
    ratios, budgets = keep_ratios or {}, budgets or {}
    datas = [
        ClientData(
            examples,
            batch_size=4,
            labels=examples.tensors[1],
            keep_ratio=ratios.get(i),
            budget_bytes=budgets.get(i),
            state_folder=None if folder is None else str(folder / str(i)),
        )
        for i, examples in enumerate(toy_client_data())
    ]
    return line_of([lits] * 12, [dict.fromkeys(lits, data) for data in datas], **options)


def remote(line: FakeLine | Roster, **options: Any) -> Any:
    """The data module of the clients of a line, with the tests' validation set."""
    return RemoteClients(line, val=toy_data().val, **{"wait_for": 12, "patience": 0.2, **options})


def in_kit(folder: Path, nodes: Mapping[str, int]) -> Path:
    """The file for a line's status, in a kit that has enrolled the keys of nodes."""
    for name, node in nodes.items():
        (folder / name).mkdir(parents=True)
        (folder / name / "registered").write_text(str(node))
    (home := folder / SERVER / "flwr").mkdir(parents=True)
    return home / FILE


def held_out_data() -> ls.FederatedDataModule:
    """The toy data, of which each client holds a part out."""
    whole = toy_data()
    return ls.FederatedDataModule(
        whole.train, ls.IIDPartitioner(num_clients=12), val=whole.val, batch_size=4, client_val_fraction=0.3
    )


def held_out_line(lit: Callable[[], Any] = LitMLP, folder: Path | None = None, **options: Any) -> FakeLine:
    """The clients of `held_out_data`, who may have a folder for their state."""
    simulated = held_out_data()
    examples: Any = simulated.train
    parts = [
        [
            TensorDataset(*(t[part[client]] for t in examples.tensors))
            for part in (simulated.partition, simulated.held_out)
        ]
        for client in range(12)
    ]
    both = zip(parts, [None if folder is None else str(folder / str(client)) for client in range(12)], strict=True)
    datas = [{"": ClientData(train, batch_size=4, val=val, state_folder=kept)} for (train, val), kept in both]
    return line_of([{"": lit}] * 12, datas, **options)
