"""Where ``self.log`` of a user's module leads, by way of the module's own overrides of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl

from lightning_spectral.plugin.lightning.user_hooks import is_overridden
from lightning_spectral.server.metrics import ALWAYS

Log = Callable[..., None]


def redirect_logging(module: pl.LightningModule, log: Log, log_dict: Log) -> None:
    """Let a module log with other functions than Lightning's, which take the same arguments.

    If its class overrides ``log`` or ``log_dict``, this still acts, and what it passes to ``super()`` goes to ``log``:
    a class is put between the user's and Lightning's, whose own ``log_dict`` calls ``log`` for each entry.
    """
    target: Any = module
    if is_overridden(module, "log") or is_overridden(module, "log_dict"):
        kind = type(module)
        between = type("RedirectedLog", (pl.LightningModule,), {"log": staticmethod(log)})
        target.__class__ = type(kind.__name__, (kind, between), {"__module__": kind.__module__})
    else:
        target.log, target.log_dict = log, log_dict


@contextmanager
def forwarded_logging(module: pl.LightningModule, to: pl.LightningModule) -> Iterator[None]:
    """Forward ``module.log`` and ``module.log_dict`` within the block to the module that Lightning trains."""
    target: Any = module
    kind = type(module)

    def log(name: str, value: Any, *args: Any, **options: Any) -> None:
        _check_names([name])
        to.log(name, value, *args, **options)

    def log_dict(dictionary: Any, *args: Any, **options: Any) -> None:
        _check_names(dictionary)
        to.log_dict(dictionary, *args, **options)

    redirect_logging(module, log, log_dict)
    try:
        yield
    finally:
        target.__class__ = kind
        for name in vars(module).keys() & {"log", "log_dict"}:
            delattr(target, name)


def _check_names(names: Iterable[str]) -> None:
    if taken := sorted(ALWAYS.intersection(names)):
        raise ValueError(
            f"An evaluation hook logs {', '.join(taken)}, under which the federation logs a metric of its own; choose "
            "another name."
        )
