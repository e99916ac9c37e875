"""The cost of a local step of Zampling, and where the time goes.

    python benchmarks/zampling.py --turns 40

The network of the paper's federated experiments (784-300-100-10, degree 10, compression 32), with Adam, in one
process with one thread. The contenders take turns, and the clock is process time, so that a busy machine matters less;
each number is the median over turns. "Of a step" is relative to a dense step with the same batch. "Of a product" is
relative to one product with the same matrix in scipy's CSR format, the least that Qz can cost.
"""

import argparse
import copy
import time
from collections.abc import Callable
from statistics import median

import numpy as np
import scipy
import torch
from page import show, write
from scipy.sparse import csr_array
from torch import nn

import lightning_spectral as ls
from lightning_spectral.functional.zampling import draw_bits
from lightning_spectral.nn.zampling import SampledWeights

BATCHES = (32, 128, 512)
HOW = ls.Zampling(32).scheme()


def contenders() -> dict[str, Callable[[], object]]:
    """Return what is timed, by name."""
    torch.manual_seed(0)
    dense = nn.Sequential(nn.Linear(784, 300), nn.ReLU(), nn.Linear(300, 100), nn.ReLU(), nn.Linear(100, 10))
    weights = HOW.weights_of(dense)
    matrix, sampled = HOW.matrix(weights, seed=0), copy.deepcopy(dense)
    made = SampledWeights(sampled, weights, matrix, ls.functional.zampling.Clip())
    made.set_probs(torch.rand(matrix.num_columns))
    generator = torch.Generator().manual_seed(0)
    z, gradient = draw_bits(made.probs, generator).float(), torch.randn(matrix.num_rows)
    columns, values = matrix.entries()
    ends = np.arange(0, columns.numel() + 1, matrix.width, dtype=np.int32)
    plain = csr_array((values.numpy().ravel(), columns.int().numpy().ravel(), ends))

    found: dict[str, Callable[[], object]] = {
        "one product of scipy": lambda: plain @ z.numpy(),
        "Qz": lambda: matrix.expand(z),
        "Q^T g": lambda: matrix.pull_back(gradient),
    }
    for size in BATCHES:
        x, y = torch.randn(size, 784), torch.randint(10, (size,))
        found[f"dense step, batch {size}"] = step(dense, x, y, lambda: None)
        found[f"Zampling step, batch {size}"] = step(sampled, x, y, lambda: made.draw(generator))
    return found


def step(net: nn.Module, x: torch.Tensor, y: torch.Tensor, before: Callable[[], None]) -> Callable[[], None]:
    """Return a function that takes one local step."""
    adam = torch.optim.Adam(net.parameters(), lr=1e-3)

    def take() -> None:
        before()
        adam.zero_grad()
        nn.functional.cross_entropy(net(x), y).backward()
        adam.step()

    return take


def measure(turns: int) -> dict[str, float]:
    """Return the median milliseconds of each contender."""
    timed = contenders()
    seconds: dict[str, list[float]] = {name: [] for name in timed}
    for _ in range(turns):
        for name, run in timed.items():
            start = time.process_time()
            run()
            seconds[name].append(time.process_time() - start)
    return {name: 1e3 * median(values) for name, values in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description="The cost of a local step of Zampling.")
    parser.add_argument("--turns", type=int, default=40)
    parser.add_argument("--write", action="store_true", help="write the table to docs/tables")
    args = parser.parse_args()
    torch.set_num_threads(1)
    found = measure(args.turns)
    product = found["one product of scipy"]
    rows = [["", "ms", "of a product", "of a step"]]
    for name, milliseconds in found.items():
        same_batch = found.get(f"dense step, {name.split(', ')[-1]}")
        rows.append(
            [
                name,
                f"{milliseconds:.2f}",
                "" if "step" in name else f"{milliseconds / product:.2f}",
                f"{milliseconds / same_batch:.2f}" if same_batch else "",
            ]
        )
    show(rows)
    if args.write:
        write("zampling", {"torch": torch.__version__, "scipy": scipy.__version__}, rows)


if __name__ == "__main__":
    main()
