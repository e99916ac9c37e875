"""How long `largest_that_fits` takes for twenty clients' budgets of memory and a ViT-B on the meta device.

    python benchmarks/budgets.py

Prints the seconds of one core, how many capacities had a step counted, and the keep ratios.
"""

import argparse
import time

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from transformers import ViTConfig, ViTModel

import lightning_spectral as ls
from lightning_spectral.algorithms import costs

SIZES = {
    "tiny": {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32},
    "base": {},
}
BATCH, SHARES = 8, (0.24, 0.84)  # budgets reach from and to these shares of the way to the largest sub-model


class LitViT(pl.LightningModule):
    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.net = ViTModel(config, add_pooling_layer=False)
        self.head = nn.Linear(config.hidden_size, 10)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.net(images).last_hidden_state[:, 0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=list(SIZES), default="base")
    parser.add_argument("--budgets", type=int, default=20)
    options = parser.parse_args()
    with torch.device("meta"):
        module, images = LitViT(ViTConfig(**SIZES[options.model])), torch.zeros(BATCH, 3, 224, 224)
    adam = torch.optim.Adam(module.parameters())
    ends = ls.cost_table(module, ls.SpectralSharding(), [0.01, 1.0], images, optimizer=adam).at
    low, high = (ends[ratio].memory_bytes for ratio in (0.01, 1.0))
    places = torch.linspace(*SHARES, options.budgets).tolist()
    counted, turn_costs = [], costs.turn_costs

    def counting(half, keep_ratios, *args, **kwargs):
        counted.extend(keep_ratios)
        return turn_costs(half, keep_ratios, *args, **kwargs)

    costs.turn_costs, start = counting, time.process_time()
    budgets = [low + place * (high - low) for place in places]
    found = ls.largest_that_fits(module, ls.SpectralSharding(), images, memory=budgets, optimizer=adam)
    seconds = time.process_time() - start
    print(f"{seconds:.1f} s, {len(counted)} steps counted; keep ratios {', '.join(f'{ratio:.3f}' for ratio in found)}")


if __name__ == "__main__":
    main()
