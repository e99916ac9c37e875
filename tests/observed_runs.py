"""Runs with callbacks that evaluate: the same metrics by hand, and a module that shows if they disturb a run."""

import random
from collections.abc import Callable, Mapping
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from federation import Fitted, same_state
from torch import Tensor, nn
from toy_models import LitMLP

import lightning_spectral as ls


@torch.no_grad()
def metrics_by_hand(module: Any, examples: tuple[Tensor, ...]) -> dict[str, float]:
    """What `LitMLP.validation_step` logs, in double precision."""
    x, y = examples
    logits = module.eval()(x)
    picked = logits.double().log_softmax(1)[torch.arange(len(y)), y]
    return {"val_loss": float(-picked.mean()), "val_acc": float((logits.argmax(1) == y).double().mean())}


class Stirring(LitMLP):
    """Its steps change a buffer, take entries out of their batch, change them, and draw from the global generator."""

    def __init__(self) -> None:
        super().__init__(dropout=0.3)
        self.net.insert(1, nn.BatchNorm1d(12))
        self.register_buffer("num_validated", torch.zeros(()))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None if len(batch[0]) == 1 else super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        assert not self.training
        assert self.trainer.validating or self.trainer.sanity_checking
        y, x = batch.pop(), batch[0]
        self.num_validated += 1
        super().validation_step((x.add_(0.1 * torch.randn_like(x)), y), batch_idx)


class Draws(pl.Callback):
    """The states of the global generators after each round."""

    def __init__(self) -> None:
        self.states: list[Any] = []

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        numpys: Any = np.random.get_state()[1]
        self.states.append((torch.get_rng_state().tolist(), random.getstate(), numpys.tolist()))


def acting(**hooks: Callable[..., Any]) -> ls.RoundCallback:
    """A callback with the given hooks, functions of the Trainer, the module and whatever else a hook is told."""
    callback: ls.RoundCallback = type("Acting", (ls.RoundCallback,), {n: staticmethod(h) for n, h in hooks.items()})()
    return callback


def in_round(round_idx: int, **hooks: Callable[[pl.Trainer, Any], object]) -> ls.RoundCallback:
    """A callback with the given hooks, which act in one round only."""

    def acts(hook: Callable[[pl.Trainer, Any], object]) -> Callable[..., object]:
        return lambda trainer, model: hook(trainer, model) if trainer.current_epoch == round_idx else None

    return acting(**{name: acts(hook) for name, hook in hooks.items()})


def halving_first_weight(round_idx: int) -> ls.RoundCallback:
    """Writes a frozen weight before a round, past autograd's version counter."""
    return in_round(round_idx, on_train_epoch_start=lambda trainer, model: model.module.net[0].weight.data.mul_(0.5))


def states_of(fitted: Fitted) -> list[Any]:
    return next(callback.states for callback in fitted.trainer.callbacks if isinstance(callback, Draws))  # type: ignore[attr-defined]


def with_and_without(rows: list[dict[str, float]], word: str) -> tuple[list[Mapping[str, float]], ...]:
    """Rows of metrics, split by whether a name contains a word."""
    return tuple([{n: v for n, v in row.items() if (word in n) == has} for row in rows] for has in (True, False))


def assert_only_adds(word: str, watched: Fitted, plain: Fitted) -> None:
    """Fail unless a watched run is the plain one, but for metrics whose names contain a word; both have `Draws`."""
    assert same_state(watched.tensors, plain.tensors)
    added, others = with_and_without(watched.rows, word)
    assert repr(others) == repr(plain.rows)
    assert all(added)
    assert watched.ledger.rows == plain.ledger.rows
    assert states_of(watched) == states_of(plain)
