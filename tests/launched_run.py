"""``python launched_run.py FILE STRATEGY DEVICES NUM_NODES`` trains in processes that Lightning itself starts.

Process 0 writes the server's weights.
"""

import sys

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import TensorDataset

import lightning_spectral as ls


class LitNet(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 12), nn.ReLU(), nn.Linear(12, 3))

    def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def main(file: str, strategy: str, devices: str, num_nodes: str) -> None:
    torch.set_num_threads(1)
    x = torch.randn(120, 6, generator=torch.Generator().manual_seed(0))
    data = ls.FederatedDataModule(TensorDataset(x, x[:, :3].argmax(1)), ls.IIDPartitioner(12), batch_size=4)
    model = ls.FederatedModule(LitNet(), algorithm=ls.SpectralSharding(keep_ratio=0.5), clients_per_round=7)
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
