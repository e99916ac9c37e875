"""Hooks that run on the server's module: evaluation, and hooks that run once per run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl

from lightning_spectral.client.user_step import call_with_accepted
from lightning_spectral.plugin.client_parallel import log_options
from lightning_spectral.plugin.user_logging import forwarded_logging


def _on_server(hook: str) -> Callable[..., Any]:
    """Make a method that calls the user's hook of the same name, with ``self.log`` forwarded to Lightning's module."""

    def forward(self: ServerHooks, *args: Any) -> Any:
        with forwarded_logging(self.module, self):
            return call_with_accepted(getattr(self.module, hook), *args)

    forward.__name__ = forward.__qualname__ = hook
    forward.__doc__ = f"The user's ``{hook}``, on the server's module."
    return forward


class ServerHooks(pl.LightningModule):
    """Passes Lightning's evaluation hooks on to ``module``, the user's own, which holds the server's weights."""

    module: pl.LightningModule

    validation_step = _on_server("validation_step")
    on_validation_start = _on_server("on_validation_start")
    on_validation_end = _on_server("on_validation_end")
    on_validation_epoch_start = _on_server("on_validation_epoch_start")
    on_validation_epoch_end = _on_server("on_validation_epoch_end")
    on_validation_batch_start = _on_server("on_validation_batch_start")
    on_validation_batch_end = _on_server("on_validation_batch_end")

    test_step = _on_server("test_step")
    on_test_start = _on_server("on_test_start")
    on_test_end = _on_server("on_test_end")
    on_test_epoch_start = _on_server("on_test_epoch_start")
    on_test_epoch_end = _on_server("on_test_epoch_end")
    on_test_batch_start = _on_server("on_test_batch_start")
    on_test_batch_end = _on_server("on_test_batch_end")

    predict_step = _on_server("predict_step")
    on_predict_start = _on_server("on_predict_start")
    on_predict_end = _on_server("on_predict_end")
    on_predict_epoch_start = _on_server("on_predict_epoch_start")
    on_predict_epoch_end = _on_server("on_predict_epoch_end")
    on_predict_batch_start = _on_server("on_predict_batch_start")
    on_predict_batch_end = _on_server("on_predict_batch_end")

    on_fit_end = _on_server("on_fit_end")
    on_train_start = _on_server("on_train_start")
    on_train_end = _on_server("on_train_end")

    def __getattr__(self, name: str) -> Any:
        """Say where an attribute of the user's module is; if forwarded, it could be read here but not set."""
        try:
            return super().__getattr__(name)
        except AttributeError as error:
            own = self.__dict__.get("_modules", {}).get("module")  # not there yet in a module that is being copied
            if own is None or name.startswith("_") or not hasattr(own, name):
                raise
            raise AttributeError(f"{error}; that of your {type(own).__name__} is `.module.{name}`.") from None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the user's ``forward`` with the server's weights."""
        return self.module(*args, **kwargs)

    def log(self, name: str, value: Any, *args: Any, **options: Any) -> None:
        """Log a value, without a warning that it is not synchronised: it is the same in all processes."""
        super().log(name, value, *args, **{**options, **log_options(self)})
