"""Checks that a sampler finds the figures it is based on, and that all clients that it draws are kept."""

from __future__ import annotations

from collections.abc import Mapping

import lightning.pytorch as pl

from lightning_spectral.algorithms import Algorithm
from lightning_spectral.participation import Sampler
from lightning_spectral.simulation import Conditions

UPLOADING = ("bind", "half", "round", "side", "add", "client_side")  # what decides the meaning of an upload


def check_sampler(sampler: Sampler, algorithms: Mapping[str, Algorithm]) -> None:
    """Check that the figures a sampler is based on are available from the algorithms of all models, by name."""
    for name, algorithm in algorithms.items():
        of_model = f" of {name!r}" if name else ""
        if "update" in sampler.figure and _norms_are_unknown(type(algorithm)):
            raise ValueError(
                f"{type(sampler).__name__} needs update norms, and {type(algorithm).__name__}{of_model} changes what "
                "is uploaded or added without saying whether uploads are new values of the tensors sent: set "
                "`updates_have_norms` in the class, to False if they are changes or anything else."
            )
        if "update" in sampler.figure and not algorithm.updates_have_norms:
            raise ValueError(
                f"{type(sampler).__name__} needs update norms, which {type(algorithm).__name__}{of_model} does not "
                "provide; use LossVarianceReduced."
            )
        if sampler.figure == "stale update" and not algorithm.updates_are_expected:
            raise ValueError(
                f"{type(sampler).__name__} compares updates with earlier ones, which "
                f"{type(algorithm).__name__}{of_model} does not keep; use algorithm=StaleUpdates(), or "
                "UpdateVarianceReduced."
            )


def _norms_are_unknown(kind: type[Algorithm]) -> bool:
    """Whether a class inherits `updates_have_norms` from a class with other uploads, of which alone it is known."""
    owners = {name: _place(kind, name) for name in ("updates_have_norms", *UPLOADING)}
    return owners["updates_have_norms"] > min(owners[name] for name in UPLOADING)


def _place(kind: type, name: str) -> int:
    """The position of the class that defines an attribute, among a class and its bases."""
    return next((place for place, owner in enumerate(kind.__mro__) if name in vars(owner)), len(kind.__mro__))


def check_measurable(sampler: Sampler, modules: Mapping[str, pl.LightningModule]) -> None:
    """Raise ``ValueError`` if a sampler would measure losses with a ``training_step`` that itself trains."""
    if sampler.figure != "loss" or getattr(sampler, "measure", "last") == "last":
        return
    for name, module in modules.items():
        if not module.automatic_optimization:
            raise ValueError(
                f"{type(sampler).__name__} measures losses with `training_step`, but "
                f"{type(module).__name__}.training_step{f' ({name!r})' if name else ''} uses manual optimisation and "
                'would train; use measure="last", or UpdateVarianceReduced.'
            )


def check_limit(limit: int | float, trainer: pl.Trainer) -> None:
    """Raise ``ValueError`` if a sampler's cohort is to be cut: its coefficients are meant for all drawn clients."""
    if not trainer.fast_dev_run and limit != 0 and not (isinstance(limit, float) and limit == 1.0):  # type: ignore[attr-defined]
        raise ValueError(
            f"limit_train_batches={limit} would leave out clients that a sampler drew, and bias the average; lower "
            "its `active` instead."
        )


def check_over_selection(conditions: Conditions, *, absolute: bool) -> None:
    """Raise ``ValueError`` if late clients are left out of a sum whose coefficients are meant for all drawn clients."""
    if absolute and conditions.clock is not None and conditions.clock.keep_first is not None:
        raise ValueError(
            f"VirtualClock(keep_first={conditions.clock.keep_first}) leaves out clients that a sampler drew, and every "
            "step would be too short; leave it out, or give the sampler normalize=True."
        )
