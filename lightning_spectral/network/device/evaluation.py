"""Evaluates the server's model on a client's own held-out examples, on its device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from lightning_spectral.client.between_clients import isolate_metrics
from lightning_spectral.client.user_step import Recorder, call_with_accepted, log_to
from lightning_spectral.network.device.client_data import ClientData
from lightning_spectral.protocol.exchange import load_tensors
from lightning_spectral.protocol.records import Download, LoggedValue
from lightning_spectral.protocol.rng import derived_seed, isolated_rng


@torch.no_grad()
def evaluated(module: Any, data: ClientData, download: Download) -> Mapping[str, LoggedValue]:
    """What ``validation_step`` logs on a client's held-out examples, as means over them.

    Args:
        module: The user's module, which gets the weights of the download.
        data: The client's data.
        download: The server's weights, the round and the run's seed.
    """
    load_tensors(module, download.tensors)
    isolate_metrics(module)
    module.eval()
    recorder = Recorder(module)
    log_to(recorder, module)
    seed = derived_seed(download.seed, "client evaluation", download.round_idx, download.unit.client_id)
    with isolated_rng(seed):  # a step may draw random numbers
        for batch_idx, (batch, size) in enumerate(data.held_out_batches()):
            recorder.num_examples = size
            batch = module.on_after_batch_transfer(module.on_before_batch_transfer(batch, 0), 0)
            call_with_accepted(module.validation_step, batch, batch_idx)
    return recorder.finish_client()
