"""The settings of a Trainer that a federation cannot honour, and what to do instead."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType

import lightning.pytorch as pl

# By name, because not all versions of Lightning have all of them.
REFUSED_CALLBACKS: Mapping[str, str] = MappingProxyType(
    {
        "BaseFinetuning": "which parameters are trained is fixed when a fit begins; freeze some in your module, fit, "
        "unfreeze them and fit again",
        "BatchSizeFinder": "it tries sizes on whole rounds; set FederatedDataModule(batch_size=...)",
        "GradientAccumulationScheduler": "a round adds up its clients' updates already; choose "
        "FederatedDataModule(batch_size=...) for local steps",
        "LearningRateFinder": "it moves the server's learning rate, round by round; set that of clients in "
        "`configure_optimizers`",
        "ModelPruning": "clients train copies of the weights that it replaces; prune after the fit",
        "SpikeDetection": "it reads the loss of each batch, and a batch is a client's turn; monitor `fl/loss`: "
        "EarlyStopping('fl/loss', check_finite=True)",
        "StochasticWeightAveraging": "it follows the steps of one optimizer; use WeightAveraging, which averages the "
        "server's weights round by round",
    }
)


def check_callbacks(callbacks: Iterable[pl.Callback]) -> None:
    """Refuse, by name, callbacks of Lightning that would act differently on a federation, or break it.

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


def check_rounds(trainer: pl.Trainer) -> None:
    """Raise ``TypeError`` unless the number of rounds is an ``int``, which Lightning asserts without a message."""
    if not isinstance(trainer.max_epochs, int):
        raise TypeError(
            f"`max_epochs` must be an int, the number of rounds, or -1 for no limit, got {trainer.max_epochs!r}."
        )


def check_clipping(trainer: pl.Trainer) -> None:
    """Raise ``ValueError`` if the Trainer is asked to clip gradients: it would clip only the server's."""
    if trainer.state.fn == "fit" and trainer.gradient_clip_val:
        raise ValueError(
            f"`Trainer(gradient_clip_val={trainer.gradient_clip_val})` would not reach the gradients of clients; give "
            f"FederatedModule(..., local_hooks=[GradientClip({trainer.gradient_clip_val})]) instead, which clips by "
            "norm in every local step."
        )


def check_own_optimizers(federation: pl.LightningModule) -> None:
    """Raise ``ValueError`` if LightningCLI has replaced the server's and the clients' optimizers."""
    if "configure_optimizers" in vars(federation):
        raise ValueError(
            "`optimizer` of LightningCLI would replace the server's optimizer and the clients'; leave it out. Clients "
            "get theirs from `configure_optimizers` of your own module, and the server's is `model.server_optimizer`."
        )
