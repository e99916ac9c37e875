"""Clients of equal size whose classes are skewed in two stages: superclasses, then the classes of each."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from lightning_spectral.arguments import Number, Whole, check_fields, flag
from lightning_spectral.partition.base import Partitioner
from lightning_spectral.partition.dirichlet import (
    Floats,
    Ints,
    class_concentration,
    deal_by_class,
    draw_dirichlet_counts,
)
from lightning_spectral.partition.partition import Partition

__all__ = ["PachinkoPartitioner", "TwoStages", "two_stages"]


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
            superclasses in the data set and :math:`p_s` those of the classes in superclass s; their sums are
            :math:`\alpha` and :math:`\beta`. ``True``: :math:`\alpha` for each superclass and :math:`\beta` for each
            class.

    Note:
        The two conventions differ greatly. For CIFAR-100, with 500 examples per client and concentrations of 1 and 10,
        a client with ample supply sees 22 of the 100 classes; with ``symmetric=True``, 83.

    Reference:
        Li & McCallum (2006); Reddi et al. (2021), whose split of CIFAR-100 over 500 clients is ``alpha=0.1, beta=10,
        symmetric=True``. Korzhenkov & Louizos (2024) use 100 clients and concentrations of 1 and 10, and do not say
        which convention.

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
            superclasses=_whole_numbers,
            alpha=Number(above=0, hint="use IIDPartitioner for iid clients"),
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
        return deal_by_class(labels, self.num_clients, law, generator)


@dataclass(frozen=True)
class TwoStages:
    """A law of counts: draws the number of examples of each superclass, then of each of its classes.

    This is equivalent to drawing one label after another, each a superclass and then a class: a superclass runs out
    exactly when all its classes have, so the draw of superclasses does not depend on that of their classes.
    """

    members: Sequence[Ints]  # positions of the classes of each superclass
    over_superclasses: Floats  # concentration of each superclass, shape (S,)
    over_classes: Sequence[Floats]  # for each superclass, the concentration of its classes

    def __call__(self, left: Ints, num_draws: int, rng: np.random.Generator) -> Ints:
        """Draw a client's priors, and from them its counts, shape ``(K,)``, at most ``left``."""
        supply = np.array([left[own].sum() for own in self.members])
        totals = draw_dirichlet_counts(self.over_superclasses, supply, num_draws, rng)
        counts = np.zeros_like(left)
        for own, prior, total in zip(self.members, self.over_classes, totals, strict=True):
            counts[own] = draw_dirichlet_counts(prior, left[own], int(total), rng)
        return counts


def two_stages(class_sizes: Ints, superclasses: Ints, alpha: float, beta: float, symmetric: bool) -> TwoStages:
    """Create the law for classes of given sizes and superclasses, both of shape ``(K,)``.

    Example:
        >>> two_stages(np.array([2, 1, 3]), np.array([5, 5, 7]), 2.0, 3.0, symmetric=False)
        TwoStages(members=[array([0, 1]), array([2])],
            over_superclasses=array([1., 1.]), over_classes=[array([2., 1.]), array([3.])])
    """
    members = [np.flatnonzero(superclasses == one) for one in np.unique(superclasses)]
    sizes = np.array([class_sizes[own].sum() for own in members])
    return TwoStages(
        members,
        class_concentration(sizes, alpha, symmetric),
        [class_concentration(class_sizes[own], beta, symmetric) for own in members],
    )


def _whole_numbers(argument: str, values: object) -> tuple[int, ...]:
    """Whole numbers as a tuple of plain integers, so that a tensor, an array and a YAML list are the same choice."""
    if isinstance(values, Tensor | np.ndarray):
        values = values.tolist()
    if not isinstance(values, Sequence) or isinstance(values, str):
        raise TypeError(f"`{argument}` must be a sequence of whole numbers, one for each class, got {values!r}.")
    if not values:
        raise ValueError(f"`{argument}` must hold a whole number for each class, got none.")
    return tuple(Whole()(f"{argument}[{k}]", value) for k, value in enumerate(values))
