"""The contract of a filter: a choice with two ends, which acts on what devices and server send each other."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property
from itertools import combinations
from types import MappingProxyType
from typing import Any, ClassVar

from torch import Tensor, nn

from lightning_spectral.algorithms.base import Algorithm, Decisions, Names, Round, ServerHalf, Setting, promises_of
from lightning_spectral.arguments import first_of
from lightning_spectral.client.device import DeviceEnd, Instructions
from lightning_spectral.client.local_hooks import LocalHook
from lightning_spectral.errors import check_is, refuse_moved
from lightning_spectral.participation import Figure, Sampler, UniformParticipation
from lightning_spectral.protocol.buffer_rules import BufferRules, buffer_rules
from lightning_spectral.protocol.cohort import Cohort
from lightning_spectral.protocol.per_client import Assigned
from lightning_spectral.protocol.records import (
    ClientOutcome,
    Download,
    ExclusionReason,
    Handshake,
    Receipt,
    Upload,
    WorkUnit,
)
from lightning_spectral.sums.exact_mean import Peers

CALLED = MappingProxyType(  # names from elsewhere
    {"epsilon": "target_epsilon=8.0", **dict.fromkeys(("max_grad_norm", "clipping_norm", "clip_norm"), "clip=1.0")}
)
Ask = Callable[[Sequence[Handshake]], Iterator[Handshake | Upload]]


class Form(Enum):
    """The form that an upload has at a point of the chain.

    Attributes:
        VALUES: New values of the tensors that were sent.
        PACKED: Tensors with names and types of their own, which stand for such values.
        MASKED: Whole numbers on the grid of the round's sum, masked: only their sum means something.
    """

    VALUES = "values"
    PACKED = "packed"
    MASKED = "masked"


class Unusable(Exception):
    """A client that must be left out of a round, and why.

    Args:
        reason: One of the reasons that `Faults` knows.
        message: What the warning or the error adds, without a full stop.
    """

    def __init__(self, reason: ExclusionReason, message: str = "") -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True, eq=False)
class Arrival:
    """A client's update on its way from its device to the sums of a round.

    Attributes:
        receipt: What was drawn for the client.
        sent: What it was sent, as the rest of the chain sees it.
        upload: What it sends back, likewise.
        figures: What filters have found out about it, by name; see `ClientOutcome.figures`.
        is_held: Whether a filter holds it back.
    """

    receipt: Receipt
    sent: Download
    upload: Upload
    figures: Mapping[str, float] = field(default_factory=dict)
    is_held: bool = False


@dataclass(frozen=True, eq=False)
class Opened:
    """A round that has just opened.

    Attributes:
        round: The round, as the algorithm opened it.
        cohort: Who takes part, with which weights.
    """

    round: Round
    cohort: Cohort


@dataclass(frozen=True, eq=False)
class Fit:
    """What the server's end of a filter may know of a fit.

    Attributes:
        half: The algorithm, bound to the server's module.
        processes: The processes that train the clients of a round.
        sizes: Returns the number of training examples of each client, shape ``(num_clients,)``.
        figure: The figure of each client that the sampler uses; "" for none.
        active: Number of clients that is expected in a round; NaN if that is not known.
        first_round: Index of the first round; ``None`` if the fit goes on counting, as it does from a checkpoint.
        batch_sizes: Examples of a local step of each client; ``None`` if only devices know.
    """

    half: ServerHalf
    processes: Peers
    sizes: Callable[[], Tensor]
    figure: Figure = ""
    active: float = float("nan")
    first_round: int | None = 0
    batch_sizes: Assigned[int] | None = None

    def refuse_averages(self, kind: str) -> None:
        """Raise ``ValueError`` if clients send back buffers, which a filter of a class cannot hide."""
        if names := sorted(self.half.rules.returned):
            raise ValueError(
                f"{kind} adds noise to parameters, and clients would send back the buffers {first_of(names, 3)}. Use "
                'GroupNorm, which has none, or leave them at the server, FederatedModule(..., buffers={"*": "server"}),'
                " if they are known before training."
            )

    def refuse_limits(self, cannot: str) -> None:
        """Raise ``ValueError`` if buffers follow clients' smallest or largest values, with what a filter cannot do."""
        if limits := sorted(self.half.rules.limits):
            raise ValueError(
                f"{cannot} smallest and largest values, which {', '.join(limits)} would follow; give "
                'them another rule: FederatedModule(..., buffers={...: "server"}).'
            )


class ServerEnd:
    """The end of a filter that acts at the server, in one fit. By default nothing happens.

    Attributes:
        releases: Whether nothing of a round is told but its sums, and what filters with this flag say: they add up the
            sums of all processes, so that noise is added once, and the server moves even in a round without clients.
    """

    releases: ClassVar[bool] = False

    def weigh(self, units: Sequence[WorkUnit]) -> Sequence[WorkUnit]:
        """The units for which a round is opened, with their weights, given those that take part in it."""
        return units

    def begin(self, opened: Opened) -> None:
        """A round opens, after the algorithm has opened it."""

    def agree(self, units: Sequence[WorkUnit], ask: Ask) -> None:
        """Let the clients that this process is about to train agree on something.

        Args:
            units: The clients, except those without data.
            ask: Asks their devices, and yields the answers as they arrive.
        """

    def saved_bytes(self, unit: WorkUnit) -> int:
        """Bytes of a client's download that need not be sent."""
        return 0

    def send(self, download: Download) -> Download:
        """A download on its way out.

        Raises:
            Unusable: If the client cannot take part after all.
        """
        return download

    def arrive(self, arrival: Arrival) -> Arrival:
        """An update as the filters after this one and the algorithm see it.

        One that is held back, `Arrival.is_held`, goes no farther, but counts as received. `gather` may pass on others.

        Raises:
            Unusable: If the client must be left out.
        """
        return arrival

    def added(self, arrival: Arrival) -> None:
        """A client's update has been received: added to the sums, or held back."""

    def collected(self, left_out: Sequence[ExclusionReason]) -> None:
        """All clients of this process are done, and processes have not met yet; why some were left out."""

    def gather(self, processes: Peers) -> Iterable[Arrival]:
        """All clients of all processes are done, and all processes call this together; pass on what was held back."""
        return ()

    def figures(self, unit: WorkUnit) -> Mapping[str, float]:
        """What there is to say of a client's turn, whatever its update, by name."""
        return {}

    def note(self, outcomes: Sequence[ClientOutcome]) -> None:
        """What became of some clients, in a round or a measurement before it; the same in all processes."""

    def close(self, outcomes: Sequence[ClientOutcome]) -> Mapping[str, float]:
        """The server's weights change; returns what is logged of the round, by name."""
        return {}

    def is_spent(self, num_rounds: int) -> bool:
        """Whether the fit must end once it has counted to a number of rounds."""
        return False

    def remarks(self) -> Sequence[str]:
        """What the user should know when a fit begins, which is no warning."""
        return ()

    def state_dict(self) -> dict[str, Any]:
        """What lasts from round to round, and is saved in checkpoints; empty if nothing does."""
        return {}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""


@dataclass(eq=False)
class Unpacking(ServerEnd):
    """Turns packed uploads into new values again, as the device end that has packed them says.

    Attributes:
        end: That device end.
    """

    end: DeviceEnd

    def arrive(self, arrival: Arrival) -> Arrival:
        return replace(arrival, upload=self.end.unpack(arrival.sent, arrival.upload))


@dataclass(frozen=True, eq=False)
class Plan(Setting):
    """What a federation is made of, as far as it is known, for those who may refuse it.

    Attributes:
        algorithm: What clients hold, and how it is averaged.
        filters: What acts on updates, the one next to the algorithm first.
        participation: Who takes part; ``None`` if that is not known.
        local_hooks: What acts while clients train.
        clock: The `VirtualClock`; ``None`` without one, or before a fit.
    """

    algorithm: Algorithm
    filters: Sequence[Filter] = ()
    participation: UniformParticipation | Sampler | None = None
    local_hooks: Sequence[LocalHook] = ()
    clock: Any = None

    @property
    def cohort_size(self) -> float:
        """Number of clients in every round; infinite if it varies, or is a share of clients not counted yet."""
        size = getattr(self.participation, "clients_per_round", math.inf)
        return size if isinstance(size, int) else math.inf

    @cached_property
    def stays(self) -> frozenset[str]:
        """Names of the parameters and buffers that stay with clients."""
        return frozenset(name for each in self.filters for name in each.stays(self.module))

    def callback_that(self, flag: str) -> str:
        """The name of the first callback with a flag of `RoundCallback`; empty if none has it."""
        return next((type(each).__name__ for each in self.callbacks if getattr(each, flag, False)), "")

    def rules(self, decisions: Decisions = None) -> BufferRules:
        """What becomes of buffers, and which tensors stay with clients; errors as for `buffer_rules`."""
        return buffer_rules(self.module, self.buffers, decisions, self.stays)


class Filter:
    """Something that happens to updates, whatever the algorithm: a frozen, picklable choice with two ends.

    Filters are given in a list, the one next to the algorithm first: on a device they act in this order before an
    upload leaves, and at the server in reverse when it arrives.

    Attributes:
        takes: The form that uploads must have where the filter acts; ``None`` for any, because it reads none.
        gives: The form that they have beyond it; ``None`` for the same.
        needs: What the algorithm must promise: names of the fields of `Promises`.
        reads_single: Whether its end at the server reads the updates of single clients.
        hides_clients: Whether it hides what single clients say from the server, or from who sees what rounds release.
        weighs: Whether it changes the weights of clients.
        reads_steps: Whether its end at the server reads how many steps single clients took.
        equal_weights: Whether it needs clients that weigh the same.
        outlasts_faults: Whether no client may end the run, whatever its data.

    Example:
        >>> from lightning_spectral.filters import SecureSums, TopK
        >>> TopK(0.1).takes, TopK(0.1).gives  # FederatedModule(..., filters=[TopK(0.1)])
        (<Form.VALUES: ...>, <Form.PACKED: ...>)
        >>> SecureSums().hides_clients, SecureSums().equal_weights
        (True, ...)
    """

    takes: ClassVar[Form | None] = Form.VALUES
    gives: ClassVar[Form | None] = None
    needs: ClassVar[Sequence[str]] = ()
    reads_single: ClassVar[bool] = False
    hides_clients: ClassVar[bool] = False
    weighs: ClassVar[bool] = False
    reads_steps: ClassVar[bool] = False
    equal_weights: ClassVar[bool] = False
    outlasts_faults: ClassVar[bool] = False

    def __new__(cls, *args: Any, **options: Any) -> Filter:
        """Say how an argument is called here."""
        own = getattr(cls, "__dataclass_fields__", {})
        refuse_moved(cls, options, {name: line for name, line in CALLED.items() if line.partition("=")[0] in own})
        return super().__new__(cls)

    @property
    def secret_cohorts(self) -> bool:
        """Whether nobody may know who takes part, so that cohorts are not drawn from the run's seed."""
        return False

    @property
    def name(self) -> str:
        """Its name among the filters of a federation, which has one of each class."""
        return type(self).__name__

    def stays(self, module: nn.Module) -> Names:
        """Names of the parameters and buffers that stay with clients: the server neither gets nor averages them."""
        return ()

    def check(self, plan: Plan) -> None:
        """Raise ``ValueError`` if this filter cannot be part of a federation, by itself; see `check_chain`."""

    def device(self, half: ServerHalf) -> DeviceEnd | None:
        """The end that acts on devices; ``None`` if none does."""
        return None

    def server(self, fit: Fit) -> ServerEnd | None:
        """The end that acts at the server; ``None`` if none does."""
        return None


WHAT_ALGORITHMS_PROMISE: Mapping[str, str] = MappingProxyType(
    {
        "new_values": "send back new values of the tensors that were sent",
        "values_alone": "send back nothing but new values of tensors, no losses or figures of their turn",
        "same_tensors": "send back the same tensors in every round, so that a device may send later what it owes",
        "one_sum": "are needed for nothing but the sum of their changes",
        "noise_hides": "are hidden by noise on its sums",
        "parts_stay": "may keep parameters of their own",
        "any_steps": "may take steps that train what they do not send back",
    }
)


def conflict(first: Filter, then: Filter) -> str:
    """Why one filter cannot be followed by another in a list, with the remedy; empty if it can.

    Example:
        >>> from lightning_spectral.filters import SecureSums, TopK, UsualUpdateNorm
        >>> conflict(TopK(0.1), UsualUpdateNorm())
        'TopK packs what UsualUpdateNorm reads: put UsualUpdateNorm before TopK.'
        >>> conflict(UsualUpdateNorm(), SecureSums())
        'UsualUpdateNorm reads the updates of single clients, which SecureSums hides; leave one out.'
    """
    one, other = type(first).__name__, type(then).__name__
    if first.name == then.name:
        return f"{one} and {other} do the same; give one." if one != other else f"Give {one} once."
    for reads, hides in ((first, then), (then, first)):
        names = type(reads).__name__, type(hides).__name__
        if reads.reads_single and hides.hides_clients:
            return "{} reads the updates of single clients, which {} hides; leave one out.".format(*names)
        if reads.weighs and hides.equal_weights:
            return "{} changes the weights of clients, and {} needs equal ones; leave one out.".format(*names)
        if reads.reads_steps and "values_alone" in hides.needs:
            return "{} reads how many steps a client took, and {} lets it say nothing; leave one out.".format(*names)
    if not _reads(then, first):
        return ""
    does = "packs" if first.gives is Form.PACKED else "masks"
    remedy = "leave one out" if _reads(first, then) else f"put {other} before {one}"
    return f"{one} {does} what {other} reads: {remedy}."


def _reads(reader: Filter, before: Filter) -> bool:
    """Whether a filter would read what one before it has packed or masked."""
    return before.gives is not None and reader.takes is not None and before.gives is not reader.takes


def together(filters: Sequence[Filter]) -> str:
    """Which filters go with which, as a table in Markdown: ``yes`` in any order, or which of both comes first.

    Example:
        >>> from lightning_spectral.filters import MaxUpdateNorm, Personal, SecureSums, TopK
        >>> print(together([Personal(["head.*"]), MaxUpdateNorm(1.0), TopK(0.1), SecureSums()]))
        | | `Personal` | `MaxUpdateNorm` | `TopK` | `SecureSums` |
        | --- | --- | --- | --- | --- |
        | `Personal` | | yes | yes | yes |
        | `MaxUpdateNorm` | yes | | `MaxUpdateNorm` first | no |
        | `TopK` | yes | `MaxUpdateNorm` first | | no |
        | `SecureSums` | yes | no | no | |
    """

    def cell(one: Filter, other: Filter) -> str:
        if one is other:
            return ""
        orders = [first for first, then in ((one, other), (other, one)) if not conflict(first, then)]
        return ("no", f"`{type(orders[0]).__name__}` first" if orders else "", "yes")[len(orders)]

    names = [f"`{type(each).__name__}`" for each in filters]
    rows = [["", *names], ["---"] * (1 + len(names))]
    rows += [[name, *(cell(own, each) for each in filters)] for name, own in zip(names, filters, strict=True)]
    return "\n".join(f"| {' | '.join(row)} |".replace("|  |", "| |") for row in rows)


def check_chain(plan: Plan) -> None:
    """Check that the filters of a federation go together, and with its algorithm.

    Raises:
        TypeError: If something is no filter.
        ValueError: If two do not go together, the algorithm does not promise what one needs, or a sampler or a callback
            needs to know single clients, which one hides; it says what to do.
    """
    for each in plan.filters:
        check_is("filters", each, Filter)
    for first, then in combinations(plan.filters, 2):
        if said := conflict(first, then):
            raise ValueError(said)
    promised, name = promises_of(plan.algorithm), type(plan.algorithm).__name__
    for each in plan.filters:
        for promise in each.needs:
            if not getattr(promised, promise):
                remedy = promised.remedies.get(promise, "use another algorithm, such as FedAvg")
                if "promises" not in vars(type(plan.algorithm)):
                    remedy += f", or, if they do, let {name} say so: `promises = Promises({promise}=True)`"
                raise ValueError(
                    f"{type(each).__name__} needs an algorithm whose clients {WHAT_ALGORITHMS_PROMISE[promise]}, which "
                    f"{name} does not promise: {remedy}."
                )
        if each.hides_clients and isinstance(plan.participation, Sampler) and plan.participation.figure:
            raise ValueError(
                f"{type(each).__name__} hides the losses and updates of single clients, by which "
                f"{type(plan.participation).__name__} draws them; use Uniform."
            )
        if each.hides_clients and (callback := plan.callback_that("reads_clients")):
            raise ValueError(
                f"{type(each).__name__} hides single clients, and {callback} reads their data, figures or updates; "
                "leave one out. `Trainer(callbacks=[ClientEvaluation()]).validate(model, data)` evaluates clients "
                "after the fit, which tells of their data."
            )
        each.check(plan)


def instructions(half: ServerHalf, filters: Iterable[Filter] = ()) -> Instructions:
    """What devices are told once in a run."""
    ends = {each.name: end for each in filters if (end := each.device(half)) is not None}
    return Instructions(half.client_side, ends)
