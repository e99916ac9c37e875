"""``python launched_run.py FILE STRATEGY DEVICES NUM_NODES`` trains in processes that Lightning itself starts.

Process 0 writes the server's weights.
"""

import sys

import lightning.pytorch as pl
import torch
from toy_models import LitMLP, toy_examples

import lightning_spectral as ls


def main(file: str, strategy: str, devices: str, num_nodes: str) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    data = ls.FederatedDataModule(toy_examples(), ls.IIDPartitioner(12), batch_size=4)
    model = ls.FederatedModule(LitMLP(), algorithm=ls.SpectralSharding(keep_ratio=0.5), clients_per_round=7)
    trainer = pl.Trainer(
        max_epochs=3,
        accelerator="cpu",
        strategy=strategy,
        devices=int(devices),
        num_nodes=int(num_nodes),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, data)
    if trainer.global_rank == 0:
        torch.save(model.module.state_dict(), file)


if __name__ == "__main__":
    main(*sys.argv[1:])
