"""Weights of clients in the average of a round."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

from lightning_spectral.algorithms.filter import Filter, Fit, Form, Plan, ServerEnd
from lightning_spectral.arguments import OneOf
from lightning_spectral.participation import Sampler
from lightning_spectral.protocol.records import WorkUnit

Named = Literal["examples", "uniform"]
Weigh = Callable[[int, int], float]


@dataclass(frozen=True)
class Weights(Filter):
    """Gives the clients of a round other weights than their numbers of examples.

    Args:
        by: ``"examples"`` for numbers of examples, the default without this filter; ``"uniform"`` for equal weights; or
            a function of the client's id and its number of examples, which returns a weight of at least 0: of a module,
            not of a script or a notebook, if processes are to share the run.

    Note:
        An average divides by the sum of the weights of the clients that report, so only ratios matter. The weights of
        an unbiased sampler are not divided, and would be biased by others: they are refused.

    Example:
        >>> Weights("uniform")
        Weights(by='uniform')
    """

    takes: ClassVar[Form | None] = None
    weighs: ClassVar[bool] = True

    by: Named | Weigh

    def __post_init__(self) -> None:
        if not callable(self.by):
            OneOf(get_args(Named))("by", self.by)

    def __repr__(self) -> str:
        """The name of a function, whose address differs from run to run."""
        by = f"{self.by.__module__}.{self.by.__qualname__}" if callable(self.by) else repr(self.by)
        return f"Weights(by={by})"

    def check(self, plan: Plan) -> None:
        who = plan.participation
        if isinstance(who, Sampler) and not who.normalize:
            raise ValueError(
                f"The weights of {type(who).__name__} make its average unbiased, and Weights would replace them; leave "
                "Weights out, or use `clients_per_round`, or normalize=True."
            )

    def server(self, fit: Fit) -> "WeightsEnd":
        return WeightsEnd(self, fit)


@dataclass(eq=False)
class WeightsEnd(ServerEnd):
    """Weighs the clients for which a round opens."""

    choice: Weights
    fit: Fit

    def weigh(self, units: Sequence[WorkUnit]) -> Sequence[WorkUnit]:
        by, sizes, weighed = self.choice.by, self.fit.sizes(), list[WorkUnit]()
        for unit in units:
            client_id, size = unit.client_id, int(sizes[unit.client_id])
            weight = by(client_id, size) if callable(by) else size if by == "examples" else size > 0
            if not 0.0 <= weight < math.inf:
                raise ValueError(f"Weights must be finite and at least 0, got {weight} for client {client_id}.")
            weighed.append(unit._replace(coefficient=float(weight)))
        return weighed
