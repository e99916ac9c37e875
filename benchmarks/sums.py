"""The cost of the exact, order-independent sum over clients, compared with a plain sum that rounds.

    python benchmarks/sums.py

Adds one client's float32 change to a float64 sum, on one thread, with contenders taking turns; times are medians. The
plain sum is ``total.add_(change, alpha=weight)`` for a change that already exists. The exact one, `MeanChange`, also
subtracts the tensors before training from those after. "subtract, add" is the plain sum of a change that has to be
computed first.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from lightning_spectral.sums import MeanChange
from lightning_spectral.sums.exact_mean import largest_magnitudes
from lightning_spectral.tables import aligned

TURNS = {50_000: 300, 190_000: 100, 11_000_000: 9}  # number of values: turns of each contender
WEIGHT, TOTAL = 3.0, 1e6


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def contenders(size: int) -> dict[str, Callable[[], object]]:
    generator = torch.Generator().manual_seed(0)
    before = {"weight": 0.1 * torch.randn(size, generator=generator)}
    after = {"weight": before["weight"] + 0.01 * torch.randn(size, generator=generator)}
    change = after["weight"] - before["weight"]
    total, mean = torch.zeros(size, dtype=torch.float64), MeanChange(before, TOTAL)
    magnitudes = largest_magnitudes(after)
    return {
        "plain": lambda: total.add_(change, alpha=WEIGHT),
        "subtract, add": lambda: total.add_(after["weight"] - before["weight"], alpha=WEIGHT),
        "exact": lambda: mean.add(after, WEIGHT, magnitudes),
        "largest magnitude": lambda: largest_magnitudes(after),
    }


def table(turns: dict[int, int]) -> list[list[str]]:
    rows = []
    for size, count in turns.items():
        works = contenders(size)
        times = [[seconds(work) for work in works.values()] for _ in range(count + 1)][1:]
        medians = dict(zip(works, map(statistics.median, zip(*times, strict=True)), strict=True))
        rows.append([f"{size:,}", *(f"{1e3 * t:.3f} ({t / medians['plain']:.1f})" for t in medians.values())])
    return [["values", *works], *rows]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, help="turns of each contender; by default more for smaller sizes")
    options = parser.parse_args()
    torch.set_num_threads(1)
    turns = TURNS if options.turns is None else dict.fromkeys(TURNS, options.turns)
    print("Milliseconds, and the ratio to the plain sum", *aligned(table(turns)), sep="\n")


if __name__ == "__main__":
    main()
