"""Where a device trains: a Trainer of its own, on its accelerator, in the precision that the server asks for."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.trainer.states import TrainerFn

from lightning_spectral.client.batches import ClientData
from lightning_spectral.client.device import Device
from lightning_spectral.client.local_loop import LocalLoop, LocalSettings, LocalTrainer, LossLoop, Recorder
from lightning_spectral.errors import DeviceError
from lightning_spectral.network.messages import Start
from lightning_spectral.plugin.callbacks.evaluation import ValidatedBeside
from lightning_spectral.plugin.member import read_optimizers
from lightning_spectral.plugin.trainer import ClientTrainer, convert_now, num_rounds, placement_of, silent_trainer
from lightning_spectral.plugin.user_hooks import as_in_a_step, defines, only_or_all, redirect
from lightning_spectral.protocol.records import Download, LoggedValue
from lightning_spectral.protocol.rng import derived_seed, isolated_rng


class Workplace:
    """A device's Trainer, which the user's module sees as ``self.trainer``.

    It never fits the whole module: it says how many rounds there are and which one this is, and where and in which
    precision sub-models train.

    Args:
        accelerator: As for a Trainer.
        precision: Likewise.
        num_rounds: Number of rounds of the run; ``None`` if it goes on until it is stopped.
    """

    def __init__(self, accelerator: str, precision: Any = "32-true", num_rounds: int | None = None) -> None:
        rounds = -1 if num_rounds is None else num_rounds
        where = {"accelerator": accelerator, "devices": 1, "precision": precision}
        self.trainer = silent_trainer(_RoundsOfServer, max_epochs=rounds, **where)
        self.trainer.state.fn = TrainerFn.FITTING

    @property
    def torch_device(self) -> torch.device:
        """Where sub-models are."""
        return self.trainer.strategy.root_device

    def place(self, module: Any) -> None:
        """Convert a module to the precision of training, and move it to where that takes place."""
        convert_now(module, self.trainer.precision_plugin)
        module.to(self.torch_device)

    def arrive(self, download: Download) -> Download:
        """Note which round it is, and that the client trains; return the download where sub-models are."""
        self.trainer.training = True
        current: Any = self.trainer.fit_loop.epoch_progress.current
        current.ready = current.started = current.processed = current.completed = download.round_idx
        return replace(download, tensors={n: tensor.to(self.torch_device) for n, tensor in download.tensors.items()})

    def make_device(self, module: Any, start: Start, data: Callable[[Download], ClientData]) -> Device:
        """Make what trains the clients of one run; the user's module is theirs alone."""
        self.place(module)
        module.trainer = self.trainer
        optimizers, schedules = read_optimizers(module)
        schedulers = partial(only_or_all, [AtTheServer() for _ in schedules])

        def attach(recorder: Recorder, client: Any) -> None:
            redirect(client, {"log": recorder.log, "lr_schedulers": schedulers})
            client.trainer = ClientTrainer(self.trainer, client, optimizers, recorder, start.instructions.says_nothing)

        placement = placement_of(self.trainer, self.torch_device, module)
        settings = LocalSettings(placement, start.local_hooks, defines, redirect)
        train: LocalTrainer = LossLoop if start.measures else LocalLoop
        return Device(module, start.instructions, optimizers, data, settings, train, attach, owned=True)

    @torch.no_grad()
    def evaluate(self, module: Any, batches: Iterator[Any], download: Download) -> Mapping[str, LoggedValue]:
        """What ``validation_step`` logs on held-out examples, as means, with the download's weights in the module."""
        self.place(module)
        module.trainer = self.trainer
        download = self.arrive(download)
        self.trainer.validating = True
        beside = ValidatedBeside(module, download.tensors, self.trainer)
        seed = derived_seed(download.seed, "client evaluation", download.round_idx, download.unit.client_id)
        with isolated_rng(seed, [self.torch_device]), beside.entered():  # a step may draw random numbers
            module.eval()
            for batch_idx, batch in enumerate(batches):
                beside.step(as_in_a_step(batch, module, self.trainer), batch_idx)
            logged = beside.logged()
        return {name: LoggedValue(value, prog_bar=False, logger=True) for name, value in logged.items()}


class _RoundsOfServer(pl.Trainer):
    """A Trainer whose steps are the server's, one a round, for schedules that are made on a device too."""

    @property
    def estimated_stepping_batches(self) -> int | float:
        rounds = num_rounds(self)
        return math.inf if rounds is None else rounds


class AtTheServer:
    """What ``self.lr_schedulers()`` returns on a device."""

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the server steps, once a round."""

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(
            f"Schedulers are at the server, so a device cannot read their `{name}`; the learning rate of this round is "
            "in `self.optimizers().param_groups`."
        )


def check_accelerator(accelerator: str) -> None:
    """Raise `DeviceError` if this machine does not have an accelerator."""
    try:
        Workplace(accelerator)
    except (MisconfigurationException, ValueError, RuntimeError) as error:
        raise DeviceError(
            f"`accelerator={accelerator!r}` cannot be used on this device, {error} Leave it out, or name what is here."
        ) from error
