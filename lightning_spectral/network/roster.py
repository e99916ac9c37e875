"""Who is there: the clients of a network, and what the server knows of them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor

from lightning_spectral.errors import RecordError
from lightning_spectral.network.gate import SMALL, read_identity
from lightning_spectral.network.line import SHORTEST, Asking, Line, Question
from lightning_spectral.network.messages import Holding, Identity, Kind
from lightning_spectral.network.status import Seen, enrolled_beside, write_status

ANSWER_SECONDS = 120.0  # at least, for saying who one is, which includes the import of torch on the device
REPORT_SECONDS = 2.0  # between two writings of the status
LOOK_SECONDS = 0.5  # between two looks at who is there
SHORTEST_PAUSE, LONGEST_PAUSE = 30.0, 3600.0  # seconds until a node that was refused is asked again


class Roster:
    """The clients of a network, by name.

    A client keeps its number and its node from its first appearance on, also over checkpoints; a name for which a kit
    has enrolled a key is that of its node from the beginning. Clients that appear together are numbered by their names,
    of which whole numbers come first, in numerical order. A node that comes back is asked anew what it has, and one
    that was refused is asked again after a pause, which grows.

    Args:
        line: The network.
        patience: Seconds to wait for enough clients, and if they are more than 120, for each to say who it is.
        trust_names: Whether a client for whose name no key is enrolled may come back as another node.

    Attributes:
        names: The clients' names, by number.
        is_closed: Whether new clients have to wait for the next run.
        admits: For each model of a run, raises ``ValueError`` if a client cannot train it; called with its name and its
            holding.
    """

    def __init__(self, line: Line, patience: float, trust_names: bool = False) -> None:
        self.line, self.patience, self.trust_names = line, patience, trust_names
        self.names: list[str] = []
        self._holdings: dict[str, Mapping[str, Holding]] = {}
        self._node_of: dict[str, int] = {}
        self._refused: dict[int, tuple[str, float, float]] = {}  # why, for how many seconds, and until when
        self.is_closed = False
        self.admits: dict[str, Callable[[str, Holding], object]] = {}
        self._known: frozenset[int] = frozenset()  # nodes that are there and have said who they are
        self._missed: set[str] = set()  # clients that it has waited for in vain since they were last there
        self._asking, self._heard = Asking(line), dict[int, Identity]()
        self._seen: dict[str, Seen] = {}
        self._reported = -math.inf  # when the status was last written

    def node_of(self, client_id: int, model: str | None = None) -> int | None:
        """The node of a client; ``None`` if it is not there, or has no examples for the model, if one is given."""
        is_able = model is None or self.holding(client_id, model).num_examples > 0
        node = self._node_of.get(self.names[client_id])
        return node if is_able and node in self._known else None

    def seen_of(self, client_id: int) -> Seen:
        """What this run has seen of a client."""
        name = self.names[client_id]
        return self._seen.setdefault(name, Seen(name, self._node_of.get(name, 0)))

    def report(self, *, now: bool = False) -> None:
        """Write what the run has seen of its clients where the line says, not more often than every few seconds."""
        if self.line.status is None or not (now or time.monotonic() > self._reported + REPORT_SECONDS):
            return
        self._reported = time.monotonic()
        try:
            rejected = {node: why for node, (why, _, _) in self._refused.items()}
            write_status(self.line.status, map(self.seen_of, range(len(self.names))), rejected)
        except OSError as error:
            rank_zero_warn(f"{self.line.status} cannot be written: {error.strerror}; `network status` knows less.")

    def present(self) -> list[int]:
        """The clients that were there at the last look."""
        return [client_id for client_id in range(len(self.names)) if self.node_of(client_id) is not None]

    def num_expected(self) -> int:
        """Number of clients, without those that are gone and have been waited for once; at least one."""
        return max(1, len(self.names) - len(self._missed))  # or a run would end in no time while the network is down

    def holding(self, client_id: int, model: str) -> Holding:
        """What a client has for a model; nothing if it has not said so."""
        return self._holdings.get(self.names[client_id], {}).get(model, Holding(0, 0))

    def holdings(self, model: str) -> list[Holding]:
        """What each client has for a model, by number."""
        return [self.holding(client_id, model) for client_id in range(len(self.names))]

    def state_dict(self) -> dict[str, Any]:
        """The clients' names, by number, and their nodes, by name."""
        return {"names": list(self.names), "nodes": dict(self._node_of)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Number clients as an earlier run did, and leave names to the nodes that had them; new clients follow."""
        names, nodes = state_dict["names"], {} if self.trust_names else dict(state_dict["nodes"])
        self.names = [*names, *(name for name in self.names if name not in names)]
        for name, node in self._node_of.items() - nodes.items():
            if name in nodes or node in nodes.values():  # which is another's
                self._known -= {node}
            else:
                nodes[name] = node
        self._node_of = nodes

    def wait_for(self, wanted: int, what: str, *, everybody: bool = False) -> int:
        """Look for clients until enough are there or patience has run out; return how many there are.

        The message that the server waits says ``what`` they are needed for. With ``everybody``, all nodes that are
        there are waited for, however long they take, so that they are numbered together.
        """
        until, announced, pause = time.monotonic() + self.patience, False, SHORTEST
        while True:
            self.look(everybody)
            count, is_over = len(self.present()), time.monotonic() >= until
            if (count >= wanted or is_over) and not (everybody and self._asking.waiting):
                if count < wanted:
                    self._missed.update(name for name in self.names if self._node_of.get(name) not in self._known)
                self.report(now=True)
                return count
            if not announced and count < wanted:
                rank_zero_info(f"{what}: {count} of {wanted} clients are there; waiting at most {self.patience:g} s.")
                announced = True
            time.sleep(pause)
            pause = min(2.0 * pause, LOOK_SECONDS)

    def look(self, together: bool = False) -> None:
        """Look which nodes are there, ask new ones who they are, and admit those that have answered, or all at once."""
        there = frozenset(self.line.nodes())
        self._known &= there
        asked, now = {question.node for question, _ in self._asking.waiting.values()}, time.monotonic()
        paused = {node for node, (_, _, until) in self._refused.items() if now < until}
        for node in sorted(there - self._known - self._heard.keys() - asked - paused):
            self._asking.ask(Question(node, Kind.WHO, seconds=max(ANSWER_SECONDS, self.patience), most_bytes=SMALL))
        for question, answer in self._asking.look():
            if answer.reason in ("late", "dropped_out"):  # it may answer the next time
                continue
            try:
                self._heard[question.node] = read_identity(answer)
            except RecordError as error:
                self._refuse(question.node, error)
        if together and self._asking.waiting:
            return
        heard, self._heard = self._heard, {}
        enrolled = enrolled_beside(self.line.status) if heard else {}
        for node, identity in sorted(heard.items(), key=lambda item: (_natural(item[1].client), item[0])):
            try:
                self._admit(node, identity, enrolled)
            except ValueError as error:
                self._refuse(node, error)

    def _admit(self, node: int, identity: Identity, enrolled: Mapping[int, str]) -> None:
        """Give a client a number; raise ``ValueError`` if it cannot have one."""
        name, own_name = identity.client, enrolled.get(node)
        if own_name != name and (own_name is not None or name in enrolled.values()):
            key = "another key is enrolled for that name" if own_name is None else f"its key is that of {own_name!r}"
            raise ValueError(f"it says that it is client {name!r}, and {key}; give each device a key of its own.")
        first, former = self._node_of.get(name, node), {known: name for name, known in self._node_of.items()}.get(node)
        if first != node and first in self._known:
            raise ValueError(f"another node says that it is client {name!r}; give each a name of its own.")
        if not (self.trust_names or own_name == name) and (first != node or former not in (None, name)):
            is_other = f"client {name!r} was node {first}" if first != node else f"it was client {former!r}"
            raise ValueError(
                f"{is_other} when it first appeared in this run, and names stay with keys: give each device its own. "
                "Without keys, a start gives nodes new numbers: server_app(..., trust_names=True) believes their names."
            )
        if name not in self.names and self.is_closed:
            raise ValueError(f"client {name!r} is new, and this run counts on the clients of its start.")
        own = [model for model, holding in identity.holdings.items() if holding.num_examples > 0]
        if self.admits and self.admits.keys().isdisjoint(own):
            has = f"examples for {_listed(own)}" if own else "no examples"
            raise ValueError(
                f"client {name!r} has {has}, and the server trains {_listed(self.admits)}; let `client(config)` return "
                "one ClientData for a single model, or a dictionary with the models' names, and none without examples."
            )
        for model, check in self.admits.items():
            if model in own:
                check(name, identity.holdings[model])
        if former is not None:
            del self._node_of[former]
        if name not in self.names:
            self.names.append(name)
        self._node_of[name], self._holdings[name] = node, identity.holdings
        self.seen_of(self.names.index(name)).node = node
        self._known |= {node}
        self._missed.discard(name)
        self._refused.pop(node, None)

    def _refuse(self, node: int, error: ValueError) -> None:
        """Leave a node out for a time; say so unless it was said before."""
        last, pause, _ = self._refused.get(node, ("", SHORTEST_PAUSE / 2.0, 0.0))
        message, pause = str(error), min(2.0 * pause, LONGEST_PAUSE)
        self._refused[node] = message, pause, time.monotonic() + pause
        if message != last:
            rank_zero_warn(f"Node {node} was rejected: {message} (The next try is in {pause:g} s.)")

    def dismiss(self, client_id: int, why: ValueError) -> None:
        """Leave a client out that cannot take part as it is; it keeps its number."""
        name = self.names[client_id]
        found = {model: replace(own, keep_ratio=None, budget_bytes=None) for model, own in self._holdings[name].items()}
        self._holdings[name], node = found, self._node_of[name]
        self._known -= {node}
        self._missed.add(name)
        self._refuse(node, why)


def _listed(models: Iterable[str]) -> str:
    """Names of models, in a message."""
    names = [repr(name) for name in models if name]
    return f"the models {', '.join(names)}" if names else "a single model"


def _natural(name: str) -> tuple[bool, int, str]:
    """A key that sorts client 10 after client 9."""
    is_number = name.isdecimal()
    return not is_number, int(name) if is_number else 0, name


def with_max_share(sizes: Tensor, max_share: float) -> Tensor:
    """Limit sizes so that none is more than a share of their sum.

    The largest sizes become one number c, with c equal to the share of the sum of what results, rounded down. Sizes of
    zero remain, and so do all if only one is positive. Of few sizes, each may be twice as much as if all were equal, up
    to half of the sum.

    Args:
        sizes: Non-negative, int64, shape ``(n,)``.
        max_share: The share, in (0, 1].

    Example:
        >>> with_max_share(torch.tensor([10**9, 30, 0, 10]), 0.25), with_max_share(torch.tensor([50, 40, 10]), 0.5)
        (tensor([40, 30,  0, 10]), tensor([50, 40, 10]))
    """
    ordered = sizes[sizes > 0].sort(descending=True).values.double()
    if len(ordered) < 2:
        return sizes
    max_share = max(max_share, min(0.5, 2.0 / len(ordered)))
    capped = torch.arange(len(ordered), dtype=torch.float64)  # how many are
    others = ordered.flip(0).cumsum(0).flip(0)
    caps = max_share * others / (1.0 - max_share * capped).clamp(min=1e-9)
    fits = (max_share * capped < 1.0) & (ordered <= caps)  # the largest of the others is below the cap
    cap = caps[fits][0] if fits.any() else ordered[-1]
    return sizes.clamp(max=math.floor(float(cap) + 1e-9 * float(cap)))
