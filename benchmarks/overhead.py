"""Seconds per round and peak memory, compared with a bare PyTorch loop that takes the same local steps.

    python benchmarks/overhead.py cnn

The workload is in contenders/workload.py. In a turn all contenders run one after another. A ratio compares the medians
of one turn; the table shows the median, the smallest and the largest ratio over turns. For spectral sharding the bare
loop trains fixed sub-models of the same keep ratio, and our refresh time is added to its time.
"""

import argparse
import statistics
import sys
from dataclasses import dataclass

from page import show, write
from turns import Contender, interleave, spread

ROUNDS = {"cnn": 6, "resnet": 1, "mlp": 40}  # per turn
HEADER = ("algorithm", "contender", "s/round", "over bare", "serial over this", "peak MiB")
VARIANTS = {
    "serial": (),
    "parallel": ("--processes", "2"),
    "silent": ("--silent",),
}


@dataclass
class Case:
    """The bare loop of one algorithm, and some of our variants."""

    algorithm: str
    bare: Contender
    ours: dict[str, Contender]

    def rows(self) -> list[tuple[str, ...]]:
        serial = self.ours["serial"]
        first = (self.algorithm, "bare loop", _seconds(self.bare), "1", "", f"{self.bare.peak_mib:.0f}")
        refresh = [stages["refresh"] if self.algorithm == "spectral" else 0.0 for stages in serial.stages]
        return [first, *(self._row(name, ours, serial, refresh) for name, ours in self.ours.items())]

    def _row(self, name: str, ours: Contender, serial: Contender, refresh: list[float]) -> tuple[str, ...]:
        faster = "" if ours is serial else spread(serial.over(ours))
        over = spread(ours.over(self.bare, refresh))
        return (self.algorithm, f"ours, {name}", _seconds(ours), over, faster, f"{ours.peak_mib:.0f}")


def _seconds(contender: Contender) -> str:
    return f"{statistics.median(contender.seconds):.4f}"


def case(model: str, algorithm: str, variants: list[str]) -> Case:
    command = ["ours.py", "--model", model, "--algorithm", algorithm]
    bare = ["bare.py", "--model", model, *(["--sharded"] if algorithm == "spectral" else [])]
    return Case(algorithm, Contender(bare), {v: Contender([*command, *VARIANTS[v]]) for v in variants})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=ROUNDS)
    parser.add_argument("--algorithms", nargs="+", default=["FedAvg", "spectral"])
    parser.add_argument("--turns", type=int, default=4, help="turns of each contender")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS)[:2], help="our variants")
    parser.add_argument("--untuned", action="store_true", help="use the allocator's defaults")
    parser.add_argument("--write", action="store_true", help="write the table to docs/tables")
    options = parser.parse_args()
    cases = [case(options.model, algorithm, options.variants) for algorithm in options.algorithms]
    contenders = [contender for one in cases for contender in (one.bare, *one.ours.values())]
    for progress in interleave(contenders, options.turns, ROUNDS[options.model], not options.untuned):
        print(progress, file=sys.stderr)
    rows = [HEADER, *(row for one in cases for row in one.rows())]
    show(rows)
    if options.write:
        write(f"overhead_{options.model}", contenders[-1].versions, rows)


if __name__ == "__main__":
    main()
