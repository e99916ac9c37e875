"""Compares the server's update with that of federated averaging."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_spectral.algorithms.fed_avg import FedAvg
from lightning_spectral.arguments import Whole
from lightning_spectral.client.forms import Forms
from lightning_spectral.client.local_optimizer import options_of
from lightning_spectral.plugin.callbacks.round_callback import RoundCallback
from lightning_spectral.plugin.host import Trained
from lightning_spectral.protocol.records import Options, RoundSummary
from lightning_spectral.protocol.work_unit import WorkUnit
from lightning_spectral.server.turn import play


class UpdateAlignment(RoundCallback):
    """Logs ``fl/fedavg_alignment``: the cosine between the server's update and that of a FedAvg round.

    The same clients train the whole model from the same weights on the same batches. Their mean update is compared with
    that of the run's algorithm, then discarded. Each comparison costs one extra dense round, so use it sparingly.

    Args:
        every_n_rounds: Compare in rounds 0, n, 2n, ...

    Reference:
        Korzhenkov & Louizos (2024), appendix A, Figure 4.
    """

    def __init__(self, every_n_rounds: int = 10) -> None:
        self.every_n_rounds: int = Whole(at_least=1)("every_n_rounds", every_n_rounds)
        self._begun: dict[str, tuple[dict[str, Tensor], Sequence[Sequence[Options]]]] = {}  # by the model's name

    def on_round_start(self, trainer: pl.Trainer, pl_module: Trained, opened: Any) -> None:  # type: ignore[override]
        self._begun.pop(pl_module.name, None)
        if trainer.current_epoch % self.every_n_rounds == 0:
            options = [options_of(template) for template in pl_module.templates()]
            self._begun[pl_module.name] = copy.deepcopy(pl_module.module.state_dict()), options

    def on_round_end(self, trainer: pl.Trainer, pl_module: Trained, summary: RoundSummary) -> None:  # type: ignore[override]
        units = [client.unit for client in summary.clients if not client.left_out]
        before, options = self._begun.pop(pl_module.name, ({}, []))
        if not before or not units:
            return
        ours = update(pl_module.module, before)
        with temporary_options(pl_module.templates(), options):  # schedules have moved on to the next round
            theirs = dense_update(pl_module, before, summary.round_idx, units)
        cosine = torch.nn.functional.cosine_similarity(ours, theirs, dim=0)
        pl_module.log("fl/fedavg_alignment", cosine.double(), on_step=False, on_epoch=True, batch_size=1)


@contextmanager
def temporary_options(optimizers: Sequence[Optimizer], options: Sequence[Sequence[Options]]) -> Iterator[None]:
    """Give parameter groups other options within a block, such as a past learning rate."""
    now = [options_of(optimizer) for optimizer in optimizers]
    _set_options(optimizers, options)
    try:
        yield
    finally:
        _set_options(optimizers, now)


def _set_options(optimizers: Sequence[Optimizer], options: Sequence[Sequence[Options]]) -> None:
    for optimizer, groups in zip(optimizers, options, strict=True):
        for group, values in zip(optimizer.param_groups, groups, strict=True):
            group.update(values)


def dense_update(pl_module: Trained, before: dict[str, Tensor], round_idx: int, units: Sequence[WorkUnit]) -> Tensor:
    """Mean change of all trainable parameters in a FedAvg round from given weights, as one vector, float64."""
    server = pl_module.module
    with Forms(server, lambda module, capacity: None).client(1.0):  # the server again, in other memory
        server.load_state_dict(before)
        engine = pl_module.build_engine(server, FedAvg())
        processes = engine.run.processes
        try:
            play(engine.open_round(round_idx, units), units[processes.rank :: processes.size])
            engine.close_round()
        finally:
            engine.abandon_round()  # unless it was closed
        return -torch.cat([p.grad.flatten() for p in server.parameters() if p.grad is not None]).double()


def update(module: pl.LightningModule, before: dict[str, Tensor]) -> Tensor:
    """Change of all trainable parameters, as one vector, float64."""
    changes = [(p.detach() - before[n]).flatten() for n, p in module.named_parameters() if p.requires_grad]
    return torch.cat(changes).double()
