"""Lightning's hooks that act on the server's modules: each is passed on to the users' modules, which may log."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import lightning.pytorch as pl

from lightning_spectral.client.user_step import call_with_accepted
from lightning_spectral.plugin.federation.federation import Federation
from lightning_spectral.plugin.lightning.logs import forwarded_logging


def on_each(hook: str) -> Callable[..., None]:
    """Make a method that calls the hook of the same name on every user's module."""

    def forward(self: ForwardedHooks, *args: Any) -> None:
        self.call_users(hook, *args)

    forward.__name__ = forward.__qualname__ = hook
    forward.__doc__ = f"The user's ``{hook}``, on the server's module."
    return forward


def on_one(hook: str, position: int = 2) -> Callable[..., Any]:
    """Make a method that calls the hook of the same name on the module to whose data a batch belongs.

    The dataloader's index has a position among the hook's arguments, and Lightning may leave it out.
    """

    def forward(self: ForwardedHooks, *args: Any) -> Any:
        with self.evaluating(args, position) as (module, own_args):
            return call_with_accepted(getattr(module, hook), *own_args)

    forward.__name__ = forward.__qualname__ = hook
    forward.__doc__ = f"The user's ``{hook}``, on the server's module."
    return forward


class ForwardedHooks(pl.LightningModule):
    """Passes evaluation, and hooks that run once per run, on to the modules of a federation."""

    federation: Federation

    validation_step = on_one("validation_step")
    on_validation_start = on_each("on_validation_start")
    on_validation_end = on_each("on_validation_end")
    on_validation_epoch_start = on_each("on_validation_epoch_start")
    on_validation_batch_start = on_one("on_validation_batch_start")
    on_validation_batch_end = on_one("on_validation_batch_end", 3)

    test_step = on_one("test_step")
    on_test_start = on_each("on_test_start")
    on_test_end = on_each("on_test_end")
    on_test_epoch_start = on_each("on_test_epoch_start")
    on_test_epoch_end = on_each("on_test_epoch_end")
    on_test_batch_start = on_one("on_test_batch_start")
    on_test_batch_end = on_one("on_test_batch_end", 3)

    def evaluating(self, args: tuple[Any, ...], position: int) -> AbstractContextManager[Any]:
        """Within the block, let the module log to which an evaluation batch belongs; yields it and its own arguments.

        Of the arguments of one of Lightning's hooks, the one at ``position`` is the dataloader's index.
        """
        raise NotImplementedError

    def call_users(self, hook: str, *args: Any) -> None:
        """Call a hook of every user's module, which logs under the model's name."""
        for member in self.federation.members.values():
            with forwarded_logging(member.owner.module, member.owner):  # type: ignore[arg-type]
                call_with_accepted(getattr(member.owner.module, hook), *args)
