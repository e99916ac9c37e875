"""The study's networks and images for the command line, as ``sweep.yaml`` names them."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch.utils.data import TensorDataset

sys.path.append(str(Path(__file__).parent))  # for a process that runs none of the study's own programs
from tasks import IMAGES, NETS, NUM_TRAIN, NUM_VAL, Classifier

SHORT = dict(zip(("groupnorm", "batchnorm", "mlp", "residual", "zero_init", "transformer"), NETS, strict=True))


class Network(Classifier):
    """One of the six networks, by a name without spaces."""

    def __init__(self, net: str, lr: float = 0.1, num_rounds: int = 100) -> None:
        super().__init__(NETS[SHORT[net]](), lr, num_rounds)


def images(data: str = "MNIST", others: bool = False) -> TensorDataset:
    """The images of the clients, or the others, with a third column that marks those for testing."""
    pictures, labels = IMAGES[data]()
    order = torch.randperm(len(pictures), generator=torch.Generator().manual_seed(0))
    train, rest = order[:NUM_TRAIN], order[NUM_TRAIN:]
    if not others:
        return TensorDataset(pictures[train], labels[train])
    return TensorDataset(pictures[rest], labels[rest], torch.arange(len(rest)) >= NUM_VAL)
