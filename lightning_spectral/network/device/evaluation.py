"""Evaluates the server's model on a client's own held-out examples, on its device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from lightning_spectral.network.device.client_data import ClientData
from lightning_spectral.network.device.workplace import Workplace
from lightning_spectral.plugin.callbacks.validated_beside import ValidatedBeside
from lightning_spectral.plugin.user_hooks import as_in_a_step
from lightning_spectral.protocol.records import Download, LoggedValue
from lightning_spectral.protocol.rng import derived_seed, isolated_rng


@torch.no_grad()
def evaluated(module: Any, data: ClientData, workplace: Workplace, download: Download) -> Mapping[str, LoggedValue]:
    """What ``validation_step`` logs on a client's held-out examples, as means over them.

    Args:
        module: The user's module, which gets the weights of the download.
        data: The client's data.
        workplace: Where and in which precision the steps run.
        download: The server's weights, the round and the run's seed.
    """
    trainer = workplace.trainer
    workplace.place(module)
    module.trainer = trainer
    trainer.validating = True
    beside = ValidatedBeside(module, workplace.arrive(download).tensors, trainer)
    seed = derived_seed(download.seed, "client evaluation", download.round_idx, download.unit.client_id)
    with isolated_rng(seed, [workplace.torch_device]), beside.entered():  # a step may draw random numbers
        module.eval()
        for batch_idx, batch in enumerate(data.held_out_batches()):
            beside.step(as_in_a_step(batch, module, trainer), batch_idx)
        logged = beside.logged()
    return {name: LoggedValue(value, prog_bar=False, logger=True) for name, value in logged.items()}
