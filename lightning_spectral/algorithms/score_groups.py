"""What the user's optimizer must be like to step one vector of scores in place of many weights."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from torch import nn
from torch.optim import Optimizer

from lightning_spectral.errors import SpectralWarning


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
