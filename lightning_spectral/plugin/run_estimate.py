"""Estimates how long a run will take, from one round on copies."""

from __future__ import annotations

import copy
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import lightning.pytorch as pl
import torch
from lightning.pytorch.profilers import SimpleProfiler

from lightning_spectral.errors import check_is
from lightning_spectral.plugin.callbacks.progress import duration
from lightning_spectral.plugin.data.data_module import FederatedDataModule
from lightning_spectral.plugin.data.multi_model import MultiModelDataModule
from lightning_spectral.plugin.lightning.quiet_trainer import quiet_trainer, silence
from lightning_spectral.plugin.lightning.round_counting import num_rounds
from lightning_spectral.plugin.lightning.stages import PROFILED, action_name
from lightning_spectral.plugin.module import FederatedModule
from lightning_spectral.plugin.multi_model import MultiModelModule
from lightning_spectral.protocol.rng import isolated_rng

Federation: TypeAlias = FederatedModule | MultiModelModule
FederationData: TypeAlias = FederatedDataModule | MultiModelDataModule


@dataclass(frozen=True)
class RunEstimate:
    """The cost of one round, and of the whole run if all rounds are like it.

    Attributes:
        seconds: Wall-clock seconds of one round by stage: plan, refresh, sample, load, train, aggregate, apply,
            validate, and Lightning's own work as ``"other"``.
        num_rounds: Number of rounds of the run; ``None`` if it has no fixed end.
        num_validations: Number of rounds that are followed by validation.
        peak_memory_bytes: Peak memory: on a CUDA device, that of tensors during the round; otherwise that of the
            process since it started. ``None`` if the system does not report it.

    Example:
        >>> estimate = RunEstimate({"train": 3.0, "validate": 1.0}, num_rounds=10, num_validations=5)
        >>> estimate.total_seconds
        35.0
    """

    seconds: Mapping[str, float]
    num_rounds: int | None
    num_validations: int
    peak_memory_bytes: int | None = None

    @property
    def seconds_per_round(self) -> float:
        """Seconds of a round without validation."""
        return sum(seconds for stage, seconds in self.seconds.items() if stage != "validate")

    @property
    def total_seconds(self) -> float:
        """Seconds of all rounds and validations; infinite for a run without an end."""
        if self.num_rounds is None:
            return float("inf")
        validation = self.seconds.get("validate", 0.0)
        return self.num_rounds * self.seconds_per_round + self.num_validations * validation

    def __str__(self) -> str:
        whole = sum(self.seconds.values())
        lines = [f"{stage:<10s} {seconds:9.3f} s {seconds / whole:6.1%}" for stage, seconds in self.seconds.items()]
        if self.num_rounds is None:
            lines.append(f"{duration(self.seconds_per_round)} per round, without an end")
        else:
            lines.append(
                f"{duration(self.total_seconds)} for {self.num_rounds} rounds and {self.num_validations} validations"
            )
        if self.peak_memory_bytes is not None:
            lines.append(f"{self.peak_memory_bytes / 1e9:.2f} GB of memory at most")
        return "\n".join(lines)


def estimate(trainer: pl.Trainer, model: Federation, data: FederationData) -> RunEstimate:
    """Run one round on a copy of the model and print how long ``trainer.fit(model, data)`` will take.

    The model, its optimizers, the Trainer and the global random generators stay as they are; nothing is logged or
    saved. The first round has to build what later rounds reuse, so for short rounds the estimate is an upper bound. The
    copy is a second model in memory.

    Args:
        trainer: The Trainer of the run. Its device, precision and limits apply; its callbacks and loggers do not.
        model: The model to fit, or several: a `MultiModelModule`.
        data: The data to fit it on; for several models, a `MultiModelDataModule`.

    Example:
        >>> from torch.utils.data import TensorDataset
        >>> from lightning_spectral.partition import IIDPartitioner
        >>> class LitLine(pl.LightningModule):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.line = torch.nn.Linear(3, 1)
        ...     def training_step(self, batch, batch_idx):
        ...         return self.line(batch[0]).square().mean()
        ...     def configure_optimizers(self):
        ...         return torch.optim.SGD(self.parameters(), lr=0.1)
        >>> data = FederatedDataModule(TensorDataset(torch.ones(20, 3)), IIDPartitioner(num_clients=4))
        >>> trainer = pl.Trainer(max_epochs=100, accelerator="cpu", logger=False, enable_checkpointing=False)
        >>> found = estimate(trainer, FederatedModule(LitLine(), clients_per_round=2), data)
        plan ...
        >>> found.total_seconds == 100 * found.seconds_per_round
        True
    """
    check_is("trainer", trainer, pl.Trainer)
    if isinstance(model, MultiModelModule):
        check_is("data", data, MultiModelDataModule)
    else:
        check_is("model", model, FederatedModule)
        check_is("data", data, FederatedDataModule)
    if trainer.world_size > 1:
        raise ValueError(
            f"An estimate runs in one process, got a Trainer of {trainer.world_size}; give it one with devices=1."
        )
    found = _one_round(trainer, model, data)
    print(found)
    return found


def _one_round(trainer: pl.Trainer, model: Federation, data: FederationData) -> RunEstimate:
    device = trainer.strategy.root_device
    profiler, clock = SimpleProfiler(), _Clock()
    scratch = quiet_trainer(
        trainer,
        max_epochs=1,
        callbacks=[clock],
        profiler=profiler,
        limit_train_batches=trainer.limit_train_batches,
        limit_val_batches=trainer.limit_val_batches,
    )
    data.num_clients  # noqa: B018  # partitions are drawn here, for the run as well
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    with silence(), isolated_rng(model.seed, [device]):
        scratch.fit(_copy(model), _copy_of_data(data))
    seconds = {stage: sum(profiler.recorded_durations.get(action_name(stage), [])) for stage in PROFILED}
    seconds["other"] = max(0.0, clock.seconds - sum(seconds.values()))
    rounds = num_rounds(trainer)
    validates = action_name("validate") in profiler.recorded_durations
    validations = (rounds or 0) // (trainer.check_val_every_n_epoch or 1) if validates else 0
    return RunEstimate(seconds, rounds, validations, _peak_memory(device))


def _copy(model: Federation) -> Federation:
    """A copy without the Trainer that the model may be attached to, and without what a failed fit left."""
    members = list(model.members.values())
    attached = [(module, module._trainer) for module in (model, *members)]
    try:
        for module in (model, *members):
            module.trainer = None
        return copy.deepcopy(model)
    except Exception as error:
        raise ValueError(
            f"An estimate runs a round on a copy of the model, which cannot be copied: {error}. Fit it with "
            "`Trainer(max_epochs=1)` instead, and look at the time."
        ) from error
    finally:
        for module, trainer in attached:
            module.trainer = trainer


def _copy_of_data(data: FederationData) -> FederationData:
    """A copy that a Trainer can be attached to; examples and partitions are the same."""
    copied = copy.copy(data)
    if isinstance(copied, MultiModelDataModule):
        copied.modules = {name: copy.copy(module) for name, module in copied.modules.items()}
    return copied


class _Clock(pl.Callback):
    """Seconds of a fit from before its first round to after its last."""

    def on_train_start(self, *args: Any) -> None:
        self.start = time.perf_counter()

    def on_train_end(self, *args: Any) -> None:
        self.seconds = time.perf_counter() - self.start


def _peak_memory(device: torch.device) -> int | None:
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    if sys.platform == "win32":
        return None
    import resource  # not available on Windows

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # kibibytes, except on macOS
