"""FedBuff: asynchronous rounds on simulated time, each of which is a buffer of updates."""

# Annotations are evaluated eagerly here, because jsonargparse resolves inherited ones in the file of the subclass.

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Literal, NamedTuple, get_args

import torch
from torch import Generator, Tensor, nn

from lightning_spectral.algorithms.base import Observed, Promises, Setting
from lightning_spectral.algorithms.fed_avg import DenseRound, FedAvg, FedAvgHalf
from lightning_spectral.arguments import Number, OneOf, Whole, check_fields
from lightning_spectral.participation import Sampler, UniformParticipation
from lightning_spectral.protocol.cohort import Cohort, Workers
from lightning_spectral.protocol.exchange import frozen_parameters, travelling_tensors, wide
from lightning_spectral.protocol.per_client import PerClient, assign, check_entries, check_num_entries
from lightning_spectral.protocol.records import Download, Receipt, Tensors, Upload, WorkUnit
from lightning_spectral.sums import check_summable
from lightning_spectral.sums.exact_mean import largest_magnitudes

Law = Literal["fixed", "half-normal", "exponential"]
Weighting = Literal["inverse_sqrt", "equal"]
DRAWS: Mapping[Law, Callable[[int, Generator], Tensor]] = {  # numbers of mean 1, float64
    "fixed": lambda n, g: torch.ones(n, dtype=torch.float64),
    "half-normal": lambda n, g: torch.randn(n, dtype=torch.float64, generator=g).abs() * math.sqrt(math.pi / 2),
    "exponential": lambda n, g: torch.empty(n, dtype=torch.float64).exponential_(generator=g),
}


class Flight(NamedTuple):
    """A client in training: when it will finish, in simulated time, who it is, and from which version it started."""

    finish: float
    client: int
    version: int


class Buffer(NamedTuple):
    """How the buffer of a round fills.

    Attributes:
        draw: What it was drawn from.
        versions: From which version each of its clients started, by id, in the order of arrival.
        flights: Who still trains when it is full, by when they finish.
        now, seconds: When it is full, and how long that took.
        abandoned: Number of clients whose version was too old.
    """

    draw: tuple[int, int, int]
    versions: Mapping[int, int]
    flights: Sequence[Flight]
    now: float
    seconds: float
    abandoned: int


class Flights(nn.Module):
    """Who trains at a moment of simulated time, and the last versions of the model.

    A version is the server's tensors as a round begins. The buffers that are called as these are, with colons for dots,
    have version v in the slot ``v % (max_staleness + 1)``.

    Attributes:
        queue: float64, shape ``(1 + concurrency, 3)``, always on the CPU: the time and the number of the last version,
            then each `Flight`, by when it finishes, then rows of -1.
        buffer: How the last buffer filled; ``None`` before the first.
    """

    queue: Tensor

    def __init__(self, choice: "FedBuff", tensors: Tensors, seed: int) -> None:
        super().__init__()
        self.choice, self._seed, self.slots = choice, seed, choice.max_staleness + 1
        for name, tensor in tensors.items():
            self.register_buffer(name.replace(".", ":"), tensor.new_zeros((self.slots, *tensor.shape)))
        self.register_buffer("queue", torch.empty(1 + choice.concurrency, 3, dtype=torch.float64))
        self.reset()

    def reset(self) -> None:
        """Begin at time 0, before the first version, when nobody trains."""
        self.buffer: Buffer | None = None
        self._write(0.0, -1, [])

    def _load_from_state_dict(self, *given: Any) -> None:
        super()._load_from_state_dict(*given)
        self.buffer = None  # it was that of another queue

    def _write(self, now: float, version: int, flights: Sequence[Flight]) -> None:
        rows = torch.tensor([(now, -1, version), *flights], dtype=torch.float64)
        self.queue.fill_(-1)[: len(rows)] = rows

    def _read(self) -> tuple[float, int, list[Flight]]:
        (now, _, version), *rows = self.queue.tolist()
        return now, int(version), [Flight(end, int(who), int(begun)) for end, who, begun in rows if begun >= 0]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Flights":
        """Move versions, or change their type, but not the queue's."""
        queue = self._buffers.pop("queue")
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.register_buffer("queue", queue)
        return self

    @property
    def version(self) -> int:
        """Number of the last version; that of the first is 0."""
        return int(self.queue[0, 2])

    def cohort(self, size: UniformParticipation, num_clients: int, generator: Generator) -> Tensor:
        """The clients whose updates fill the next buffer, in the order of arrival, int64, shape ``(k,)``.

        The same generator gives the same ones until there is another: checkpoints ask again after the server's step.
        """
        draw = generator.initial_seed(), size.size(num_clients), num_clients
        if self.buffer is None or self.buffer.draw != draw:
            self.buffer = self._fill(draw, generator)
        return torch.tensor(list(self.buffer.versions))

    def _fill(self, draw: tuple[int, int, int], generator: Generator) -> Buffer:
        (_, size, num_clients), choice = draw, self.choice
        if choice.concurrency > num_clients:
            raise ValueError(
                f"`concurrency` must be at most num_clients={num_clients}, got {choice.concurrency}; lower it."
            )
        check_num_entries("durations", choice.durations, num_clients)
        means = assign(choice.durations, num_clients, self._seed, "durations")
        begun, version, before = self._read()
        flights = [flight for flight in before if version - flight.version < self.slots]
        versions, now, abandoned = dict[int, int](), begun, len(before) - len(flights)
        while len(versions) < size:
            if not flights or flights[0].finish > now:  # all who finish at this moment have arrived
                busy = versions.keys() | {flight.client for flight in flights}
                if wanted := min(choice.concurrency - len(flights), num_clients - len(busy)):
                    # distinct clients in random order, without those who are busy: a uniform draw from all others
                    order = UniformParticipation(wanted + len(busy)).cohort(num_clients, generator).tolist()
                    idle = [client for client in order if client not in busy][:wanted]
                    drawn = DRAWS[choice.law](wanted, generator).tolist()
                    flights += [Flight(now + means.of(c) * x, c, version) for c, x in zip(idle, drawn, strict=True)]
                    flights.sort(key=lambda flight: flight.finish)  # of those who finish together, the first to start
            now, client, started = flights.pop(0)
            versions[client] = started
        return Buffer(draw, versions, flights, now, now - begun, abandoned)

    def advance(self) -> None:
        """Begin a new version; time is when the last buffer was full."""
        now, version, flights = self._read()
        if self.buffer is not None:
            now, flights = self.buffer.now, list(self.buffer.flights)
        self._write(now, version + 1, flights)

    @torch.no_grad()
    def keep(self, tensors: Tensors) -> None:
        """Keep the last version, as clients are sent it, in place of the oldest."""
        for name, kept in self.sent(self.version, tensors).items():
            kept.copy_(tensors[name])

    def sent(self, version: int, like: Tensors) -> dict[str, Tensor]:
        """Those of some tensors that a version has, by name: views."""
        slots = {name: self._buffers.get(name.replace(".", ":")) for name in like}
        return {name: slot[version % self.slots] for name, slot in slots.items() if slot is not None}


class BufferRound(DenseRound):
    """One open round: a buffer, whose clients started from the current ``version``, or one that is ``stale``."""

    def __init__(self, half: "FedBuffHalf", cohort: Cohort) -> None:
        super().__init__(half, cohort)
        self.choice, self.buffer, self.version = half.algorithm, half.flights.buffer, half.flights.version
        units = [unit for units in cohort.groups.values() for unit in units]
        apart = half.frozen_tensors()  # and what stays with clients, of which all are sent the same
        travelling = {name: tensor for name, tensor in self.tensors.items() if name not in apart}
        half.flights.keep(travelling)  # only now: a callback may have changed it since the server's step
        old = {version for unit in units if (version := self.version - self.staleness(unit)) < self.version}
        self.stale = {version: half.flights.sent(version, travelling) for version in old}
        self.trained = {name for name, p in half.server.named_parameters() if p.requires_grad}
        self._mean_staleness = math.fsum(map(self.staleness, units)) / max(len(units), 1)

    def staleness(self, unit: WorkUnit) -> int:
        """Number of server steps since the unit's client was sent its version."""
        versions = {} if self.buffer is None else self.buffer.versions
        return self.version - versions.get(unit.client_id, self.version)

    def send(self, unit: WorkUnit) -> tuple[Download, Receipt]:
        download, receipt = super().send(unit)
        old = self.stale.get(self.version - self.staleness(unit), {})
        return replace(download, tensors={**download.tensors, **old}), receipt

    @torch.no_grad()
    def add(self, receipt: Receipt, upload: Upload) -> None:
        if not (staleness := self.staleness(receipt.unit)):
            super().add(receipt, upload)
            return
        old, after = self.stale[self.version - staleness], upload.tensors
        # others, such as running variances, move towards the client's value: a difference could make them negative
        before = {name: old[name] if name in self.trained else tensor for name, tensor in self.mean.before.items()}
        weight = 1.0 if self.choice.staleness_weights == "equal" else 1.0 / math.sqrt(1.0 + staleness)
        change = {name: (wide(after[name]) - wide(tensor)).mul_(weight) for name, tensor in before.items()}
        largest = largest_magnitudes(change)
        check_summable(*largest.values())
        self.mean.add_change(change, receipt.unit.coefficient, largest)

    def observed(self) -> Observed:
        """Mean staleness of the clients, simulated duration, and how many clients were abandoned before it."""
        if self.buffer is None:
            return Observed()
        figures = {"virtual_seconds": self.buffer.seconds, "clients_abandoned": float(self.buffer.abandoned)}
        return Observed({"staleness": self._mean_staleness, **figures})


class FedBuffHalf(FedAvgHalf):
    """FedBuff, bound to a module."""

    algorithm: "FedBuff"

    @property
    def flights(self) -> Flights:
        """What lasts."""
        assert isinstance(self.state, Flights), "made by `new_state`"
        return self.state

    def initialize(self, workers: Workers) -> str:
        self.flights.reset()
        return super().initialize(workers)

    def settle(self) -> None:
        self.flights.advance()


@dataclass(frozen=True)
class FedBuff(FedAvg):
    r"""Asynchronous federated averaging: the server steps whenever a buffer has K updates, and waits for nobody.

    At any time, ``concurrency`` clients train. Once one has sent its update, another one is sent the server's current
    version, drawn uniformly from those that neither train nor are in the buffer. A round is one server step, and K is
    the federation's ``clients_per_round``. An update :math:`\Delta_i` is the change from the version that the client
    was sent, :math:`\tau_i` steps ago, and the server's optimizer gets

    .. math:: \sum_i d_i s(\tau_i) \Delta_i \Big/ \sum_i d_i, \qquad s(\tau) = 1 / \sqrt{1 + \tau},

    with the clients' numbers of examples d: a stale update is shortened, and the others do not count for more. Buffers
    move towards the clients' values, s of the way: by differences, variances could become negative. With equal
    durations, ``law="fixed"``, and a concurrency of K this is `FedAvg`, bit for bit.

    Time is simulated: who arrives when follows from durations and draws alone, so a round knows its clients when it
    opens, and each of them trains from its own version. A `VirtualClock` is refused: it lets all clients of a round
    start together.

    Args:
        concurrency: Number of clients that train at any time, at least 1.
        durations: Mean duration of a client's turn, in seconds or any other unit: one for all clients; ``{duration:
            share of clients}``; or one per client.
        law: Distribution of durations: ``"fixed"``; ``"half-normal"``, as in the paper; or ``"exponential"``.
        staleness_weights: ``"inverse_sqrt"`` for s above, or ``"equal"`` for s = 1.
        max_staleness: Largest staleness of an update, at least 0. When a round opens, clients whose versions are older
            are abandoned, and others are asked in their place. This favours fast clients, so
            ``fl/clients_abandoned`` should be small; the mean staleness is about ``concurrency / clients_per_round``.

    Raises:
        ValueError: If an argument is out of range; when a fit starts, if there are fewer clients than ``concurrency``
            or other than ``durations`` lists, if a sampler draws them, or if there is a clock.

    Note:
        The server keeps ``max_staleness + 1`` versions of all but frozen parameters, on its device and in checkpoints.
        A fit that is not resumed begins with nobody in training. Clients that finish together all arrive before others
        are drawn; one that drops out leaves a smaller buffer. Local learning rates are those of the round in which an
        update arrives. Over a network time is simulated too: real devices of one buffer wait for each other.

    Reference:
        Nguyen et al. (2022), Federated Learning with Buffered Asynchronous Aggregation, Algorithm 1.

    Example:
        >>> flights = FedBuff(concurrency=3, durations=[1.0, 1.0, 5.0], law="fixed").new_state(nn.Linear(1, 1), seed=0)
        >>> pair, generator = UniformParticipation(2), torch.Generator()
        >>> sorted(flights.cohort(pair, num_clients=3, generator=generator).tolist())  # the two that are fast
        [0, 1]
    """

    round: ClassVar[type[DenseRound]] = BufferRound
    half: ClassVar[type[FedAvgHalf]] = FedBuffHalf
    promises: ClassVar[Promises] = Promises(
        new_values=True, values_alone=True, same_tensors=True, parts_stay=True, any_steps=True, draws_cohorts=True
    )

    concurrency: int
    durations: PerClient[float] = 1.0
    law: Law = "half-normal"
    staleness_weights: Weighting = "inverse_sqrt"
    max_staleness: int = 10

    def __post_init__(self) -> None:
        check_fields(
            self,
            concurrency=Whole(at_least=1),
            durations=partial(check_entries, rule=Number(above=0)),
            law=OneOf(get_args(Law)),
            staleness_weights=OneOf(get_args(Weighting)),
            max_staleness=Whole(at_least=0),
        )

    def check(self, plan: Setting) -> None:
        if isinstance(sampler := getattr(plan, "participation", None), Sampler):
            raise ValueError(
                "With FedBuff, a round's clients are those whose updates fill the buffer, but participation="
                f"{sampler!r} would draw others; leave it out, and set `clients_per_round`, the size of the buffer."
            )
        if getattr(plan, "clock", None) is not None:
            raise ValueError(
                "FedBuff simulates time itself, and with `clock` all clients of a round start together; leave it out, "
                "and give FedBuff(durations=...)."
            )

    def new_state(self, server: nn.Module, seed: int) -> Flights:
        return Flights(self, travelling_tensors(server, without=frozen_parameters(server)), seed)
