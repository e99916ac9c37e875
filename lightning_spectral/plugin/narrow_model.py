"""The smaller models that a federation of sub-models by width has trained inside the whole one."""

from __future__ import annotations

from typing import Any

from lightning_spectral.algorithms import WidthSharding
from lightning_spectral.algorithms.width import KEEP_RATIO
from lightning_spectral.errors import check_is
from lightning_spectral.plugin.module import FederatedModule


def narrow_model(model: FederatedModule, width: float) -> Any:
    """Return your module at a smaller width, to evaluate or save: the first ceil(r N) of each layer's N channels.

    The result is an ordinary module of your class, with smaller parameters under the same names and layers that know
    their sizes. With ``averages_per_width`` it has the running averages of that width. Otherwise it has the first
    entries of the whole module's averages, which are those of other inputs, and may evaluate badly.

    Args:
        model: The federation, after a fit with `WidthSharding`.
        width: Keep ratio r of the channels, in (0, 1].

    Returns:
        A copy, without a Trainer.

    Raises:
        TypeError: If ``model`` is not a `FederatedModule`.
        ValueError: If it has another algorithm, channels other than the first ones, or ``scaler``; if ``width`` is out
            of range, or each width has its own averages and ``width`` is not among ``step_widths``.

    Example:
        >>> import torch
        >>> import lightning_spectral as ls
        >>> from lightning_spectral.models import MLP, LitClassifier
        >>> lit = LitClassifier(MLP(6, [8], 3), num_classes=3)
        >>> lit.example_input_array = torch.zeros(2, 6)
        >>> model = ls.FederatedModule(lit, algorithm=ls.WidthSharding(), clients_per_round=2)
        >>> ls.narrow_model(model, 0.25).model.head
        Linear(in_features=2, out_features=3, bias=True)
    """
    check_is("model", model, FederatedModule)
    algorithm = model.algorithm
    if not isinstance(algorithm, WidthSharding):
        raise ValueError(
            f"Models by width are what WidthSharding trains, and this federation has {type(algorithm).__name__}; train "
            "with algorithm=WidthSharding(...), or take the whole model: `model.module`."
        )
    return algorithm.narrow(model.module, model.state, KEEP_RATIO("width", width))
