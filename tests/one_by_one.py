"""Data that must be read example by example, as most data on a disk."""

from typing import Any

import torch
from torch.utils.data import Dataset


class OneByOne(Dataset[Any]):
    """The examples of another data set, whose tensors nobody can index."""

    def __init__(self, examples: Any) -> None:
        self.examples = examples

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, index: int) -> Any:
        return self.examples[index]


class Noisy(OneByOne):
    """Examples with fresh noise whenever they are read, as lists."""

    def __getitem__(self, index: int) -> Any:
        x, y = self.examples[index]
        return [x + 0.1 * torch.randn(x.shape), y]
