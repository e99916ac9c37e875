"""Runs a client's local epochs in a Trainer of its own, for modules that need all of Lightning."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial, wraps
from typing import Any
from weakref import WeakKeyDictionary

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_spectral.client.batches import ClientData
from lightning_spectral.client.local_hooks import BeforeStep
from lightning_spectral.client.local_task import LocalResult, LocalSettings, LocalTask, Placement, Train
from lightning_spectral.client.user_step import Recorder
from lightning_spectral.plugin.lightning.precision import scaled_by
from lightning_spectral.plugin.lightning.quiet_trainer import quiet_trainer, silence
from lightning_spectral.plugin.lightning.round_counting import num_rounds
from lightning_spectral.plugin.lightning.user_hooks import RUN_HOOKS, is_overridden


class ClientTrainer:
    """Fits sub-models, one client after another, in a quiet Trainer that is created once.

    That Trainer counts as if the client had taken part in all rounds: ``current_epoch`` continues from
    ``round_idx * local_epochs``, and ``max_epochs`` is the number of local epochs in the whole run. ``global_step``
    counts the client's own optimizer steps in this round, from 0.

    Args:
        federation: The Trainer of the rounds.
        schedulers: The user's schedulers, of the optimizers on which clients' are modelled.
    """

    def __init__(self, federation: pl.Trainer, schedulers: Sequence[Any] = ()) -> None:
        self.federation = federation
        self.schedulers = [_StepsOncePerRound(scheduler) for scheduler in schedulers]
        self._trainer: pl.Trainer | None = None
        self._watch = _LocalEpochs()
        self._before_forward: Callable[[], None] | None = None
        self._after_forward: Callable[[], None] | None = None
        self._before_step: WeakKeyDictionary[Optimizer, list[BeforeStep]] = WeakKeyDictionary()

    def prepare(self, module: Any, optimizers: Sequence[Optimizer], settings: LocalSettings) -> Train:
        """Give a new sub-model its optimizers, and return a function that trains it for one client after another.

        Hooks of the run rather than of a client are replaced by Lightning's own. Functions that do nothing would not
        suffice: if ``prepare_data`` is overridden, Lightning synchronises all processes.
        """
        for hook in RUN_HOOKS:
            setattr(module, hook, getattr(pl.LightningModule, hook).__get__(module))
        module.configure_optimizers = lambda: list(optimizers)
        module.lr_schedulers = lambda: self.schedulers[0] if len(self.schedulers) == 1 else self.schedulers or None
        for optimizer in optimizers:
            self._before_step[optimizer] = []
            _step_after_closure(optimizer, self._before_step[optimizer])
        module.training_step = self._between_actions(module.training_step)
        return partial(self._train, module, optimizers, settings.placement)

    def _between_actions(self, training_step: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a user's step in the algorithm's actions before and after each forward pass, if it has any."""

        @wraps(training_step)  # Lightning inspects its arguments
        def step(*args: Any, **kwargs: Any) -> Any:
            if self._before_forward is not None:
                self._before_forward()
            output = training_step(*args, **kwargs)
            if self._after_forward is not None:
                self._after_forward()
            return output

        return step

    def _train(
        self, module: Any, optimizers: Sequence[Optimizer], placement: Placement, task: LocalTask
    ) -> LocalResult:
        local_epochs, recorder = task.download.local_epochs, task.recorder
        batches = _Batches(task.data, recorder, first_epoch=task.download.round_idx * local_epochs)
        if local_epochs == 0 or len(batches) == 0:
            return LocalResult(0, float("nan"))
        trainer, self._trainer = self._trainer or self._new_trainer(), None
        batches.trainer = trainer
        rounds = num_rounds(self.federation)
        _rewind(trainer, batches.first_epoch, -1 if rounds is None else rounds * local_epochs)
        self._watch.begin(task, batches.first_epoch + local_epochs - 1, placement.device)
        self._before_forward, self._after_forward = task.before_forward, task.after_forward
        for optimizer, before_step in zip(optimizers, task.before_step, strict=True):
            self._before_step[optimizer][:] = before_step
        scaler = copy.deepcopy(placement.scaler)  # so that no client inherits another's scale
        with silence(), scaled_by(scaler, self.federation.precision_plugin):
            # an empty list if there is a `validation_step`, so that Lightning does not warn about missing data
            trainer.fit(module, batches, [] if is_overridden(module, "validation_step") else None)
        self._trainer = trainer  # only now: a Trainer that failed is not used again
        return self._watch.result(trainer.global_step, is_automatic=module.automatic_optimization)

    def _new_trainer(self) -> pl.Trainer:
        return quiet_trainer(self.federation, callbacks=[self._watch], limit_val_batches=0)


class _Batches:
    """One client's batches, as a loader with a length: Lightning does not prefetch from such a loader."""

    trainer: pl.Trainer

    def __init__(self, data: ClientData, recorder: Recorder, first_epoch: int) -> None:
        self.data = data
        self.recorder = recorder
        self.first_epoch = first_epoch

    def __len__(self) -> int:
        return self.data.num_batches

    def __iter__(self) -> Iterator[Any]:
        # Lightning asks for more iterators than it uses; nothing happens before the first batch is fetched
        for batch, size in self.data.epoch(self.trainer.current_epoch - self.first_epoch):
            self.recorder.num_examples = size
            yield batch


class _LocalEpochs(pl.Callback):
    """Ends the fit after the client's last local epoch, and sums its losses as the plain loop does."""

    def begin(self, task: LocalTask, last_epoch: int, device: torch.device) -> None:
        self.recorder = task.recorder
        self.last_epoch = last_epoch
        self.total = torch.zeros((), dtype=torch.float64, device=device)
        self.num_losses = self.num_examples = 0

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else None
        if isinstance(loss, Tensor):  # none if `training_step` skips the step or optimises manually
            size = self.recorder.num_examples
            self.total.add_(loss.detach().mean(), alpha=size)
            self.num_losses, self.num_examples = self.num_losses + 1, self.num_examples + size

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.current_epoch == self.last_epoch:  # of the client; `max_epochs` is still that of the run
            trainer.should_stop = True

    def result(self, global_step: int, *, is_automatic: bool) -> LocalResult:
        """Number of steps and mean loss; Lightning also counts steps that a ``training_step`` skipped."""
        mean = float(self.total) / self.num_examples if self.num_examples else float("nan")
        return LocalResult(self.num_losses if is_automatic else global_step, mean)


class _StepsOncePerRound:
    """The result of ``self.lr_schedulers()`` on a client: the user's scheduler to read; only the server steps it."""

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler

    def step(self, *args: Any, **kwargs: Any) -> None: ...  # the learning rate is constant within a round

    def __getattr__(self, name: str) -> Any:
        return getattr(self._scheduler, name)


def _rewind(trainer: pl.Trainer, first_epoch: int, max_epochs: int) -> None:
    """Reset the counters of a Trainer, which otherwise continue from one fit to the next."""
    trainer.should_stop = False  # Lightning 2.4 keeps it from the last fit
    loop = trainer.fit_loop
    loop.max_epochs = max_epochs
    loop.epoch_progress.reset()
    current: Any = loop.epoch_progress.current
    current.ready = current.started = current.processed = current.completed = first_epoch
    loop.epoch_loop.batch_progress.reset()
    loop.epoch_loop.automatic_optimization.optim_progress.reset()
    loop.epoch_loop.manual_optimization.optim_step_progress.reset()


def _step_after_closure(optimizer: Optimizer, before_step: Sequence[BeforeStep]) -> None:
    """Make ``step(closure)`` run the closure first, then local hooks, then the optimizer's own step.

    Lightning computes gradients in a closure that the step calls, so hooks before the step (Frobenius decay, clipping
    of learning rates) would run before there are gradients. Optimizers that need a closure are refused elsewhere.
    """
    step = type(optimizer).step

    def step_after(closure: Any = None, **options: Any) -> Any:
        result = None if closure is None else closure()
        if any(p.grad is not None for group in optimizer.param_groups for p in group["params"]):
            for act in before_step:  # unless `training_step` skipped the step
                act()
        step(optimizer, **options)
        return result

    optimizer.step = step_after  # type: ignore[method-assign]
