"""Checks on the weights that Zampling compresses, and on the optimizer that steps their scores."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Sequence

from torch import nn
from torch.optim import Optimizer

from lightning_spectral.errors import SpectralWarning
from lightning_spectral.nn.zampling.compressed import CompressedWeight

LEAST_MOVE = 0.3  # below it, accuracy is far below that of a larger learning rate: studies/zampling/rates.py


def check_score_groups(template: Optimizer, weights: Sequence[nn.Parameter]) -> None:
    """Check that one optimizer steps all scores with the same options; warn that weight decay does not reach them."""
    wanted = {id(weight) for weight in weights}
    groups = [group for group in template.param_groups if any(id(p) in wanted for p in group["params"])]
    if not groups:
        return
    held = {id(p) for group in groups for p in group["params"]} & wanted
    first, *others = ({name: value for name, value in group.items() if name != "params"} for group in groups)
    if held != wanted or any(options != first for options in others):
        raise ValueError(
            "Zampling trains one vector of scores for all compressed weights, so one optimizer must step them with the "
            f"same options; your {type(template).__name__} holds only some of them, or in groups whose options differ. "
            "Put them in one group, or keep the others dense with `exclude=`."
        )
    if first.get("weight_decay"):
        warnings.warn(
            f"weight_decay={first['weight_decay']:g} of {type(template).__name__} is not applied to Zampling's scores, "
            "since it would pull every probability to 0; it applies to dense parameters only.",
            SpectralWarning,
            stacklevel=3,
        )


def check_unchanged(drawn: Sequence[CompressedWeight], found: Sequence[CompressedWeight]) -> None:
    """Raise ``ValueError`` unless the probabilities were drawn for the weights that are compressed now."""
    if changed := sorted({weight.name for weight in set(drawn) ^ set(found)}):
        raise ValueError(
            f"Zampling's probabilities were drawn when the module was wrapped, and {', '.join(changed)} changed since: "
            "parameters were frozen, unfrozen, added or removed. Build layers in `__init__` rather than in `setup`, "
            "freeze or unfreeze them first, and then wrap the module in a new FederatedModule, which draws new "
            "probabilities."
        )


def check_none_untrained(compressed: Sequence[str], untrained: Collection[str]) -> None:
    """Raise ``ValueError`` if no optimizer steps a compressed weight: it would lose its value for a random one."""
    if lost := [name for name in compressed if name in untrained]:
        raise ValueError(
            f"Zampling replaces {', '.join(lost)} with random weights, which your optimizer does not hold and would "
            "not train; give it all parameters of the module, or list the layers in `exclude` to leave them as they "
            "are."
        )


def hardly_moved(moved: float, num_clients: int) -> Sequence[str]:
    r"""A warning if clients' bits say more about chance than about training; ``moved`` is a root mean square.

    Drawing the bits of K clients moves their mean by some :math:`0.4 / \sqrt{K}`. This adds up over rounds: after some
    K of them, most bits have settled by chance, unless training has moved the probabilities by then.
    """
    if moved * num_clients >= LEAST_MOVE:
        return ()
    return (
        f"clients move their probabilities by only {moved:.2g} a round (root mean square), and drawing their bits "
        "moves the mean by more, so chance decides what is learned. Raise the learning rate: it applies to scores, "
        "which have to travel from 0 to 1, not to weights. The paper uses Adam with 0.1. During a warm-up, this is "
        "expected.",
    )
