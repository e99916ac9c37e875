"""Which clients take part in a round, and which of several models each of them trains, with which coefficient."""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from functools import cached_property
from numbers import Integral, Real
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from lightning_spectral.arguments import Number, Whole, check_fields, first_of, flag
from lightning_spectral.designs import Design, JointDesign
from lightning_spectral.errors import check_is
from lightning_spectral.functional.sampling.inclusion import assignment_probs, model_joint_probs
from lightning_spectral.sums.exact_mean import MOST_TERMS

__all__ = [
    "Assignment",
    "Figure",
    "FullParticipation",
    "LossVarianceReduced",
    "Population",
    "RoundRobin",
    "Sampler",
    "StaleUpdateVarianceReduced",
    "Uniform",
    "UniformParticipation",
    "UpdateVarianceReduced",
    "cohort_size",
    "outcome_to_assignment",
]


def cohort_size(argument: str, value: Any) -> Any:
    """Return a number of clients as a plain number, and, as a float below 1, a share of them; a rule of arguments.

    Example:
        >>> cohort_size("clients_per_round", 1.0)
        Traceback (most recent call last):
        ValueError: `clients_per_round` is a share of the clients below 1, or a number of them, got 1.0; write 1 for one
        client, or participation=FullParticipation() for all.
    """
    if isinstance(value, Real) and not isinstance(value, Integral):
        if 0 < (share := float(value)) < 1:
            return share
        if share == 1:
            raise ValueError(
                f"`{argument}` is a share of the clients below 1, or a number of them, got {value!r}; write 1 for one "
                "client, or participation=FullParticipation() for all."
            )
    return Whole(at_least=1, at_most=MOST_TERMS, hint="or a share of the clients, in (0, 1)")(argument, value)


@dataclass(frozen=True)
class UniformParticipation:
    """A fixed number k of clients, drawn uniformly without replacement, in random order, at a cost proportional to k.

    Args:
        clients_per_round: Size of the cohort, at least 1, and at most as many as can be summed exactly; or, as a float
            in (0, 1), its share of the clients that there are when a round begins, to the nearest whole number.

    Raises:
        TypeError, ValueError: If it is neither; 1.0 would be ambiguous.

    Example:
        >>> participation = UniformParticipation(clients_per_round=3)
        >>> cohort = participation.cohort(10**12, torch.Generator().manual_seed(0))
        >>> cohort.shape, len(cohort.unique())
        (torch.Size([3]), 3)
        >>> UniformParticipation(0.1).size(28), UniformParticipation(0.1).size(3)
        (3, 1)
    """

    clients_per_round: int | float

    def __post_init__(self) -> None:
        check_fields(self, clients_per_round=cohort_size)

    def size(self, num_clients: int) -> int:
        """Number of clients in a cohort of this number of clients."""
        wanted = self.clients_per_round
        return wanted if isinstance(wanted, int) else max(1, round(wanted * num_clients))

    def check(self, num_clients: int) -> None:
        """Raise ``ValueError`` if no cohort can be drawn from this number of clients; called at set-up."""
        if self.size(num_clients) > num_clients:
            raise ValueError(
                f"`clients_per_round` must be at most num_clients={num_clients}, "
                f"got {self.clients_per_round}; lower it or add clients."
            )

    def cohort(self, num_clients: int, generator: torch.Generator) -> Tensor:
        """Distinct client ids in ``[0, num_clients)``, int64, shape ``(k,)``, in the order in which they are served."""
        self.check(num_clients)
        size = self.size(num_clients)
        if 4 * size >= num_clients:
            return torch.randperm(num_clients, generator=generator)[:size].clone()
        # the first k distinct values of an i.i.d. stream are a uniform ordered sample without replacement
        seen: dict[int, None] = {}
        while len(seen) < size:
            seen.update(dict.fromkeys(torch.randint(num_clients, (size,), generator=generator).tolist()))
        return torch.tensor(list(seen)[:size])


@dataclass(frozen=True, eq=False)
class Population:
    """N clients, S models, and how many models each client can train at once.

    A client cannot train a model of which it has no examples, or for which it is marked unavailable. A client that can
    train nothing at all may be part of the population. P is the total number of processors.

    Args:
        num_examples: Examples of each client for each model, int64, shape ``(N, S)``.
        processors: Number B of processors of each client, at least 1, int64, shape ``(N,)``. Each trains one model in
            a round; two of one client may draw the same model.
        available: Whether each client could train each model if it had examples, bool, ``(N, S)``; by default always.

    Example:
        >>> population = Population(torch.tensor([[30, 10], [10, 0]]), processors=torch.tensor([2, 1]))
        >>> population.owner
        tensor([0, 0, 1])
        >>> population.weights
        tensor([[0.3750, 0.5000],
                [0.3750, 0.5000],
                [0.2500, 0.0000]], dtype=torch.float64)
    """

    num_examples: Tensor
    processors: Tensor
    available: Tensor | None = None

    def __post_init__(self) -> None:
        shape = tuple(self.num_examples.shape)
        if len(shape) != 2 or 0 in shape:
            raise ValueError(f"`num_examples` must have shape (N, S) with N, S >= 1, got shape {shape}.")
        _check_field("num_examples", self.num_examples, shape, torch.int64)
        _check_field("processors", self.processors, shape[:1], torch.int64)
        if self.available is not None:
            _check_field("available", self.available, shape, torch.bool)
        if (self.num_examples < 0).any():
            client, model = (self.num_examples < 0).nonzero()[0].tolist()
            number = int(self.num_examples[client, model])
            raise ValueError(f"`num_examples` must not be negative, got {number} of client {client}, model {model}.")
        if (self.processors < 1).any():
            clients = first_of([*map(str, (self.processors < 1).nonzero()[:, 0].tolist())], 10)
            raise ValueError(f"`processors` must be at least 1, got less for clients {clients}.")
        if not self.trainable.any(0).all():
            models = first_of([*map(str, (~self.trainable.any(0)).nonzero()[:, 0].tolist())], 10)
            raise ValueError(f"no client can train models {models}; add examples, or leave them out.")

    @cached_property
    def trainable(self) -> Tensor:
        """Which client can train which model, bool, shape ``(N, S)``."""
        has_examples = self.num_examples > 0
        return has_examples if self.available is None else has_examples & self.available

    @cached_property
    def shares(self) -> Tensor:
        """Share d of each client in the examples of all clients that can train a model, float64, shape ``(N, S)``."""
        counted = torch.where(self.trainable, self.num_examples, 0)
        return counted.double() / counted.sum(0).double()

    @cached_property
    def owner(self) -> Tensor:
        """Client of each processor, int64, shape ``(P,)``; processors of a client are adjacent."""
        return torch.arange(len(self.processors)).repeat_interleave(self.processors)

    @cached_property
    def can(self) -> Tensor:
        """Which processor can train which model, bool, shape ``(P, S)``."""
        return self.trainable[self.owner]

    @cached_property
    def weights(self) -> Tensor:
        """Weights d / B of the processors in each average, float64, shape ``(P, S)``; columns sum to one."""
        return (self.shares / self.processors[:, None])[self.owner]


@dataclass(frozen=True, eq=False)
class Assignment:
    """Who trains what in a round: distinct pairs of a client and a model.

    Attributes:
        probs: Probability of each processor to train each model, which divides coefficients, float64, ``(P, S)``.
        clients: Client of each pair, in the order drawn.
        models: Model index of each pair.
        coefficients: Coefficient of each pair: in the sum of its model's updates, or, if normalized, its weight in an
            average that is divided by the sum of the weights.
        active: Number of active processors of each model, int64, shape ``(S,)``. It exceeds the number of the model's
            pairs if two processors of a client drew it.
    """

    probs: Tensor
    clients: list[int]
    models: list[int]
    coefficients: list[float]
    active: Tensor


def outcome_to_assignment(
    population: Population, probs: Tensor, choice: Tensor, order: Tensor | None = None, *, normalize: bool = False
) -> Assignment:
    r"""Compute who trains what, and with which coefficient, from what each processor drew.

    A processor of client i that trains model s contributes :math:`d_{is} / (B_i p)` to the coefficient of the pair, so
    that the sum of coefficients times updates is unbiased. If two processors of a client drew the same model, it is
    trained once, with both contributions.

    Args:
        population: Clients, models and processors.
        probs: Probability p of each processor to train each model, shape ``(P, S)``.
        choice: Model that each processor drew, -1 for none, int64, shape ``(P,)``.
        order: Indices of the processors that drew a model, in the order drawn; by default ascending.
        normalize: Whether to count examples instead of shares: :math:`n_{is} p^{max}_s / (B_i p)`, where
            :math:`p^{max}_s` is the largest p of the model. If all p are equal and clients have one processor, this is
            the number of examples, exactly.

    Example:
        >>> population = Population(torch.tensor([[30], [10]]), processors=torch.tensor([2, 1]))
        >>> assignment = outcome_to_assignment(population, torch.full((3, 1), 0.5), torch.tensor([0, 0, -1]))
        >>> assignment.clients, assignment.models, assignment.coefficients
        ([0], [0], [1.5])
    """
    drawn = (choice >= 0).nonzero()[:, 0] if order is None else order
    models, owners = choice[drawn], population.owner[drawn]
    assert bool((probs[drawn, models] > 0).all()), "a processor drew a model of probability zero"
    p = probs.double()
    if normalize:
        # the quotient first: equal probabilities and one processor make it exactly one
        relative = p.amax(0) / (population.processors[population.owner, None] * p)
        weights = population.num_examples[population.owner] * relative
    else:
        weights = population.weights / p
    pairs: dict[tuple[int, int], float] = {}
    for client, model, weight in zip(owners.tolist(), models.tolist(), weights[drawn, models].tolist(), strict=True):
        pairs[client, model] = pairs.get((client, model), 0.0) + weight
    active = models.bincount(minlength=probs.shape[1])
    return Assignment(probs, [c for c, _ in pairs], [m for _, m in pairs], list(pairs.values()), active)


def _check_field(name: str, value: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    if tuple(value.shape) != shape or value.dtype != dtype:
        raise ValueError(
            f"`{name}` must have shape {shape} and type {dtype}, got shape {tuple(value.shape)} and {value.dtype}."
        )


Figure = Literal["", "loss", "update", "stale update"]

# Row sums and cumulative sums are subject to rounding: numbers this close count as equal, or as certain.
ROUNDING = 1e-12


@dataclass(frozen=True)
class Sampler(ABC):
    """A way to sample clients for several models: a frozen dataclass that implements :meth:`probs`.

    The unit is a processor: a client with B of them can train B models at once. Each trains one model or nothing.

    Args:
        active: Expected number m of active processors in a round, at least 1.
        design: Fixed-size design by which exactly m processors are drawn; m must then be whole. By default each
            processor draws independently, as published, and the number varies around m.
        normalize: Whether the average is divided by the sum of its coefficients: biased, but with less variance. By
            default coefficients are used as they are, which is unbiased.

    Attributes:
        figure: What the sampler is based on: nothing, the clients' losses, the norms of their updates, or the norms of
            what is new in their updates.

    Example:
        >>> class First(Sampler):
        ...     def probs(self, scores, round_idx=0):
        ...         return torch.eye(len(scores), dtype=torch.float64)[:, :1] * scores
        >>> population = Population(torch.tensor([[30], [10]]), processors=torch.tensor([1, 1]))
        >>> First(active=1).assign(population, None, 0, torch.Generator()).clients
        [0]
    """

    figure: ClassVar[Figure] = ""
    active: float
    design: Design | None = None
    normalize: bool = False

    def __post_init__(self) -> None:
        check_fields(self, active=Number(at_least=1, hint="it is a number of clients, not a share"), normalize=flag)
        check_is("design", self.design, Design | None)
        if self.design is not None and self.active != round(self.active):
            raise ValueError(f"`active` must be whole with a design, got {self.active}; round it or drop the design.")

    @property
    def measure(self) -> Literal["all", "last"] | int:
        """Whose figures are measured before a round: by default nobody's, so that they are those of the last turn."""
        return "last"

    @abstractmethod
    def probs(self, scores: Tensor, round_idx: int = 0) -> Tensor:
        """Probabilities with which a round is drawn.

        Args:
            scores: Score of each processor for each model, float64, shape ``(P, S)``, zero where it cannot train
                the model: its weighted figure, or one if the sampler has no figure.
            round_idx: Communication round, from 0.

        Returns:
            Probability of each processor to train each model, float64, shape ``(P, S)``. Each row sums to at most one,
            and all entries together to ``active``, or to the number of processors with a score, if that is less.
        """

    def long_run_probs(self, scores: Tensor, probs: Tensor) -> Tensor:
        """Probabilities by which coefficients are divided; they differ from ``probs`` only if rounds differ by plan."""
        return probs

    def scores(self, population: Population, figures: Tensor | None) -> Tensor:
        """Scores as :meth:`probs` takes them, float64, shape ``(P, S)``; ``figures`` as for :meth:`assign`."""
        return sampling_scores(population, figures) if self.figure else population.can.double()

    def assign(
        self, population: Population, figures: Tensor | None, round_idx: int, generator: torch.Generator
    ) -> Assignment:
        """Draw who trains what in a round: a pure function of its arguments.

        Args:
            population: Clients, models and processors. If fewer than ``active`` processors can train something,
                all of those are active.
            figures: Figures of the clients, shape ``(N, S)``, NaN where unknown, ``None`` if nothing is known. Samplers
                without a figure ignore them.
            round_idx: Communication round, from 0.
            generator: CPU generator of this round, the only source of randomness.

        Returns:
            The assignment, which may be empty if processors draw independently.
        """
        scores = self.scores(population, figures)
        probs, can = self.probs(scores, round_idx), population.can
        valid = probs.shape == can.shape and bool((probs >= 0).all() and (probs.sum(1) <= 1 + 1e-9).all())
        if not valid or bool((probs[~can] > 0).any()):
            raise ValueError(
                f"{self}.probs must return non-negative numbers of shape {tuple(can.shape)}, with rows that sum to at "
                f"most one and zeros where a processor cannot train a model, got {probs}."
            )
        choice, order = draw_choices(probs, self.design, generator)
        coefficient_probs = self.long_run_probs(scores, probs)
        return outcome_to_assignment(population, coefficient_probs, choice, order, normalize=self.normalize)

    def joint_probs(self, probs: Tensor, model: int) -> Tensor | None:
        """Joint probabilities, shape ``(P, P)``, that two processors train a model, for the variance figures.

        ``probs`` is that of an assignment. The result is ``None`` if processors draw independently.
        """
        if self.design is None:
            return None
        return model_joint_probs(processor_joint_probs(probs, self.design), probs, model)

    def check(self, population: Population) -> None:
        """Refuse a population that this sampler cannot serve; called at set-up, before any round."""
        if self.active > (able := int(population.can.any(1).sum())):
            raise ValueError(
                f"`active` must be at most {able}, the number of processors that can train something, "
                f"got {self.active}; lower it or add clients."
            )


def sampling_scores(population: Population, figures: Tensor | None) -> Tensor:
    """Figures of the clients, weighted as in the average, for each processor.

    Args:
        population: Clients, models and processors.
        figures: Figure of each client for each model, e.g. its loss, shape ``(N, S)``, NaN where it is not known yet;
            ``None`` if nothing is known. An unknown figure counts as the largest known one of the model, or as 1 if
            there is none. Negative ones count as zero.

    Returns:
        Scores, float64, shape ``(P, S)``, zero where a processor cannot train a model. If all scores of a model would
        be zero, the weights take their place: otherwise no client would ever train it.

    Example:
        >>> population = Population(torch.tensor([[30], [10]]), processors=torch.tensor([1, 1]))
        >>> sampling_scores(population, torch.tensor([[2.0], [float("nan")]]))
        tensor([[1.5000],
                [0.5000]], dtype=torch.float64)
    """
    known = torch.ones_like(population.shares)
    if figures is not None:
        expected = tuple(population.num_examples.shape)
        if tuple(figures.shape) != expected:
            raise ValueError(f"`figures` must have shape (N, S) = {expected}, got {tuple(figures.shape)}.")
        # those of clients without examples do not matter
        values = torch.where(population.num_examples > 0, figures.detach().double().cpu(), torch.nan)
        if values.isinf().any():
            client, model = values.isinf().nonzero()[0].tolist()
            raise ValueError(
                f"`figures` must be finite, or NaN if not known, got {values[client, model].item()} of client "
                f"{client}, model {model}; its training diverged: lower the learning rate, or pass NaN."
            )
        values = values.clamp(min=0.0)  # leaves NaN
        largest = values.nan_to_num(-1.0).amax(0)
        known = torch.where(values.isnan(), torch.where(largest < 0, 1.0, largest), values)
    scores = population.weights * known[population.owner]
    return torch.where((scores == 0).all(0), population.weights, scores)


def draw_choices(probs: Tensor, design: Design | None, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw a model, or none, for every processor.

    Without a design there is one uniform number per processor. With one, the active processors are drawn first; then
    each picks a model in proportion to its row, which takes no random number if there is only one model. If all
    processors that can be active are equally likely, whatever the design, they are a
    :class:`~lightning_spectral.participation.UniformParticipation` cohort, in random order.

    Args:
        probs: Probability of each processor to train each model, rows summing to at most one, shape ``(P, S)``.
        design: Fixed-size design, or None for independent draws.
        generator: CPU generator of this round, the only source of randomness.

    Returns:
        Model of each processor, -1 for none, int64, shape ``(P,)``, and the active processors in the order drawn.
    """
    cumulative = probs.double().cumsum(1)
    if design is None:
        sums = cumulative[:, -1:]
        cumulative = torch.where(sums > 1 - ROUNDING, cumulative / sums, cumulative)  # certain despite rounding
        choice = (cumulative <= torch.rand(len(probs), 1, dtype=torch.float64, generator=generator)).sum(1)
        choice = torch.where(choice < probs.shape[1], choice, -1)
        return choice, (choice >= 0).nonzero()[:, 0]
    rows = cumulative[:, -1].clamp(max=1.0)
    able = rows.nonzero()[:, 0]
    if _all_equal(rows[able]):
        order = able[UniformParticipation(round(float(rows.sum()))).cohort(len(able), generator)]
    else:
        order = design.sample(rows, 1, generator)[0]
    choice, chances = torch.full((len(probs),), -1), cumulative[order]
    choice[order] = 0
    if probs.shape[1] > 1:
        uniforms = torch.rand(len(order), 1, dtype=torch.float64, generator=generator)
        choice[order] = (chances / chances[:, -1:] <= uniforms).sum(1)
    return choice, order


def processor_joint_probs(probs: Tensor, design: Design) -> Tensor:
    """Probabilities that two processors are both active, when :func:`draw_choices` draws them by a design.

    Args:
        probs: Probability of each processor to train each model, shape ``(P, S)``, summing to a whole number.
        design: A fixed-size design that knows its joint probabilities, unless all processors are equally likely.

    Returns:
        Shape ``(P, P)``, float64, with the row sums on the diagonal; for one model combine them with the models'
        probabilities, `model_joint_probs`.

    Example:
        >>> from lightning_spectral.designs import Systematic
        >>> processor_joint_probs(torch.tensor([[0.5], [0.5], [0.5], [0.5]]), Systematic())[0]
        tensor([0.5000, 0.1667, 0.1667, 0.1667], dtype=torch.float64)
    """
    rows = probs.double().sum(1).clamp(max=1.0)
    able = (rows > 0).double()
    if _all_equal(rows[rows > 0]):
        size, number = round(float(rows.sum())), round(float(able.sum()))
        both = size * (size - 1) / max(number * (number - 1), 1)
        return (torch.outer(able, able) * both).fill_diagonal_(0.0) + rows.diag()
    if not isinstance(design, JointDesign):
        raise TypeError(
            f"{design} does not know its joint probabilities; use a JointDesign, e.g. ConditionalPoisson()."
        )
    return design.joint_inclusion_probs(rows)


def _all_equal(rows: Tensor) -> bool:
    return bool((rows.max() - rows.min()) <= ROUNDING * rows.max())


@dataclass(frozen=True)
class FullParticipation(Sampler):
    """Every client trains every model that it can in every round, whatever its number of processors.

    This is the reference that other samplers approximate; nothing is drawn. All processors count as active for every
    model they can train, so rows of probabilities may sum to more than one. Pairs are in order of clients, then models.

    Args:
        normalize: Whether coefficients count examples, to be divided by their sum; with shares the average is the same.

    Reference:
        The baseline "Full Participation" of Zhang et al. (2024).

    Example:
        >>> population = Population(torch.tensor([[30, 10], [10, 0]]), processors=torch.tensor([1, 1]))
        >>> assignment = FullParticipation().assign(population, None, 0, torch.Generator())
        >>> assignment.clients, assignment.models, assignment.coefficients
        ([0, 0, 1], [0, 1, 0], [0.75, 1.0, 0.25])
    """

    active: float = field(default=math.inf, init=False, repr=False)
    design: None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        check_fields(self, normalize=flag)

    def probs(self, scores: Tensor, round_idx: int = 0) -> Tensor:
        return (scores > 0).double()

    def assign(
        self, population: Population, figures: Tensor | None, round_idx: int, generator: torch.Generator
    ) -> Assignment:
        clients, models = population.trainable.nonzero(as_tuple=True)
        coefficients = population.num_examples.double() if self.normalize else population.shares
        pairs = clients.tolist(), models.tolist(), coefficients[clients, models].tolist()
        return Assignment(population.can.double(), *pairs, active=population.can.sum(0))

    def check(self, population: Population) -> None:
        """Accept every population."""


@dataclass(frozen=True)
class Uniform(Sampler):
    """Every processor that can train something is equally likely to be active, with any of the models it can train.

    With a design, one model and one processor per client, it draws the same cohort as
    :class:`~lightning_spectral.participation.UniformParticipation`; with ``normalize``, its coefficients are the
    numbers of examples too. With equal probabilities, any design gives the same. Arguments as for `Sampler`.

    Reference:
        The baseline "Random" of Zhang et al. (2024).

    Example:
        >>> Uniform(active=1).probs(torch.tensor([[1.0, 1.0], [1.0, 0.0]]))
        tensor([[0.2500, 0.2500],
                [0.5000, 0.0000]], dtype=torch.float64)
    """

    def probs(self, scores: Tensor, round_idx: int = 0) -> Tensor:
        return uniform_probs(scores > 0, self.active)


def uniform_probs(can: Tensor, active: float) -> Tensor:
    """Probabilities with equal row sums, each shared equally among a processor's models, float64, shape ``(P, S)``.

    Args:
        can: Which processor can train which model, bool, shape ``(P, S)``.
        active: Sum m of all probabilities; no more than the number of processors that can train something.
    """
    counts = can.sum(1, keepdim=True)
    chance = min(1.0, active / max(int((counts > 0).sum()), 1))
    return torch.where(can, chance / counts.clamp(min=1).double(), 0.0)


@dataclass(frozen=True)
class RoundRobin(Sampler):
    """Every processor is equally likely to be active; the model it then trains rotates.

    In round t, processor p trains model (p + t) mod c of the c that it can train. Arguments as for `Sampler`.

    Note:
        Coefficients are divided by the probability over many rounds, which is that of :class:`Uniform`. At fixed
        weights, the average over a cycle (as many rounds as the least common multiple of all c) is therefore unbiased.
        A single round is not: clients whose turn it is not are missing from a model, whoever is drawn. Variance figures
        computed from the assignment's probabilities are those of :class:`Uniform`.

    Reference:
        Bhuyan, Moharir & Joshi (2022), "Multi-Model Federated Learning with Provable Guarantees".

    Example:
        >>> sampler, everything = RoundRobin(active=1), torch.ones(2, 2)
        >>> sampler.probs(everything, round_idx=0)
        tensor([[0.5000, 0.0000],
                [0.0000, 0.5000]], dtype=torch.float64)
        >>> sampler.probs(everything, round_idx=1)
        tensor([[0.0000, 0.5000],
                [0.5000, 0.0000]], dtype=torch.float64)
    """

    def probs(self, scores: Tensor, round_idx: int = 0) -> Tensor:
        can = scores > 0
        turn = (torch.arange(len(can))[:, None] + round_idx) % can.sum(1, keepdim=True).clamp(min=1)
        return uniform_probs(can & (can.cumsum(1) - 1 == turn), self.active)

    def long_run_probs(self, scores: Tensor, probs: Tensor) -> Tensor:
        return uniform_probs(scores > 0, self.active)


@dataclass(frozen=True)
class VarianceReduced(Sampler):
    """The base of the three samplers: probabilities with the least total variance of their weighted figures.

    See `assignment_probs`. With a design, no more processors are drawn than have a positive score.

    Args:
        active, design, normalize: As for :class:`Sampler`.
        measure: Whose figures are measured before a round: those of a random sample of this many clients, at least 1,
            or of all if there are no more; all clients' (``"all"``, as published); or no client's (``"last"``, which
            uses the last known values).
    """

    measure: Literal["all", "last"] | int = 1000

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (isinstance(self.measure, str) and self.measure in ("all", "last")):
            check_fields(self, measure=Whole(at_least=1, hint='it is "all", "last" or a number of clients'))

    def probs(self, scores: Tensor, round_idx: int = 0) -> Tensor:
        return assignment_probs(scores, min(self.active, len(scores)))


@dataclass(frozen=True)
class LossVarianceReduced(VarianceReduced):
    """MMFL-LVR: sampling by the clients' losses, which cost no more than one pass over their data.

    A client whose loss is zero is not drawn. Its arguments are those of :class:`VarianceReduced`.

    Reference:
        Zhang et al. (2024), "Towards Optimal Heterogeneous Client Sampling in Multi-Model Federated Learning".

    Example:
        >>> LossVarianceReduced(active=1).probs(torch.tensor([[0.5, 0.5], [0.0, 1.0]]))
        tensor([[0.2500, 0.2500],
                [0.0000, 0.5000]], dtype=torch.float64)
    """

    figure: ClassVar[Figure] = "loss"


@dataclass(frozen=True)
class UpdateVarianceReduced(VarianceReduced):
    """MMFL-GVR: sampling by the norms of the clients' updates, which has the least variance of the average update.

    Measuring an update means training: all clients that are measured train every model in every round, and only
    communication is saved. Its arguments are those of :class:`VarianceReduced`.

    Reference:
        Zhang et al. (2024), Eq. (5).

    Example:
        >>> UpdateVarianceReduced(active=1, measure="last")
        UpdateVarianceReduced(active=1, design=None, normalize=False, measure='last')
    """

    figure: ClassVar[Figure] = "update"


@dataclass(frozen=True)
class StaleUpdateVarianceReduced(VarianceReduced):
    """MMFL-GVR*: sampling by how far the clients' updates are from the last ones that the server has stored.

    It suits algorithms that keep these and average only the differences. Arguments as for `VarianceReduced`.

    Reference:
        Zhang et al. (2024); Jhunjhunwala et al. (2022), FedVARP.

    Example:
        >>> StaleUpdateVarianceReduced(active=1).figure
        'stale update'
    """

    figure: ClassVar[Figure] = "stale update"
