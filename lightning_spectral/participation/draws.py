"""Which model each processor draws: independently, or by a design with a fixed number of active processors."""

import torch
from torch import Tensor

from lightning_spectral.designs.base import Design, JointDesign
from lightning_spectral.participation.uniform import UniformParticipation

__all__ = ["draw_choices", "processor_joint_probs"]

# Row sums and cumulative sums are subject to rounding: numbers this close count as equal, or as certain.
ROUNDING = 1e-12


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

    Example:
        >>> draw_choices(torch.tensor([[0.0, 1.0], [0.0, 0.0]]), None, torch.Generator())
        (tensor([ 1, -1]), tensor([0]))
    """
    cumulative = probs.double().cumsum(1)
    if design is None:
        choice = _independent(cumulative, generator)
        return choice, (choice >= 0).nonzero()[:, 0]
    order = _active(cumulative[:, -1].clamp(max=1.0), design, generator)
    choice = torch.full((len(probs),), -1)
    choice[order] = _picks(cumulative[order], generator)
    return choice, order


def _independent(cumulative: Tensor, generator: torch.Generator) -> Tensor:
    rows = cumulative[:, -1:]
    cumulative = torch.where(rows > 1 - ROUNDING, cumulative / rows, cumulative)  # certain despite rounding
    uniforms = torch.rand(len(cumulative), 1, dtype=torch.float64, generator=generator)
    choice = (cumulative <= uniforms).sum(1)
    return torch.where(choice < cumulative.shape[1], choice, -1)


def _active(rows: Tensor, design: Design, generator: torch.Generator) -> Tensor:
    able = rows.nonzero()[:, 0]
    if _all_equal(rows[able]):
        return able[UniformParticipation(round(float(rows.sum()))).cohort(len(able), generator)]
    return design.sample(rows, 1, generator)[0]


def _picks(cumulative: Tensor, generator: torch.Generator) -> Tensor:
    if cumulative.shape[1] == 1:
        return torch.zeros(len(cumulative), dtype=torch.int64)
    uniforms = torch.rand(len(cumulative), 1, dtype=torch.float64, generator=generator)
    return (cumulative / cumulative[:, -1:] <= uniforms).sum(1)


def processor_joint_probs(probs: Tensor, design: Design) -> Tensor:
    """Probabilities that two processors are both active, when :func:`draw_choices` draws them by a design.

    Args:
        probs: Probability of each processor to train each model, shape ``(P, S)``, summing to a whole number.
        design: A fixed-size design that knows its joint probabilities, unless all processors are equally likely.

    Returns:
        Shape ``(P, P)``, float64, with the row sums on the diagonal; for one model combine them with the models'
        probabilities, :func:`~lightning_spectral.functional.model_joint_probs`.

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
