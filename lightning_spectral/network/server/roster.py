"""Who is there: the clients of a network, numbered in the order in which they appeared."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping

from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from lightning_spectral.errors import RecordError, RoundError
from lightning_spectral.network.messages import REFUSED, WHO, Holding, Identity, identity_of
from lightning_spectral.network.server.asking import Asking
from lightning_spectral.network.server.line import Answer, Line, Question

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
        self._refused: set[int] = set()
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

    def rename(self, names: Iterable[str]) -> None:
        """Number clients as an earlier run did; others that are there follow."""
        names = list(names)
        self.names = [*names, *(name for name in self.names if name not in names)]

    def wait_for(self, wanted: int, what: str) -> int:
        """Look who is there until enough clients are, or patience is at its end; return how many are.

        Args:
            wanted: Number of clients.
            what: What they are needed for, for the sentence that says that the server waits.
        """
        until, said = time.monotonic() + self.patience, False
        while True:
            self.look()
            count = len(self.present())
            if count >= wanted or time.monotonic() >= until:
                return count
            if not said:
                rank_zero_info(f"{what}: {count} of {wanted} clients are there; waiting at most {self.patience:g} s.")
                said = True
            time.sleep(LOOK_SECONDS)

    def look(self) -> None:
        """Look which nodes are there, and ask new ones who they are."""
        self._there = frozenset(self.line.nodes())
        known = {*self._node_of.values(), *self._refused}
        asking = Asking(self.line)
        for node in sorted(self._there - known):
            asking.ask(Question(node, WHO, seconds=ANSWER_SECONDS))
        found = {question.node: self._identity(question, answer) for question, answer in asking.arrived(wait=True)}
        identities = {node: identity for node, identity in found.items() if identity is not None}
        for node in sorted(identities, key=lambda node: _natural(identities[node].client)):
            self._welcome(node, identities[node])

    def _identity(self, question: Question, answer: Answer) -> Identity | None:
        """Who a node says it is; ``None`` if it does not answer yet, or in a way that cannot be used."""
        if answer.reason in ("late", "dropped_out"):
            return None
        try:
            if answer.reason is not None or REFUSED in answer.parts:
                raise RecordError(answer.message or answer.parts[REFUSED].decode(errors="replace"))
            return identity_of(answer.parts)
        except RecordError as error:
            self._refuse(question.node, str(error))
            return None

    def _welcome(self, node: int, identity: Identity) -> None:
        name = identity.client
        if self._node_of.get(name) in self._there and self._node_of[name] != node:
            return self._refuse(node, f"another node says that it is client {name!r}; give each a name of its own.")
        if name not in self.names and self.is_closed:
            return self._refuse(node, f"client {name!r} is new, and this run counts on the clients of its start.")
        try:
            self._check_admitted(identity)
        except ValueError as error:
            return self._refuse(node, str(error))
        if name not in self.names:
            self.names.append(name)
        self._node_of[name], self._holdings[name] = node, identity.holdings

    def check_models(self, models: Collection[str]) -> None:
        """Raise ``ValueError`` if a client has data for none of a run's models."""
        for name, holdings in self._holdings.items():
            if not holdings.keys() & set(models):
                raise ValueError(
                    f"Client {name!r} has data for {_listed(holdings)}, and the server trains {_listed(models)}; let "
                    "`client(config)` return one ClientData for an only model, or a dictionary with the models' names."
                )

    def _check_admitted(self, identity: Identity) -> None:
        for model, check in self.admits.items():
            if model in identity.holdings:
                check(identity.client, identity.holdings[model])

    def _refuse(self, node: int, why: str) -> None:
        self._refused.add(node)
        rank_zero_warn(f"Node {node} takes no part: {why}")


def _listed(models: Iterable[str]) -> str:
    """Names of models, in a message.

    Example:
        >>> _listed(["dense", "sharded"]), _listed([""])
        ("the models 'dense', 'sharded'", 'an only model')
    """
    names = [repr(name) for name in models if name]
    return f"the models {', '.join(names)}" if names else "an only model"


def _natural(name: str) -> tuple[bool, int, str]:
    """A key that sorts client 10 after client 9."""
    is_number = name.isdecimal()
    return not is_number, int(name) if is_number else 0, name


def check_enough(count: int, wanted: int, patience: float) -> None:
    """Raise ``RoundError`` if a federation cannot begin."""
    if count < wanted:
        raise RoundError(
            f"Only {count} of {wanted} clients were there after {patience:g} s; start more devices, or lower "
            "`clients_per_round`, or raise RemoteClients(patience=...)."
        )
