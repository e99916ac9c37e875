"""Weights of clients in the average of a round: others than numbers of examples, or none for more local steps."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, get_args

import torch

from lightning_spectral.algorithms.filter import Arrival, Filter, Fit, Form, Opened, Plan, ServerEnd, Unusable
from lightning_spectral.arguments import OneOf
from lightning_spectral.client.user_optimizer import work_of
from lightning_spectral.errors import warn
from lightning_spectral.filters.personal import Personal
from lightning_spectral.participation import Sampler
from lightning_spectral.protocol.exchange import both_ways
from lightning_spectral.protocol.per_client import Assigned
from lightning_spectral.protocol.records import ClientOutcome, WorkUnit

Named = Literal["examples", "uniform"]
Weigh = Callable[[int, int], float]


@dataclass(frozen=True)
class Weights(Filter):
    """Gives the clients of a round other weights than their numbers of examples; refused with unbiased samplers.

    Args:
        by: ``"examples"`` for numbers of examples, the default without this filter; ``"uniform"`` for equal weights; or
            a function of the client's id and its number of examples, which returns a weight of at least 0: of a module,
            not of a script or a notebook, if processes are to share the run. Only ratios matter.

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
        check_divided(self, plan)

    def server(self, fit: Fit) -> "WeightsEnd":
        return WeightsEnd(self, fit)


def check_divided(weighing: Filter, plan: Plan) -> None:
    """Raise ``ValueError`` if weights are those of an unbiased sampler, which a filter would change."""
    who, kind = plan.participation, type(weighing).__name__
    if isinstance(who, Sampler) and not who.normalize:
        raise ValueError(
            f"The weights of {type(who).__name__} make its average unbiased, and {kind} would replace them; leave "
            f"{kind} out, or use `clients_per_round`, or normalize=True."
        )


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
        if callable(by) and weighed and not any(unit.coefficient for unit in weighed):
            warn("`Weights` gives 0 to all clients of a round, which then leaves the model as it is.", 3)
        return weighed


@dataclass(frozen=True)
class FedNova(Filter):
    r"""Divides each client's change by its work, so that clients which take more steps count for no more.

    With weights p, which sum to one, changes :math:`\Delta_i` and work :math:`\tau_i`, trained parameters move by

    .. math:: \Big(\sum_i p_i \tau_i\Big) \sum_i p_i \frac{\Delta_i}{\tau_i}, \qquad
        \tau_i = \sum_{k=1}^{n_i} \frac{1 - \rho^k}{1 - \rho}

    for :math:`n_i` steps of SGD with momentum :math:`\rho`, and likewise with ``nesterov`` and ``dampening``, as the
    user's optimizer says; for others :math:`\tau_i = n_i`. The first sum is logged, as ``fl/mean_work``. Each batch is
    taken to be a step, at the same learning rate throughout a turn; proximal terms are not counted.

    Raises:
        ValueError: Over a network, where devices could claim any number of steps; beside ``Personal(epochs=...)`` or an
            unbiased sampler; in a round, with several momenta, one of 1 or more, or, as in `Ditto`, more steps.

    Reference:
        Wang et al. (2020), Tackling the objective inconsistency problem in heterogeneous federated optimization.

    Example:
        >>> FedNova().needs
        ('new_values', 'one_sum')
    """

    reads_single: ClassVar[bool] = True
    reads_steps: ClassVar[bool] = True
    weighs: ClassVar[bool] = True
    needs: ClassVar[Sequence[str]] = ("new_values", "one_sum")

    def check(self, plan: Plan) -> None:
        check_divided(self, plan)
        if any(isinstance(each, Personal) and each.epochs for each in plan.filters):
            raise ValueError("FedNova counts all steps, and those of Personal(epochs=...) are its own; leave one out.")

    def server(self, fit: Fit) -> "FedNovaEnd":
        if fit.batch_sizes is None:
            raise ValueError("FedNova divides by steps, which devices over a network could only claim; leave it out.")
        return FedNovaEnd(fit, fit.batch_sizes)


@dataclass(eq=False)
class FedNovaEnd(ServerEnd):
    """Divides changes when they arrive, and multiplies their mean."""

    fit: Fit
    batch_sizes: Assigned[int]

    def begin(self, opened: Opened) -> None:
        self._options = opened.cohort.options
        work_of(1, self._options)  # refuses what it cannot count
        self._trained = {name for name, p in self.fit.half.server.named_parameters() if p.requires_grad}

    @torch.no_grad()
    def arrive(self, arrival: Arrival) -> Arrival:
        sent, upload, steps, owner = arrival.sent, arrival.upload, arrival.upload.num_steps, arrival.sent.unit.client_id
        most = sent.steps_in(-(-int(self.fit.sizes()[owner]) // self.batch_sizes.of(owner)))
        if steps > most or (sent.local_epochs and not steps):
            raise Unusable("error", f"FedNova divides by steps of one optimizer, got {steps} for {most} batches")
        both, work = both_ways(sent.tensors, upload.tensors), work_of(steps, self._options) or 1.0
        moved = {n: own.double().lerp(upload.tensors[n].double(), 1 / work) for n, own in both if n in self._trained}
        return replace(arrival, upload=replace(upload, tensors={**upload.tensors, **moved}))

    def close(self, outcomes: Sequence[ClientOutcome]) -> Mapping[str, float]:
        works = [(o.unit.coefficient, work_of(o.num_steps, self._options)) for o in outcomes if not o.left_out]
        mean = math.fsum(weight * work for weight, work in works) / (math.fsum(weight for weight, _ in works) or 1.0)
        for parameter in self.fit.half.server.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(mean)
        return {"mean_work": mean}
