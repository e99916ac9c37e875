"""``python launched_run.py FILE STRATEGY DEVICES NUM_NODES`` trains in processes that Lightning itself starts.

Process 0 writes the server's weights. With an accelerator as another argument, STRATEGY is the number of processes that
share its device.
"""

import sys
from typing import Any

import lightning.pytorch as pl
import pretend_device
import torch
from toy_models import LitMLP, toy_examples

import lightning_spectral as ls


def sharing(accelerator: str, processes: str) -> dict[str, Any]:
    """Options of a Trainer whose processes share a device; a pretended one comes with the strategy."""
    if accelerator != "pretended":
        strategy = ls.plugin.ClientParallelStrategy(processes_per_device=int(processes))
        return {"accelerator": accelerator, "strategy": strategy}
    pretend_device.install()
    its = pretend_device.PretendAccelerator()
    strategy = ls.plugin.ClientParallelStrategy(processes_per_device=int(processes), accelerator=its)
    return {"strategy": strategy, "inference_mode": False}


def trained(num_processes: int = 1, **options: Any) -> tuple[pl.Trainer, dict[str, torch.Tensor]]:
    """A Trainer with these options that has trained in as many processes, and the weights."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    data = ls.FederatedDataModule(toy_examples(), ls.IIDPartitioner(12), batch_size=4)
    model = ls.FederatedModule(LitMLP(), algorithm=ls.SpectralSharding(keep_ratio=0.5), clients_per_round=7)
    silent = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    trainer = pl.Trainer(max_epochs=3, **options, **dict.fromkeys(silent, False))
    assert trainer.world_size == num_processes
    trainer.fit(model, data)
    return trainer, {name: tensor.cpu() for name, tensor in model.module.state_dict().items()}


def main(file: str, strategy: str, devices: str, num_nodes: str, accelerator: str = "") -> None:
    options = sharing(accelerator, strategy) if accelerator else {"accelerator": "cpu", "strategy": strategy}
    num_processes = int(devices) * int(num_nodes) * (int(strategy) if accelerator else 1)
    trainer, weights = trained(num_processes, **options, devices=int(devices), num_nodes=int(num_nodes))
    if trainer.global_rank == 0:
        torch.save(weights, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
