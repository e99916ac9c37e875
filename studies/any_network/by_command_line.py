"""The study's networks and images for the command line, as ``sweep.yaml`` names them."""

from __future__ import annotations

import sys
from pathlib import Path

from torch.utils.data import TensorDataset

sys.path.append(str(Path(__file__).parent))  # for a process that runs none of the study's own programs
from tasks import NETS, Classifier, divided

SHORT = dict(zip(("groupnorm", "batchnorm", "mlp", "residual", "zero_init", "transformer"), NETS, strict=False))


class Network(Classifier):
    """One of the six networks, by a name without spaces."""

    def __init__(self, net: str, lr: float = 0.1, num_rounds: int = 100) -> None:
        super().__init__(SHORT[net], lr, num_rounds)


def images(others: bool = False) -> TensorDataset:
    """MNIST's images of the clients, or the others, as for the study's first seed."""
    train, rest = divided("MNIST", seed=0)
    return rest if others else train
