"""Evaluation of several models: each on its own data, under its own name."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

from lightning_spectral.client.user_step import call_with_accepted
from lightning_spectral.plugin.host import Share
from lightning_spectral.plugin.member import Member
from lightning_spectral.plugin.multi_model_data import MultiModelDataModule
from lightning_spectral.plugin.saved_rounds import SavedRounds
from lightning_spectral.plugin.user_hooks import BATCH_HOOKS, is_overridden
from lightning_spectral.plugin.user_logging import forwarded_logging


def _on_each(hook: str) -> Callable[..., None]:
    """Make a method that calls the hook of the same name on every model's module."""

    def forward(self: MultiModelHooks, *args: Any) -> None:
        for member in self.members.values():
            with forwarded_logging(member.module, member):
                call_with_accepted(getattr(member.module, hook), *args)

    forward.__name__ = forward.__qualname__ = hook
    forward.__doc__ = f"The users' ``{hook}``, on the server's modules."
    return forward


def _on_one(hook: str, position: int) -> Callable[..., Any]:
    """Make a method that calls the hook of the same name on the model to whose data a batch belongs.

    Args:
        hook: Name of the hook.
        position: Position of the dataloader's index, which Lightning may leave out, among its arguments.
    """

    def forward(self: MultiModelHooks, *args: Any) -> Any:
        index = args[position] if len(args) > position else 0
        with self.evaluating(index) as (member, own_index):
            return call_with_accepted(getattr(member.module, hook), *args[:position], own_index)

    forward.__name__ = forward.__qualname__ = hook
    forward.__doc__ = f"The user's ``{hook}``, of the model whose data the batch is from."
    return forward


class MultiModelHooks(SavedRounds):
    """Passes Lightning's evaluation hooks on to the modules of several models."""

    validation_step = _on_one("validation_step", 2)
    on_validation_start = _on_each("on_validation_start")
    on_validation_end = _on_each("on_validation_end")
    on_validation_epoch_start = _on_each("on_validation_epoch_start")
    on_validation_batch_start = _on_one("on_validation_batch_start", 2)
    on_validation_batch_end = _on_one("on_validation_batch_end", 3)

    test_step = _on_one("test_step", 2)
    on_test_start = _on_each("on_test_start")
    on_test_end = _on_each("on_test_end")
    on_test_epoch_start = _on_each("on_test_epoch_start")
    on_test_epoch_end = _on_each("on_test_epoch_end")
    on_test_batch_start = _on_one("on_test_batch_start", 2)
    on_test_batch_end = _on_one("on_test_batch_end", 3)

    on_fit_end = _on_each("on_fit_end")

    def on_train_start(self) -> None:
        """Call the users' hooks, and go on with a resumed run."""
        _on_each("on_train_start")(self)
        super().on_train_start()

    def on_train_end(self) -> None:
        """Call the users' hooks."""
        for member in self.members.values():
            member.on_train_end()

    @property
    def multi_data(self) -> MultiModelDataModule:
        """The data of all models."""
        raise NotImplementedError

    def _loader(self, index: int) -> tuple[str, int, int]:
        """The model of one of all evaluation loaders, the loader's index in it, and how many loaders it has."""
        return self.multi_data.evaluated("test" if self.trainer.testing else "validate")[index]

    @contextmanager
    def evaluating(self, index: int) -> Iterator[tuple[Member, int]]:
        """Let the model to which an evaluation loader belongs log under its own name within the block.

        Args:
            index: Index among the loaders of all models.
        """
        name, own_index, count = self._loader(index)
        member = self.members[name]
        member.seat.suffix = f"/dataloader_idx_{own_index}" if count > 1 else ""
        try:
            with forwarded_logging(member.module, member):
                yield member, own_index
        finally:
            member.seat.suffix = ""

    def predict_step(self, *args: Any) -> Any:
        """Refuse: Lightning does not say which model is meant.

        Raises:
            NotImplementedError: Always.
        """
        name = next(iter(self.members))
        raise NotImplementedError(
            "`Trainer.predict` does not say which model is meant; give it one: "
            f"trainer.predict(model.models[{name!r}], loader)."
        )

    def on_validation_epoch_end(self) -> None:
        """Call the users' hooks, and log the round, so that loggers can plot evaluation against it."""
        for member in self.members.values():
            with forwarded_logging(member.module, member):
                member.module.on_validation_epoch_end()
        super().on_validation_epoch_end()

    def move_batches(self) -> None:
        """Let each model's own batch hooks act on its evaluation batches, those of its data module first.

        Raises:
            ValueError: If the data module of all models has such a hook.
        """
        whole = self.trainer.datamodule  # type: ignore[attr-defined]
        for hook in BATCH_HOOKS:
            if isinstance(whole, MultiModelDataModule) and is_overridden(whole, hook):
                raise ValueError(
                    f"`{type(whole).__name__}.{hook}` would not be told which model a batch is for; define it in the "
                    "FederatedDataModule of each model that needs it."
                )
            own = {name: owner for name in self.members for owner in self._moving(name) if is_overridden(owner, hook)}
            if own:
                setattr(self, hook, partial(self._move, hook, own))

    def _moving(self, name: str) -> list[Any]:
        """What may have batch hooks for a model; the last that has them moves its batches."""
        data = self._data_or_none(name)
        return [self.members[name].module, *([] if data is None else [data])]

    def _move(self, hook: str, own: Mapping[str, Any], batch: Any, *args: Any) -> Any:
        """Call one model's batch hook, or Lightning's own if it has none; clients move batches while they train."""
        if isinstance(batch, Share):
            return batch
        name, own_index, _ = self._loader(args[-1])
        if name in own:
            return getattr(own[name], hook)(batch, *args[:-1], own_index)
        return getattr(super(), hook)(batch, *args)
