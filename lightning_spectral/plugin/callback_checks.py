"""Which of Lightning's callbacks cannot act on a federation, and what to do instead."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType

import lightning.pytorch as pl

# By name, because not every version of Lightning has all of them.
REFUSED_CALLBACKS: Mapping[str, str] = MappingProxyType(
    {
        "BaseFinetuning": "which parameters are trained is fixed when a fit begins; freeze some in your module, fit, "
        "unfreeze them and fit again",
        "BatchSizeFinder": "it would try sizes on whole rounds; set FederatedDataModule(batch_size=...)",
        "GradientAccumulationScheduler": "a round adds up its clients' updates already; choose "
        "FederatedDataModule(batch_size=...) for local steps",
        "LearningRateFinder": "it would move the server's learning rate in every round; set that of clients in "
        "`configure_optimizers`",
        "ModelPruning": "clients train copies of the weights that it replaces; prune after the fit",
        "SpikeDetection": "it reads the loss of each batch, and a batch is a client's turn; monitor `fl/loss`: "
        "EarlyStopping('fl/loss', check_finite=True)",
        "StochasticWeightAveraging": "it follows the steps of one optimizer; use WeightAveraging, which averages the "
        "server's weights round by round",
    }
)


def check_callbacks(callbacks: Iterable[pl.Callback]) -> None:
    """Refuse, by name, callbacks of Lightning that would do something else to a federation, or break it.

    The Tuner's are among them: it adds them to the Trainer's.

    Raises:
        ValueError: If there is one, or a subclass of one.

    Example:
        >>> check_callbacks([pl.callbacks.GradientAccumulationScheduler({0: 2})])
        Traceback (most recent call last):
        ValueError: GradientAccumulationScheduler cannot act on a federation: a round adds up its clients' updates ...
    """
    for callback in callbacks:
        for base in type(callback).__mro__:
            if base.__name__ in REFUSED_CALLBACKS and base.__module__.startswith("lightning.pytorch"):
                raise ValueError(
                    f"{type(callback).__name__} cannot act on a federation: {REFUSED_CALLBACKS[base.__name__]}."
                )
