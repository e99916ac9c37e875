"""Trains one federation on a device and on the CPU, interrupted and not, and compares the weights."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from lightning_spectral.plugin.callbacks.record import RoundHistory
from lightning_spectral.plugin.doctor.federations import ModuleAndData
from lightning_spectral.plugin.lightning.quiet_trainer import silence, silent_trainer
from lightning_spectral.protocol.rng import isolated_rng
from lightning_spectral.protocol.stage_clock import STAGES

ROUNDS = 2
# Of a tensor's largest value. Devices round sums in another order, by about 1e-7 in each step; a wrong step is of 1e-2.
TOLERANCE = 1e-4


@dataclass(frozen=True)
class Finding:
    """What a self-check has found.

    Attributes:
        difference: Largest difference to the weights trained on the CPU, in units of a tensor's largest value.
        resumed: The same between a run resumed after its first round and one that was not interrupted.
        tolerance: How large both may be.
        seconds: Wall-clock seconds of each stage on the device.
    """

    difference: float
    resumed: float
    tolerance: float
    seconds: Mapping[str, float]

    @property
    def is_right(self) -> bool:
        """Whether both differences are within the tolerance; not-a-number is not."""
        return self.difference <= self.tolerance and self.resumed <= self.tolerance


def self_check(make: Callable[[], ModuleAndData], accelerator: str) -> Finding:
    """Check one algorithm, by a function that makes a new federation, always the same.

    On the CPU, runs have to be equal bit for bit: the reference is then a repetition.
    """
    expected, _, _ = _fit(make, "cpu")
    with tempfile.TemporaryDirectory() as folder:
        saved = Path(folder, "saved")
        whole, device, seconds = _fit(make, accelerator, callbacks=[ModelCheckpoint(saved, "{epoch}", save_top_k=-1)])
        resumed, _, _ = _fit(make, accelerator, resume=saved / "epoch=0.ckpt")
    tolerance = 0.0 if device.type == "cpu" else TOLERANCE
    return Finding(largest_difference(whole, expected), largest_difference(resumed, whole), tolerance, seconds)


def largest_difference(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """The largest difference between two states, in units of each tensor's largest expected value.

    Example:
        >>> round(largest_difference({"w": torch.tensor([2.0, 4.4])}, {"w": torch.tensor([2.0, 4.0])}), 3)
        0.1
        >>> largest_difference({"w": torch.tensor([float("nan")])}, {"w": torch.ones(1)})
        nan
    """
    differences = []
    for name, tensor in expected.items():
        difference = (found[name].double() - tensor.double()).abs().max()
        differences.append(difference / tensor.double().abs().max().clamp(min=torch.finfo(torch.float32).tiny))
    return float(torch.stack(differences).max())


def _fit(
    make: Callable[[], ModuleAndData],
    accelerator: str,
    *,
    callbacks: Sequence[pl.Callback] = (),
    resume: Path | None = None,
) -> tuple[dict[str, Tensor], torch.device, dict[str, float]]:
    """The weights after the last round, the device, and the seconds of each stage."""
    model, data = make()
    history = RoundHistory()
    with _reproducibly():
        trainer = trainer_on(accelerator, max_epochs=ROUNDS, callbacks=[history, *callbacks])
        device = trainer.strategy.root_device
        with isolated_rng(0, [device]):
            trainer.fit(model, data, ckpt_path=resume)
    weights = {
        f"{name}.{tensor_name}": tensor.cpu()
        for name, member in model.members.items()
        for tensor_name, tensor in member.module.state_dict().items()
    }
    return weights, device, {stage: _seconds(history, stage) for stage in STAGES}


def trainer_on(accelerator: str, **options: Any) -> pl.Trainer:
    """A Trainer with one device that prints nothing, and writes only the checkpoints that callbacks write."""
    saves = any(isinstance(each, ModelCheckpoint) for each in options.get("callbacks", ()))
    return silent_trainer(accelerator=accelerator, devices=1, enable_checkpointing=saves, **options)


@contextmanager
def _reproducibly() -> Iterator[None]:
    """No message, one thread (tensors are tiny), and no convolution in fewer digits than the CPU has."""
    threads = torch.get_num_threads()
    exact = torch.backends.cudnn.flags(enabled=True, deterministic=True, allow_tf32=False)
    with silence(), warnings.catch_warnings(), exact:
        warnings.simplefilter("ignore")
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(threads)


def _seconds(history: RoundHistory, stage: str) -> float:
    name = f"fl/seconds_{stage}"
    return sum(value for row in history.rows for key, value in row.items() if key.endswith(name))
