"""What the user's optimizer must be like to step one vector of scores in place of many weights, and how fast."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Sequence

from torch import nn
from torch.optim import Optimizer

from lightning_spectral.errors import SpectralWarning

LEAST_MOVE = 0.3  # below it, accuracy is far below that of a larger learning rate: studies/zampling/rates.py


def check_score_groups(template: Optimizer, weights: Sequence[nn.Parameter]) -> None:
    """Check that one optimizer steps all scores with the same options, and warn that weight decay does not act on them.

    Args:
        template: One of the user's optimizers.
        weights: The weights that scores stand for.

    Raises:
        ValueError: If it steps only some of them, or in parameter groups of different options.
    """
    wanted = {id(weight) for weight in weights}
    groups = [group for group in template.param_groups if any(id(p) in wanted for p in group["params"])]
    if not groups:
        return
    held = {id(p) for group in groups for p in group["params"]} & wanted
    first, *others = ({name: value for name, value in group.items() if name != "params"} for group in groups)
    if held != wanted or any(options != first for options in others):
        raise ValueError(
            "Zampling has one vector of scores for all compressed weights, so one optimizer steps them, with the same "
            f"options; your {type(template).__name__} has them in groups that differ, or only some of them. Put them "
            "into one group, or keep the others dense with `exclude=`."
        )
    if first.get("weight_decay"):
        warnings.warn(
            f"weight_decay={first['weight_decay']:g} of {type(template).__name__} does not act on the scores of "
            "Zampling, whose probabilities it would pull to 0; it acts on what is dense.",
            SpectralWarning,
            stacklevel=3,
        )


def check_none_untrained(compressed: Sequence[str], untrained: Collection[str]) -> None:
    """Raise ``ValueError`` if no optimizer steps a weight that is compressed: it would lose its value for a random one.

    Args:
        compressed: Names of the compressed weights.
        untrained: Names of the parameters that no optimizer steps.
    """
    if lost := [name for name in compressed if name in untrained]:
        raise ValueError(
            f"Zampling replaces {', '.join(lost)} with random numbers, and your optimizer, which lacks them, would not "
            "train these; give it all parameters of the module, or name the layers in `exclude`, which leaves them as "
            "they are."
        )


def hardly_moved(moved: float, num_clients: int) -> Sequence[str]:
    r"""A warning if clients' bits say more about chance than about training.

    Drawing the bits of K clients moves their mean by some :math:`0.4 / \sqrt{K}`. This adds up over rounds: after some
    K of them, most bits have settled by chance, unless training has moved the probabilities by then.

    Args:
        moved: How far a client moves a probability in a round, root mean square.
        num_clients: Number of clients K in the round.

    Example:
        >>> hardly_moved(0.004, num_clients=10)[0][:66]
        'clients move their probabilities by only 0.004 a round (root mean '
        >>> hardly_moved(0.1, num_clients=10)
        ()
    """
    if moved * num_clients >= LEAST_MOVE:
        return ()
    return (
        f"clients move their probabilities by only {moved:.2g} a round (root mean square), and drawing their bits "
        "moves the mean by more, so chance decides what is learned. Raise the learning rate: it acts on scores, which "
        "have to travel from 0 to 1, and not on weights. The paper uses Adam with 0.1. If a schedule warms up, nothing "
        "is wrong.",
    )
