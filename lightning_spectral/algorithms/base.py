"""The contract of an algorithm: a choice is bound to the server's module, opens rounds, and talks to devices."""

# Annotations are evaluated eagerly here, because jsonargparse resolves inherited ones in the file of the subclass.

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from types import MappingProxyType
from typing import Any, ClassVar, TypeAlias

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_spectral.algorithms.capacities import Capacities
from lightning_spectral.algorithms.term_draws import TermDraws
from lightning_spectral.client.device import ClientSide
from lightning_spectral.errors import refuse_moved
from lightning_spectral.nn.cost import CostsBesides
from lightning_spectral.protocol.buffer_rules import NO_RULES, BufferRules, Rules, buffer_rules
from lightning_spectral.protocol.cohort import Cohort, Workers
from lightning_spectral.protocol.exchange import frozen_parameters, select_tensors
from lightning_spectral.protocol.records import Download, Receipt, RoundSummary, Upload, WorkUnit
from lightning_spectral.sums import RunningMean

# Methods of `ClientSide`, which a choice or a server half would define in vain.
DEVICE_METHODS = ("take_form", "load", "stand_ins", "collect", "keep", "own_model")

Names: TypeAlias = Collection[str]
Decisions: TypeAlias = Mapping[str, Any] | None  # of the half of a run that is resumed, `ServerHalf.decisions`


@dataclass(frozen=True)
class Promises:
    """What the rest of a federation may rely on, of one class and not of its subclasses: these say it themselves.

    Attributes:
        new_values: What devices send back are new values of the tensors that they were sent.
        values_alone: They send back nothing but these: no losses, and no figures of their turn.
        same_tensors: A tensor means the same in every round and to every client, so devices may send parts later.
        one_sum: Its rounds need nothing of single clients but the sum of changes of whole tensors, one `MeanChange`.
        noise_hides: Noise on `Round.sums` hides what a client has uploaded: they are `MeanChange` objects, nothing else
            that a round releases comes from uploads, clients hold the same terms, and a client is sent the same
            whoever else takes part.
        parts_stay: Any parameters and buffers may stay with clients.
        any_steps: A client's steps may train what is not sent back.
        clients_may_join: Neither its state nor its weights depend on who the clients are: others can join a run.
        expected_updates: Its rounds define `Round.expected_update`.
        steps_without_clients: The server takes a step even in a round without clients, from what it keeps of them.
        draws_networks: The server's weights are the mean of random ones: ``state.network(generator)`` returns by name
            those that a generator draws.
        draws_cohorts: It decides who takes part unless a sampler does: ``state.cohort(participation, num_clients,
            generator)`` returns their ids.
        remedies: For promises that another choice of the class could keep, how to write it, without a full stop.
    """

    new_values: bool = False
    values_alone: bool = False
    same_tensors: bool = False
    one_sum: bool = False
    noise_hides: bool = False
    parts_stay: bool = False
    any_steps: bool = False
    clients_may_join: bool = False
    expected_updates: bool = False
    steps_without_clients: bool = False
    draws_networks: bool = False
    draws_cohorts: bool = False
    remedies: Mapping[str, str] = field(default_factory=dict)


NO_PROMISES = Promises()


@dataclass(frozen=True, eq=False)
class Setting:
    """What an algorithm is to train, and with what, as far as it is known.

    Attributes:
        module: The user's module.
        buffers: The user's rules of buffers, by patterns of their names.
        callbacks: Those of the Trainer; empty before there is one.
        optimizers: The user's; empty before they are made.
        server_optimizer: The server's; ``None`` before it is made.
    """

    module: nn.Module
    buffers: Rules = field(default_factory=dict, kw_only=True)
    callbacks: Sequence[Any] = field(default=(), kw_only=True)
    optimizers: Sequence[Optimizer] = field(default=(), kw_only=True)
    server_optimizer: Optimizer | None = field(default=None, kw_only=True)

    @property
    def stays(self) -> frozenset[str]:
        """Names of the parameters and buffers that stay with clients."""
        return frozenset()


@dataclass(frozen=True, eq=False)
class Known:
    """What is known when an algorithm is bound to a module, besides the module.

    Attributes:
        rules: What becomes of buffers, and which tensors stay with clients; ``None`` for what a federation does whose
            user says nothing about either.
        untrained: Names of parameters that need a gradient, but no optimizer of the user steps; they must not change.
        decisions: For a resumed run, what its half had decided (`ServerHalf.decisions`): it stays decided.
    """

    rules: BufferRules | None = None
    untrained: Names = ()
    decisions: Decisions = None


UNKNOWN = Known()
PLACES: Mapping[str, str] = MappingProxyType(  # of arguments that belong in a `FederatedModule`
    {
        "buffers": 'buffers={"*.queue": "server"}',
        "personal": 'filters=[Personal(["head.*"])]',
        "personal_epochs": 'filters=[Personal(["head.*"], epochs=1)]',
        "compression": "filters=[TopK(0.1)]",
        **dict.fromkeys(("mu", "proximal_mu"), "local_hooks=[ls.ProximalTerm(0.01)]"),
        **dict.fromkeys(("server_lr", "momentum"), "server_optimizer=ls.FedAvgM(lr=1.0, momentum=0.9)"),
        "clients_per_round": "clients_per_round=10",
        **dict.fromkeys(("fraction_fit", "fraction_train"), "clients_per_round=0.1"),
        "local_epochs": "local_epochs=1",
        "local_steps": "local_steps=20",
    }
)
ELSEWHERE: Mapping[str, str] = MappingProxyType(  # of those that belong in neither
    {
        **dict.fromkeys(("num_rounds", "rounds", "max_rounds"), "Trainer(max_epochs=100), whose epochs are rounds"),
        **dict.fromkeys(("lr", "learning_rate", "client_lr"), "the rate into the optimizer of `configure_optimizers`"),
        "batch_size": "FederatedDataModule(..., batch_size=32)",
        "strategy": "algorithm=ls.SpectralSharding(strategy=ls.TopN()), or ls.FedAvg()",
        "keep_ratio": "algorithm=ls.SpectralSharding(keep_ratio=0.2)",
        "callbacks": "Trainer(callbacks=[...])",
    }
)


class Moment(Enum):
    """When a server half may have something to say to the user.

    Attributes:
        REMARK: When the first round has opened: remarks, which are not warnings.
        BEFORE_TRAINING: When the first round has opened: warnings, each with its remedy.
        AFTER_TRAINING: After the first round, if clients trained in it: warnings, each with its remedy.
        LARGE_UPDATES: About rounds that move the weights too far: a remedy, in the imperative, without a full stop.
        FLAT_LOSSES: About losses that do not fall: such a remedy, if its sub-models may be the cause.
        UNUSED_LAYERS: About layers that no client trains: such a remedy.
        RESTING_AVERAGES: About BatchNorm's running averages that clients leave as they are: why that is no mistake.
        OTHER_LABELS: About larger clients whose labels are others than those of smaller ones: likewise.
    """

    REMARK = auto()
    BEFORE_TRAINING = auto()
    AFTER_TRAINING = auto()
    LARGE_UPDATES = auto()
    FLAT_LOSSES = auto()
    UNUSED_LAYERS = auto()
    RESTING_AVERAGES = auto()
    OTHER_LABELS = auto()


@dataclass(frozen=True, eq=False)
class Observed:
    """What there is to log and to show of a round.

    Attributes:
        figures: Figures to log, by name.
        term_draws: How clients draw the singular terms of each sharded matrix, by its dotted name.
        visited_terms: Which terms of each of these some client held, among those added so far: shape ``(N,)``, bool.
        histograms: Other tensors whose distribution is worth seeing, by their names in dashboards.
    """

    figures: Mapping[str, float] = field(default_factory=dict)
    term_draws: Mapping[str, TermDraws] = field(default_factory=dict)
    visited_terms: Mapping[str, Tensor] = field(default_factory=dict)
    histograms: Mapping[str, Tensor] = field(default_factory=dict)


class Round(ABC):
    """One open round: what the server read from its weights, and the running sums of what clients send back."""

    @abstractmethod
    def send(self, unit: WorkUnit) -> tuple[Download, Receipt]:
        """The download of one unit, and the receipt that the server keeps of it.

        Random draws depend only on the run's seed, the round and ``unit.ids``.
        """

    @abstractmethod
    def add(self, receipt: Receipt, upload: Upload) -> None:
        """Add one unit's update to the running sums. What it has sent is finite, and small enough for an exact sum.

        Raises:
            SummandError: If what is computed from it is not: from `check_summable`, before anything is added. The
                client is then left out.
            Unusable: Likewise, with another reason.
        """

    @property
    def sums(self) -> Sequence[RunningMean]:
        """The running sums, which several processes add up before `close`.

        Raises:
            NotImplementedError: By default. An algorithm that does not define it trains in a single process.
        """
        raise NotImplementedError(
            f"{type(self).__name__} runs in one process; define the property `sums`, the `MeanChange` objects of the "
            "round, to let several processes add them up."
        )

    @abstractmethod
    def close(self) -> None:
        """Finish the average: set pseudo-gradients of the server's or the state's parameters, and buffers in place."""

    def positions(self, receipt: Receipt) -> Mapping[str, Tensor]:
        """For each tensor of which a unit holds a part, the places of its entries in the flattened whole one.

        Filters compare clients by them, entry by entry. By default none: all clients send back whole tensors.
        """
        return {}

    def observed(self) -> Observed:
        """What there is to log and to show of the round, which may still be open; by default nothing."""
        return Observed()

    def expected_update(self, unit: WorkUnit) -> Mapping[str, Tensor]:
        """The change of the server's tensors, by name, that is expected of a unit before it trains; by default none."""
        return {}


class _AtServer:
    """Base of what runs at the server, where methods of the device half would never be called."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if misplaced := [name for name in DEVICE_METHODS if name in vars(cls)]:
            raise TypeError(
                f"{cls.__name__} defines {', '.join(misplaced)}, which a device calls: write a ClientSide with it, and "
                "return that from `ServerHalf.client_side`."
            )


class ServerHalf(_AtServer, ABC):
    """An algorithm bound to the server's module for one fit: all that follows from the module is computed once.

    Attributes:
        server: The server's module.
        rules: What becomes of buffers, and which tensors stay with clients. Buffers that are not averaged are combined
            by the engine: neither `Round.add` nor `Round.close` sees them.
    """

    rules: BufferRules = NO_RULES

    def __init__(self, server: nn.Module, rules: BufferRules | None = None) -> None:
        self.server = server
        self.rules = buffer_rules(server) if rules is None else rules

    @property
    def decisions(self) -> Mapping[str, Any]:
        """What initial values have decided, for a resumed run: here, the rules of buffers that were not finite."""
        return self.rules.decisions

    @property
    @abstractmethod
    def client_side(self) -> ClientSide:
        """The other half, which is sent once to each device."""

    def initialize(self, workers: Workers) -> str:
        """Change the initial weights, once, before the first round of a run that is not resumed. By default not.

        Args:
            workers: The processes of the run. All of them call this, and must end up with the same weights.

        Returns:
            What the user should know of it, one sentence a line; empty if there is nothing to say.
        """
        return ""

    @abstractmethod
    def open(self, cohort: Cohort) -> Round:
        """Open a round: prepare it from the server's weights for the clients that take part."""

    def frozen_tensors(self) -> Mapping[str, Tensor]:
        """The tensors of every download that do not change between rounds, by name: each client is sent them once.

        The names are the same in every round; a value that does change is sent again, which `costs_besides` should say.
        By default, the parameters that need no gradient, and the server's values of tensors that stay with clients,
        with which these begin.
        """
        return {**frozen_parameters(self.server), **select_tensors(self.server, sorted(self.rules.stays))}

    @property
    def costs_besides(self) -> CostsBesides:
        """What a client costs that cannot be counted on its model; by default nothing."""
        return CostsBesides()

    def advice(self, moment: Moment, opened: Round | None = None, summary: RoundSummary | None = None) -> Sequence[str]:
        """What the user should hear at a moment; by default that clients keep buffers, which rest at the server.

        Args:
            moment: When, or about what.
            opened: The first round, once it has opened; ``None`` at other moments.
            summary: The first round, once it has closed; ``None`` at other moments.
        """
        kept = any(name in self.rules.stays for name, _ in self.server.named_buffers())
        return ["clients keep buffers of their own"] if moment is Moment.RESTING_AVERAGES and kept else ()

    def settle(self) -> None:
        """Update the server's module from the state, before the first round and after each server step.

        By default nothing. Evaluation and checkpoints see the weights that the module has afterwards.
        """
        return None


class Algorithm(_AtServer, ABC):
    """Decides what the server sends, and how it averages the uploads: a frozen choice, compared and printed.

    Several runs can use it at once. What follows from a module belongs to the `ServerHalf` that `bind` returns, what
    happens in a round to its `Round`, and what a device does to its `ClientSide`. What few need has a default.

    Attributes:
        promises: What filters, samplers and callbacks may rely on; a subclass that does not define it promises nothing.

    Example:
        >>> from lightning_spectral.algorithms import FedAvg
        >>> algorithm, server = FedAvg(), nn.Linear(3, 1)  # FederatedModule(..., algorithm=algorithm)
        >>> algorithm.promises.new_values, algorithm.new_state(server, seed=0)
        (True, None)
        >>> algorithm.bind(server).server is server
        True
    """

    promises: ClassVar[Promises | property] = NO_PROMISES

    def __new__(cls, *args: Any, **options: Any) -> "Algorithm":
        """Say where an argument is that acts on updates, whatever the algorithm."""
        moved = {**{name: f"FederatedModule(..., {place})" for name, place in PLACES.items()}, **ELSEWHERE}
        refuse_moved(cls, options, moved)
        return super().__new__(cls)

    @property
    def capacities(self) -> Capacities["Algorithm"]:
        """What its clients differ by; by default nothing, as all of them train the whole model."""
        return Capacities(self)

    def check(self, plan: Setting) -> None:
        """Raise ``ValueError`` if this algorithm cannot be part of a federation; warn if it trains worse in it.

        Called when a module is wrapped, and again, with ``plan.optimizers`` and ``plan.callbacks``, when a fit has
        made them. By default it can train any module with any optimizer.
        """
        return None

    def new_state(self, server: nn.Module, seed: int) -> nn.Module | None:
        """What the algorithm keeps between rounds, as a module; by default ``None``.

        The ``FederatedModule`` registers it as ``state``, so Lightning saves, moves and resumes it, and the server
        optimizer steps those of its parameters that have a gradient after `Round.close`.

        Args:
            server: The server's module, as it is before any fit.
            seed: The run's seed, for random draws.
        """
        return None

    @abstractmethod
    def bind(self, server: nn.Module, state: nn.Module | None = None, known: Known = UNKNOWN) -> ServerHalf:
        """Decide everything that depends on the server's module, once, when a fit starts.

        Args:
            server: The server's module.
            state: What `new_state` returned, perhaps with the values of a checkpoint.
            known: What else is known when the fit starts.
        """


def promises_of(algorithm: Algorithm) -> Promises:
    """What an algorithm's class promises itself: a base may promise what is not true of a class that changes it."""
    own = algorithm.promises if "promises" in vars(type(algorithm)) else NO_PROMISES
    assert isinstance(own, Promises), "a property of the class is read from the instance"
    return own
