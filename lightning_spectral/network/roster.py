"""Who is there: the clients of a network, and what the server knows of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cached_property

import torch
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor

from lightning_spectral.errors import RecordError
from lightning_spectral.network.gate import read_identity
from lightning_spectral.network.line import Asking, Line, Question
from lightning_spectral.network.messages import WHO, Holding, Identity
from lightning_spectral.protocol.per_client import Assigned
from lightning_spectral.server.cohorts import ClientDirectory

ANSWER_SECONDS = 120.0  # for saying who one is, which includes the import of torch on the device
LOOK_SECONDS = 0.5  # between two looks at who is there


class Roster:
    """The clients of a network, by name.

    A client keeps its number from its first appearance on, also over checkpoints, wherever its device is. Those that
    appear together are numbered by their names, of which whole numbers come first, in numerical order.

    Args:
        line: The network.
        patience: Seconds to wait for enough clients.

    Attributes:
        names: The clients' names, by number.
        is_closed: Whether new clients have to wait for the next run.
        admits: For each model of a run that has begun, raises ``ValueError`` if a client cannot take part; called with
            its name and what it has.
    """

    def __init__(self, line: Line, patience: float) -> None:
        self.line, self.patience = line, patience
        self.names: list[str] = []
        self._holdings: dict[str, Mapping[str, Holding]] = {}
        self._node_of: dict[str, int] = {}
        self._rejected: set[int] = set()
        self.is_closed = False
        self.admits: dict[str, Callable[[str, Holding], object]] = {}
        self._there: Collection[int] = ()

    def node_of(self, client_id: int) -> int | None:
        """The node of a client; ``None`` if it is not there."""
        node = self._node_of.get(self.names[client_id])
        return node if node in self._there else None

    def present(self) -> list[int]:
        """The clients that were there at the last look."""
        return [client_id for client_id in range(len(self.names)) if self.node_of(client_id) is not None]

    def holding(self, client_id: int, model: str) -> Holding:
        """What a client has for a model; nothing if it has not said so."""
        return self._holdings.get(self.names[client_id], {}).get(model, Holding(0, 0))

    def holdings(self, model: str) -> list[Holding]:
        """What each client has for a model, by number."""
        return [self.holding(client_id, model) for client_id in range(len(self.names))]

    def rename(self, names: Sequence[str]) -> None:
        """Number clients as an earlier run did; others that are there follow."""
        self.names = [*names, *(name for name in self.names if name not in names)]

    def wait_for(self, wanted: int, what: str) -> int:
        """Look who is there until enough clients are, or patience has run out; return how many are.

        Args:
            wanted: Number of clients.
            what: What they are needed for, for the message that the server waits.
        """
        until, announced = time.monotonic() + self.patience, False
        while True:
            self.look()
            count = len(self.present())
            if count >= wanted or time.monotonic() >= until:
                return count
            if not announced:
                rank_zero_info(f"{what}: {count} of {wanted} clients are there; waiting at most {self.patience:g} s.")
                announced = True
            time.sleep(LOOK_SECONDS)

    def look(self) -> None:
        """Look which nodes are there, and ask new ones who they are."""
        self._there = frozenset(self.line.nodes())
        asking = Asking(self.line)
        for node in sorted(self._there - {*self._node_of.values(), *self._rejected}):
            asking.ask(Question(node, WHO, seconds=ANSWER_SECONDS))
        identities = dict[int, Identity]()
        for question, answer in asking.arrived(wait=True):
            if answer.reason in ("late", "dropped_out"):  # it may answer the next time
                continue
            try:
                identities[question.node] = read_identity(answer)
            except RecordError as error:
                self._reject(question.node, error)
        for node, identity in sorted(identities.items(), key=lambda item: (_natural(item[1].client), item[0])):
            try:
                self._admit(node, identity)
            except ValueError as error:
                self._reject(node, error)

    def _admit(self, node: int, identity: Identity) -> None:
        """Give a client a number; raise ``ValueError`` if it cannot have one."""
        name = identity.client
        if self._node_of.get(name) in self._there and self._node_of[name] != node:
            raise ValueError(f"another node says that it is client {name!r}; give each a name of its own.")
        if name not in self.names and self.is_closed:
            raise ValueError(f"client {name!r} is new, and this run counts on the clients of its start.")
        for model, check in self.admits.items():
            if model in identity.holdings:
                check(name, identity.holdings[model])
        if name not in self.names:
            self.names.append(name)
        self._node_of[name], self._holdings[name] = node, identity.holdings

    def _reject(self, node: int, error: ValueError) -> None:
        self._rejected.add(node)
        rank_zero_warn(f"Node {node} was rejected: {error}")

    def check_models(self, models: Collection[str]) -> None:
        """Raise ``ValueError`` if a client has data for none of a run's models."""
        for name, holdings in self._holdings.items():
            if not holdings.keys() & set(models):
                raise ValueError(
                    f"Client {name!r} has data for {_listed(holdings)}, and the server trains {_listed(models)}; let "
                    "`client(config)` return one ClientData for a single model, or a dictionary with the models' names."
                )


def _listed(models: Iterable[str]) -> str:
    """Names of models, in a message.

    Example:
        >>> _listed(["dense", "sharded"]), _listed([""])
        ("the models 'dense', 'sharded'", 'a single model')
    """
    names = [repr(name) for name in models if name]
    return f"the models {', '.join(names)}" if names else "a single model"


def _natural(name: str) -> tuple[bool, int, str]:
    """A key that sorts client 10 after client 9."""
    is_number = name.isdecimal()
    return not is_number, int(name) if is_number else 0, name


class RemoteDirectory(ClientDirectory):
    """What the server knows of clients elsewhere: what they said of themselves, as it is now.

    Args:
        roster: Who is there.
        model: The model's name; empty if there is only one.
        capacities: Keep ratios as the algorithm assigns them to the clients of the start.
        available: Whether each client can train this model; ``None`` if all can.
        begin_round: Called when a round begins, before its cohort is drawn; perhaps several times.
        bytes_of: Maps keep ratios to the bytes that a client gets and sends in a round.

    Raises:
        ValueError: If a client says a keep ratio that the algorithm does not have, or a budget that no sub-model fits.
    """

    roster: Roster
    model: str
    bytes_of: Callable[[Sequence[float]], Mapping[float, int]]

    def __init__(
        self,
        roster: Roster,
        model: str,
        capacities: Assigned[float],
        available: Tensor | None,
        begin_round: Callable[[int], None],
        bytes_of: Callable[[Sequence[float]], Mapping[float, int]],
    ) -> None:
        vars(self).update(roster=roster, model=model, capacities=capacities, available=available)
        vars(self).update(begin_round=begin_round, bytes_of=bytes_of)
        for client_id in range(len(roster.names)):
            self.capacity_of(client_id)
        roster.admits[model] = self._capacity

    @property
    def sizes(self) -> Tensor:
        """Number of training examples of each client, int64, shape ``(num_clients,)``."""
        return torch.tensor([holding.num_examples for holding in self.roster.holdings(self.model)])

    @cached_property
    def num_examples(self) -> int:
        """Number of training examples of the clients of the start, from which fixed shares are computed."""
        return int((self.sizes if self.available is None else self.sizes[self.available]).sum())

    def epoch_of(self, client_id: int) -> int:
        """Number of examples that a client trains on in a local epoch."""
        return self.roster.holding(client_id, self.model).examples_per_epoch

    def capacity_of(self, client_id: int) -> float:
        """Keep ratio of a client: what it said, or what its budget allows, or else what the algorithm assigned."""
        return self._capacity(self.roster.names[client_id], self.roster.holding(client_id, self.model))

    def _capacity(self, name: str, holding: Holding) -> float:
        said, values = holding.keep_ratio, self.capacities.values
        if (budget := holding.budget_bytes) is not None:
            if fitting := [keep_ratio for keep_ratio, needed in self._needed.items() if needed <= budget]:
                return max(fitting)
            raise ValueError(
                f"Client {name!r} says `budget_bytes={budget:,.0f}`, and the smallest sub-model takes "
                f"{min(self._needed.values()):,} bytes a round; raise its budget, or let the algorithm cut more."
            )
        if said is None and name in self._assigned:
            return float(self._assigned[name])
        if said is None and len(values) == 1:
            return float(values[0])
        if said not in values:
            given = "no keep ratio" if said is None else f"a keep ratio of {said}"
            raise ValueError(
                f"Client {name!r} says {given}, and the algorithm has {', '.join(map(str, values))}; write one of "
                "them on the device, ClientData(keep_ratio=...), or give the algorithm its own."
            )
        return float(said)

    @cached_property
    def _needed(self) -> Mapping[float, int]:
        return self.bytes_of(self.capacities.values)

    @cached_property
    def _assigned(self) -> Mapping[str, float]:
        """Keep ratios of the clients of the start, by name; a client keeps its number, and others come later."""
        return {name: self.capacities.of(i) for i, name in enumerate(self.roster.names[: len(self.capacities)])}
