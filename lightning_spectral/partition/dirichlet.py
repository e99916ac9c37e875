"""Clients whose classes are skewed: by one Dirichlet prior, or by two stages, superclass then class."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lightning_spectral.arguments import Number, Whole, check_fields, flag
from lightning_spectral.partition.labels import by_class
from lightning_spectral.partition.partition import Partition, Partitioner
from lightning_spectral.partition.sizes import Floats, Sizes, check_sizes, client_shares, numbers, numpy_generator

Ints = npt.NDArray[np.int64]
# Maps the numbers of examples left in each class, shape (K,), and a client's total to its numbers in each class.
CountLaw = Callable[[Ints, int, np.random.Generator], Ints]
SlotLaw = Callable[[Ints, Ints, np.random.Generator], Ints]  # likewise all classes, of all clients: `draw_slot_classes`
MANY = 50_000  # clients from which draws are made for blocks of them: others than one by one, from the same law
BLOCK = 4096


@dataclass(frozen=True)
class DirichletPartitioner(Partitioner):
    r"""Each client draws its labels from its own class prior :math:`q_c \sim \mathrm{Dir}(\alpha p)`.

    Clients are served one after another, in random order. A client draws its labels one by one from its
    prior, without replacement: a class that has run out gets probability 0 and the others are renormalised.
    Every example is used exactly once.

    Args:
        num_clients: Number of clients C, at least 1.
        alpha: Concentration, positive, dimensionless; small means few classes per client. For clients that
            all look like the data set use :class:`IIDPartitioner`, not a large ``alpha``.
        symmetric: ``False``: concentration :math:`\alpha p`, with p the class proportions of the data set (sum
            :math:`\alpha`). ``True``: concentration :math:`\alpha` for each class present (sum :math:`\alpha K`).
        sizes: How much each client has, as for `IIDPartitioner`; ``None`` for equal sizes.

    Note:
        Two conventions use the same letter: with ten equal classes, ``alpha=1`` here is ``alpha=0.1, symmetric=True``.
        The clients served last share what is left, so their mixture follows their prior less closely: with ten equal
        classes, 100 clients of 500 examples and ``alpha=1``, a client sees 5.0 classes on average if no class ever runs
        out, and 4.6 in the actual split. For a given generator the split is fixed only within one version of numpy,
        whose streams may change between versions: compare :meth:`Partition.fingerprint`.

    Reference:
        Hsu, Qi & Brown (2019). Conventions: Korzhenkov & Louizos (2024); with ``symmetric=True``, Niu et al. (2022).

    Example:
        >>> labels = torch.arange(10).repeat(100)
        >>> partitioner = DirichletPartitioner(num_clients=20, alpha=1.0)
        >>> partition = partitioner(1000, labels, torch.Generator().manual_seed(0))
        >>> partition.sizes.unique(), labels[partition[0]].unique()
        (tensor([50]), tensor([...]))
    """

    num_clients: int
    alpha: float
    symmetric: bool = False
    sizes: Sizes = None

    needs_labels: ClassVar[bool] = True

    def __post_init__(self) -> None:
        alpha = Number(above=0, hint="towards infinity it is IIDPartitioner, towards 0 LabelsPerClient(..., 1)")
        check_fields(self, num_clients=Whole(at_least=1), alpha=alpha, symmetric=flag)
        check_fields(self, sizes=partial(check_sizes, num_clients=self.num_clients))

    def split(self, num_examples: int, labels: Tensor | None, generator: torch.Generator) -> Partition:
        assert labels is not None, "__call__ checks it"
        sizes = np.unique(labels.cpu().numpy(), return_counts=True)[1]
        concentration = class_concentration(sizes, self.alpha, self.symmetric)
        of_few, of_many = draw_dirichlet_counts, partial(draw_dirichlet_slots, concentration)
        draw_slots = of_many if self.num_clients >= MANY else partial(draw_slot_classes, partial(of_few, concentration))
        return deal_by_class(labels, self.num_clients, draw_slots, generator, self.sizes)


def class_concentration(sizes: Ints, total: float, symmetric: bool) -> Floats:
    """Concentration of a prior over classes: as their sizes, with the sum ``total``, or ``total`` for each class."""
    base = np.ones(len(sizes)) if symmetric else sizes / sizes.sum()
    return np.asarray(total * base, dtype=np.float64)


def draw_dirichlet_counts(concentration: Floats, left: Ints, num_draws: int, rng: np.random.Generator) -> Ints:
    """Draw a client's prior, and from it how many examples of each class the client gets, of those that are left."""
    return draw_class_counts(log_dirichlet(concentration, rng), left, num_draws, rng)


def draw_class_counts(log_prior: Floats, supply: Ints, num_draws: int, rng: np.random.Generator) -> Ints:
    """Draw how often each class comes up when labels are drawn one by one, without replacement, from a prior.

    The law is exact and takes at most ``1 + (number of classes that run out)`` multinomial draws. Drawing from the
    renormalised prior of the classes that still have examples is the same as drawing from the full prior and skipping
    the labels of classes that have run out. So all missing labels are drawn at once, and of each class the first
    ``supply`` are accepted; what was skipped is drawn again, without the classes that have run out. If the prior has no
    mass left on the others, the rest is a uniform draw from the remaining examples.

    Args:
        log_prior: Logarithm of the class probabilities up to a constant, shape ``(K,)``; ``-inf`` is zero.
        supply: Examples of each class, shape ``(K,)``.
        num_draws: Labels to draw, at most the sum of ``supply``.
        rng: Source of randomness.
    """
    counts = np.zeros_like(supply)
    while missing := int(num_draws - counts.sum()):
        live = np.flatnonzero(counts < supply)
        left, log_live = (supply - counts)[live], log_prior[live]
        # only live classes: numpy's multinomial gives rounding leftovers to the last class, even at probability 0
        peak = log_live.max()
        if peak == -np.inf:
            counts[live] += rng.multivariate_hypergeometric(left, missing)
        else:
            weights = np.exp(log_live - peak)
            counts[live] += np.minimum(rng.multinomial(missing, weights / weights.sum()), left)
    return counts


def log_dirichlet(concentration: Floats, rng: np.random.Generator) -> Floats:
    """Logarithm of a Dirichlet draw, or of one for each row, up to a constant, even where a draw would underflow.

    A gamma variable of shape ``a`` is one of shape ``a + 1`` times ``U ** (1 / a)``, with U uniform; ``-log U`` is a
    standard exponential. Nothing underflows in log space, so even ``a = 1e-6`` keeps the order of all classes. Only
    ``a = 0``, itself an underflow, gives ``-inf``.
    """
    exponential = rng.standard_exponential(concentration.shape)
    with np.errstate(over="ignore", divide="ignore"):
        return np.asarray(np.log(rng.standard_gamma(concentration + 1.0)) - exponential / concentration)


def deal_by_class(
    labels: Tensor, num_clients: int, draw_slots: SlotLaw, generator: torch.Generator, sizes: Sizes = None
) -> Partition:
    """Deal all examples to clients, which are served one after another, in random order.

    ``draw_slots`` says which class each client gets its examples from, of only the classes that are present, in sorted
    order; within a class, examples are assigned at random.
    """
    class_sizes = np.unique(labels.cpu().numpy(), return_counts=True)[1]
    order, client_sizes = client_shares(sizes, len(labels), num_clients, generator)
    class_of_slot = draw_slots(class_sizes, client_sizes.numpy(), numpy_generator(generator))
    # both sides list the classes in order, with equal counts; within a class the order is random
    slots = torch.from_numpy(class_of_slot).argsort(stable=True)
    clients = order.repeat_interleave(client_sizes)[slots]
    return Partition.from_assignment(clients[by_class(labels, generator).argsort()], num_clients)


def draw_slot_classes(draw: CountLaw, class_sizes: Ints, client_sizes: Ints, rng: np.random.Generator) -> Ints:
    """Draw the class of every slot, client by client, for clients served in the given order.

    There are as many slots as the sum of ``client_sizes``, which is at most that of ``class_sizes``.
    """
    left, ends = class_sizes.copy(), client_sizes.cumsum()
    slots = np.empty(client_sizes.sum(), dtype=np.int64)
    for start, end in zip(ends - client_sizes, ends, strict=True):
        counts = draw(left, end - start, rng)
        slots[start:end] = np.repeat(np.arange(len(counts)), counts)
        left -= counts
    return slots


def draw_dirichlet_slots(
    concentration: Floats, class_sizes: Ints, client_sizes: Ints, rng: np.random.Generator
) -> Ints:
    """Draw the same for `draw_dirichlet_counts`, for blocks of clients at a time.

    Until a class runs out, clients do not depend on each other: their priors and labels are drawn together. Those
    before the first one that asks for more than there is keep theirs. That one keeps what there is and draws the rest
    from its prior, as in `draw_class_counts`, and the next block begins with the classes that are left.
    """
    left, slots, first = class_sizes.copy(), list[Ints](), 0
    while first < len(client_sizes):
        sizes, live = client_sizes[first : first + BLOCK], np.flatnonzero(left)
        log_priors = log_dirichlet(np.broadcast_to(concentration[live], (len(sizes), len(live))), rng)
        weights = np.exp(log_priors - np.maximum(log_priors.max(1, keepdims=True), np.finfo(float).min))
        has_mass = weights.sum(1) > 0  # of a client without any the prior is zero on all that is left
        weights[~has_mass] = 1.0
        counts = rng.multinomial(sizes, weights / weights.sum(1, keepdims=True))
        fits = ((counts.cumsum(0) <= left[live]).all(1) & has_mass).cumprod().astype(bool)
        num_whole = int(fits.sum())
        slots.append(np.repeat(np.tile(live, num_whole), counts[:num_whole].ravel()))
        left[live] -= counts[:num_whole].sum(0)
        first += num_whole
        if num_whole < len(sizes):
            supply = left[live]
            own = np.minimum(counts[num_whole], supply) * has_mass[num_whole]
            own += draw_class_counts(log_priors[num_whole], supply - own, int(sizes[num_whole] - own.sum()), rng)
            slots.append(np.repeat(live, own))
            left[live] -= own
            first += 1
    return np.concatenate(slots)


@dataclass(frozen=True)
class PachinkoPartitioner(Partitioner):
    r"""Each client draws superclasses from its own prior, and classes from its own prior for each superclass.

    Pachinko allocation, the usual split of CIFAR-100: a client's priors are :math:`\mathrm{Dir}(\alpha p)` over the
    superclasses and :math:`\mathrm{Dir}(\beta p_s)` over the classes of superclass s. For each label, a superclass is
    drawn and then one of its classes, without replacement. A class that has run out is removed and the others *of its
    superclass* are renormalised; likewise for superclasses. Clients are served one after another, in random order.
    Every example is used exactly once and sizes differ by at most one.

    Args:
        num_clients: Number of clients C, at least 1.
        superclasses: Superclass of each class, any whole numbers: class k belongs to ``superclasses[k]``.
        alpha: Concentration over superclasses, positive, dimensionless; small means few superclasses per client.
        beta: Concentration over the classes of each superclass, positive, dimensionless.
        symmetric: ``False``: concentrations :math:`\alpha p` and :math:`\beta p_s`, with p the proportions of the
            superclasses in the data set and :math:`p_s` those of the classes in superclass s, with sums :math:`\alpha`
            and :math:`\beta`. ``True``: :math:`\alpha` for each superclass and :math:`\beta` for each class.

    Note:
        The two conventions differ greatly. For CIFAR-100, with 500 examples per client and concentrations of 1 and 10,
        a client with ample supply sees 22 of the 100 classes; with ``symmetric=True``, 83.

    Reference:
        Li & McCallum (2006); Reddi et al. (2021), whose split of CIFAR-100 over 500 clients is ``alpha=0.1, beta=10,
        symmetric=True``. Korzhenkov & Louizos (2024) use 100 clients, concentrations 1 and 10, and name no convention.

    Example:
        >>> labels = torch.arange(6).repeat(100)
        >>> partitioner = PachinkoPartitioner(20, superclasses=[0, 0, 0, 1, 1, 1], alpha=0.1, beta=10.0)
        >>> partition = partitioner(600, labels, torch.Generator().manual_seed(0))
        >>> partition.sizes.unique(), labels[partition[0]].unique()
        (tensor([30]), tensor([...]))
    """

    num_clients: int
    superclasses: Sequence[int]
    alpha: float
    beta: float
    symmetric: bool = False

    needs_labels: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_fields(
            self,
            num_clients=Whole(at_least=1),
            superclasses=partial(numbers, rule=Whole(), of="class", kind="whole number"),
            alpha=Number(above=0, hint="towards infinity it is IIDPartitioner, towards 0 LabelsPerClient(..., 1)"),
            beta=Number(above=0),
            symmetric=flag,
        )

    def split(self, num_examples: int, labels: Tensor | None, generator: torch.Generator) -> Partition:
        assert labels is not None, "__call__ checks it"
        classes, class_sizes = np.unique(labels.cpu().numpy(), return_counts=True)
        if classes[0] < 0 or classes[-1] >= len(self.superclasses):
            raise ValueError(
                f"`superclasses` must name the superclass of each class, got {len(self.superclasses)} of them, but "
                f"labels from {classes[0]} to {classes[-1]}; give one for each class, from class 0."
            )
        law = two_stages(class_sizes, np.asarray(self.superclasses)[classes], self.alpha, self.beta, self.symmetric)
        return deal_by_class(labels, self.num_clients, partial(draw_slot_classes, law), generator)


def two_stages(class_sizes: Ints, superclasses: Ints, alpha: float, beta: float, symmetric: bool) -> CountLaw:
    """Law that draws the number of examples of each superclass, then of each of its classes.

    That equals drawing one label after another, each a superclass and then a class: a superclass runs out exactly when
    all its classes have, so its draw does not depend on theirs. Sizes and superclasses of classes have shape ``(K,)``.
    """
    members = [np.flatnonzero(superclasses == one) for one in np.unique(superclasses)]
    sizes = np.array([class_sizes[own].sum() for own in members])
    over_superclasses = class_concentration(sizes, alpha, symmetric)
    over_classes = [class_concentration(class_sizes[own], beta, symmetric) for own in members]

    def draw(left: Ints, num_draws: int, rng: np.random.Generator) -> Ints:
        supply = np.array([left[own].sum() for own in members])
        totals = draw_dirichlet_counts(over_superclasses, supply, num_draws, rng)
        counts = np.zeros_like(left)
        for own, prior, total in zip(members, over_classes, totals, strict=True):
            counts[own] = draw_dirichlet_counts(prior, left[own], int(total), rng)
        return counts

    return draw
