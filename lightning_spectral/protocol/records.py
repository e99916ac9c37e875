"""Records of what is sent between server and devices, of the outcome, and of the seconds that it took."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, NamedTuple

from torch import Tensor

from lightning_spectral.sums.exact_mean import largest_magnitudes

# Why a client that was asked to take part is left out of a round's average.
ExclusionReason = Literal["error", "not_finite", "no_update", "no_data", "dropped_out", "late", "surplus", "spent"]

# Phrases that follow one client or several: "clients 3 and 5: training failed".
EXPLANATIONS: dict[ExclusionReason, str] = {
    "error": "training failed",
    "not_finite": "update not finite or too large to be summed",
    "no_update": "no step taken, because `training_step` returned no loss for any batch",
    "no_data": "no training examples",
    "dropped_out": "dropped out",
    "late": "missed the deadline",
    "surplus": "enough other clients finished first",
    "spent": "the privacy budget of its examples is spent",
}

Key = tuple[int, str]  # of a unit: client and model
Step = Literal["keys", "shares", "open", "publish", "reveal"]  # of secure sums


class WorkUnit(NamedTuple):
    """One client that trains one model in one round.

    Attributes:
        client_id: The client's id, from 0.
        model: The model's name; ``""`` if there is only one.
        coefficient: Its weight in the average, any non-negative number. With uniform participation, its number of
            examples D; the average is divided by the sum over the clients that reported.

    Example:
        >>> WorkUnit(7, coefficient=80).ids, WorkUnit(7, "words").ids
        ((7,), (7, 'words'))
    """

    client_id: int
    model: str = ""
    coefficient: float = 1.0

    @property
    def key(self) -> Key:
        """Client and model, which identify a unit within a round regardless of its coefficient."""
        return self.client_id, self.model

    @property
    def ids(self) -> tuple[int | str, ...]:
        """The ids from which its random draws are derived; without the model if there is only one."""
        return self.key if self.model else (self.client_id,)


Tensors = Mapping[str, Tensor]
Options = Mapping[str, Any]
STAGES = ("refresh", "sample", "load", "train", "aggregate", "apply")
Profile = Callable[[str], AbstractContextManager[Any]]


@dataclass(frozen=True)
class Handshake:
    """A step in which a round's clients agree on masks, or remove them: a question to a client, and its answer.

    Attributes:
        unit: The client, and the model that it trains.
        round_idx: Communication round, from 0.
        step: The method of `lightning_spectral.sums.masks.Party` that it asks for.
        threshold: Number of clients without which no secret is revealed.
        said: By client, what others have said; in the answer, what this one says.
    """

    unit: WorkUnit
    round_idx: int
    step: Step
    threshold: int
    said: Mapping[int, bytes] = field(default_factory=dict)


@dataclass(frozen=True)
class Masking:
    """What a client needs to mask its update.

    Attributes:
        total: Sum of the coefficients of all units of the round, which fixes the grid of the sum.
        members: The clients that have masks in common.
    """

    total: float
    members: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Download:
    """What the server sends to a device: everything it needs to train for one client.

    An algorithm sets the first three fields; the server's round the others, which do not depend on the algorithm.

    Attributes:
        unit: The client, and the model that it trains.
        capacity: The keep ratio of the sub-model to train.
        tensors: Every parameter and buffer of the sub-model by name.
        round_idx: Communication round, from 0.
        local_epochs: Passes over the client's data; 0 trains nothing. With ``local_steps``, 1.
        local_steps: Batches after which the client stops, in as many passes as that takes; ``None`` for whole passes.
        options: For each of the user's optimizers, the options of each parameter group, e.g. the learning rate.
        seed: The run's seed, from which the order of the data and every other draw on the device are derived.
        frozen: For each tensor that is frozen, a digest of its value; the device keeps it for later rounds.
        held: Names of the frozen tensors that the client has from an earlier round and that are not sent. Within a
            process they are nevertheless among the tensors; `encode` leaves them out.
        last_turn: Round of the client's last turn known to the server, if its device keeps a state; ``None`` before.
        client_state: What the client's device kept in that turn (`ClientSide.keep`); empty before there is one. A
            simulation sends it along; a device elsewhere has it, and the server does not.
        masking: What the client masks its update with; ``None`` if it returns its tensors as they are.
    """

    unit: WorkUnit
    capacity: float
    tensors: Tensors
    round_idx: int = 0
    local_epochs: int = 1
    local_steps: int | None = None
    options: tuple[tuple[Options, ...], ...] = ()
    seed: int = 0
    frozen: Mapping[str, str] = field(default_factory=dict)
    held: frozenset[str] = frozenset()
    last_turn: int | None = None
    client_state: Tensors = field(default_factory=dict)
    masking: Masking | None = None

    @property
    def ids(self) -> tuple[int | str, ...]:
        """The ids from which the device's random draws are derived, with the seed and their purpose."""
        return self.round_idx, *self.unit.ids

    def steps_in(self, num_batches: int) -> int:
        """Number of batches on which a client trains in a turn, given how many it has in an epoch."""
        return num_batches * self.local_epochs if self.local_steps is None else self.local_steps

    @property
    def travelling(self) -> Tensors:
        """The tensors that are sent: all except those that the client already has."""
        return {name: tensor for name, tensor in self.tensors.items() if name not in self.held}

    @property
    def num_bytes(self) -> int:
        """Size of the tensors that are sent, in bytes."""
        return num_bytes(self.travelling)

    @property
    def frozen_bytes(self) -> int:
        """Size of the frozen tensors among them, which are sent only once, in bytes."""
        return num_bytes({name: tensor for name, tensor in self.travelling.items() if name in self.frozen})

    def __getstate__(self) -> dict[str, Any]:
        """The state that is sent to another process."""
        return {**vars(self), "tensors": self.travelling}


@dataclass(frozen=True, eq=False)
class Receipt:
    """The server's record of what it drew for one unit, kept at the server until the upload arrives.

    Attributes:
        unit: The unit that the download is for.
        capacity: The keep ratio of its sub-model.
        drawn: For each sharded layer, the sorted indices of the sent terms, shape ``(n,)``; or any other tensors that
            the algorithm needs when it adds the upload.
    """

    unit: WorkUnit
    capacity: float
    drawn: Tensors = field(default_factory=dict)


@dataclass(frozen=True)
class Failure:
    """An exception on a device.

    Attributes:
        stage: The stage that failed: ``"loading"``, ``"local training"`` or ``"collecting"``; ``"network"`` if the
            device's answer cannot be used.
        message: Type and text of the exception, and what the user can do about it.
        cause: The exception itself, if it was raised in this process; it is not pickled.
        remedy: The end of the message that is this package's, and quotes nothing; empty if there is none.
    """

    stage: str
    message: str
    cause: Exception | None = field(default=None, compare=False)
    remedy: str = ""

    def __reduce__(self) -> tuple[type[Failure], tuple[str, str, None, str]]:
        """Pickle without the exception, because not every exception can be pickled."""
        return Failure, (self.stage, self.message, None, self.remedy)


@dataclass(frozen=True, eq=False)
class Upload:
    """What one device sends back.

    An algorithm's device half sets ``unit`` and ``tensors``, and may log values; the device itself adds the rest.

    Attributes:
        unit: Who trained what.
        tensors: Trained parameters and buffers by name. They may share the sub-model's memory: read or copy them before
            asking for the next upload.
        num_steps: Local optimizer steps, including those that gradient scaling skips because a gradient overflowed.
        loss: Mean loss per example over all local epochs; NaN if no step was taken.
        logged: Means of the values that the client logged with ``self.log``, by name, and those of the device half.
        left_out: Why the upload cannot be averaged; ``None`` if it can.
        failure: What failed on the device; ``None`` if nothing did.
        seconds: Wall-clock seconds on the device by stage: ``load`` and ``train``.
        unreached: Names of the sharded layers that got no gradient; ``None`` if they were not watched.
        untrained_rows: Rows of tensors, by name, that the client's loss does not reach: indices in the first dimension.
        discarded: Names of parameters that the user's code changed and no optimizer steps, so that the change is lost.
        missing: Names of the frozen tensors that were not sent because the device had them once, and which it has lost.
            It does not train then; the server sends it the download again, with everything.
        put_back: Names of attributes of the module that the client changed, and that were put back.
        loss_before: Mean loss per example at the downloaded weights, if the algorithm asks for it; otherwise NaN.
        client_state: What the device keeps for the client's next turn; it never reaches a server elsewhere.
        lost_state: Whether the device no longer had what it kept in the client's last turn, and so began without.
    """

    unit: WorkUnit
    tensors: Tensors
    num_steps: int = 0
    loss: float = math.nan
    logged: Mapping[str, LoggedValue] = field(default_factory=dict)
    left_out: ExclusionReason | None = None
    failure: Failure | None = None
    seconds: Mapping[str, float] = field(default_factory=dict)
    unreached: tuple[str, ...] | None = None
    untrained_rows: Tensors = field(default_factory=dict)
    discarded: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    put_back: tuple[str, ...] = ()
    loss_before: float = math.nan
    client_state: Tensors = field(default_factory=dict)
    lost_state: bool = False

    @property
    def num_bytes(self) -> int:
        """Size of the tensors that travel, in bytes."""
        return num_bytes(self.tensors)

    @cached_property
    def largest(self) -> Mapping[str, float]:
        """Largest absolute value of each tensor, NaN if it holds one; one read from the device for all."""
        return largest_magnitudes(self.tensors)

    def without_figures(self) -> Upload:
        """The same upload with its tensors and what a server must know, and nothing else."""
        left_out, failure, missing, state = self.left_out, self.failure, self.missing, self.client_state
        return Upload(self.unit, self.tensors, left_out=left_out, failure=failure, missing=missing, client_state=state)


@dataclass(frozen=True)
class ClientOutcome:
    """The outcome of one client's turn.

    Attributes:
        round_idx: Communication round, from 0.
        unit: Who trained what.
        keep_ratio: Share of singular terms it held.
        num_examples: Number of its training examples.
        num_steps: Local optimizer steps taken.
        loss: Mean training loss per example over its local epochs; NaN if it took no step.
        downlink_bytes: Bytes sent to it, in one download or two.
        uplink_bytes: Bytes it sent back.
        left_out: Why it is not in the average; ``None`` if it is.
        virtual_seconds: When it finished, by the virtual clock; NaN without a clock, or if it never finished.
        logged, unreached, discarded, missing, put_back: As in its `Upload`; nothing is logged if it is left out.
        frozen_bytes: Bytes of the frozen tensors among those sent to it, which it did not have yet.
        seconds: Wall-clock seconds of its turn on the device; NaN if it had none.
        figures: What filters have found out about its update, by name, such as its norm, ``"update_norm"``.
    """

    round_idx: int
    unit: WorkUnit
    keep_ratio: float
    num_examples: int
    num_steps: int
    loss: float
    downlink_bytes: int
    uplink_bytes: int
    left_out: ExclusionReason | None = None
    virtual_seconds: float = math.nan
    logged: Mapping[str, LoggedValue] = field(default_factory=dict)
    frozen_bytes: int = 0
    unreached: tuple[str, ...] | None = None
    seconds: float = field(default=math.nan, compare=False)
    discarded: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    put_back: tuple[str, ...] = ()
    figures: Mapping[str, float] = field(default_factory=dict)

    @property
    def client_id(self) -> int:
        """The client's id, from 0."""
        return self.unit.client_id

    @property
    def example_epsilon(self) -> float | None:
        """The epsilon of all its turns, which hide examples, as counted here or as its device says."""
        said = self.logged.get("clients/example_epsilon")
        return self.figures.get("example_epsilon", said.value if said is not None and said.value >= 0.0 else None)

    @property
    def update_norm(self) -> float:
        """Norm of its update, before it was bounded, if the sampler or a filter uses it; otherwise NaN."""
        return self.figures.get("update_norm", math.nan)

    @property
    def is_masked(self) -> bool:
        """Whether its update was masked, so that its loss and what it logged are not known."""
        return "masked" in self.figures


@dataclass(frozen=True)
class RoundSummary:
    """The outcome of a finished round.

    Attributes:
        round_idx: Communication round, from 0.
        clients: One outcome per client, in the cohort's order.
        seconds: Wall-clock seconds per stage: refresh, sample, load, train, aggregate, apply; the longest of any
            process.
        diagnostics: The algorithm's own figures, e.g. the share of terms that were visited.
        logged: Example-weighted means over the round of the values that clients logged.
        left_out: For each reason that this run allows, the number of clients left out.
        model: The model's name; empty if there is only one.
        measured: Outcomes of the clients measured for the sampler before the round; their updates were discarded.
        is_private: Whether everything that would reveal something about clients is left out.
    """

    round_idx: int
    clients: tuple[ClientOutcome, ...]
    seconds: Mapping[str, float]
    diagnostics: Mapping[str, float]
    logged: Mapping[str, LoggedValue]
    left_out: Mapping[ExclusionReason, int] = field(default_factory=dict)
    model: str = ""
    measured: tuple[ClientOutcome, ...] = ()
    is_private: bool = False

    @property
    def averaged(self) -> tuple[ClientOutcome, ...]:
        """Outcomes of the clients in the average."""
        return tuple(client for client in self.clients if not client.left_out)

    @property
    def has_losses(self) -> bool:
        """Whether any client in the average has taken a step and has said its loss."""
        return any(client.num_steps > 0 and not client.is_masked for client in self.averaged)

    def metric(self, name: str) -> str:
        """The name of one of the round's metrics; with several models, it begins with the model's name."""
        return f"{self.model}/{name}" if self.model else name


@dataclass(frozen=True)
class LoggedValue:
    """The mean of one logged value, over a client's turn or over all clients of a round.

    Attributes:
        value: The example-weighted mean.
        prog_bar: Whether the user's call asked for the progress bar.
        logger: Whether the user's call asked for the loggers.
    """

    value: float
    prog_bar: bool
    logger: bool


def num_bytes(tensors: Tensors) -> int:
    """Size of the values of some named tensors, in bytes."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


@dataclass(eq=False)
class StageClock:
    """Adds up the seconds that each stage takes.

    Args:
        profile: Maps the name of a stage to a context manager that is entered around it; for a profiler.

    Example:
        >>> clock = StageClock()
        >>> with clock.measure("train"):
        ...     pass
        >>> 0.0 < clock.seconds["train"] < 1.0
        True
    """

    profile: Profile = nullcontext
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(STAGES, 0.0), init=False)

    @contextmanager
    def measure(self, stage: str) -> Iterator[None]:
        """Measure a block, even if it raises."""
        start = time.perf_counter()
        try:
            with self.profile(stage):
                yield
        finally:
            self.seconds[stage] += time.perf_counter() - start

    def add(self, seconds: Mapping[str, float]) -> None:
        """Add seconds that were measured elsewhere."""
        for stage, more in seconds.items():
            self.seconds[stage] += more
