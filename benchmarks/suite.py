"""What the suite takes: ``python benchmarks/suite.py [--write] [pytest's arguments]`` runs it in two processes.

It prints CPU seconds, which depend little on what else the machine does, those of the processes that tests start
included: in all, by file, and of the twenty slowest tests. ``--write`` puts these into ``CONTRIBUTING.md``. The file is
pytest's plugin, too, that counts them.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Generator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from lightning_spectral.tables import aligned

ROOT = Path(__file__).parents[1]
FOLDER = "SUITE_SECONDS"  # the variable with the folder in which each process writes what its tests took
SHOWN = 20
TABLE = re.compile(r"(?<=<!-- benchmarks/suite.py -->\n\n).*?(?=\n<!-- end -->)", re.DOTALL)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, Any, Any]:
    """Count what a test takes, with its fixtures."""
    before = sum(os.times()[:4])
    result = yield
    with open(Path(os.environ[FOLDER]) / str(os.getpid()), "a") as file:
        file.write(f"{sum(os.times()[:4]) - before:.2f}\t{item.nodeid}\n")
    return result


def seconds_of(folder: Path) -> dict[str, float]:
    """CPU seconds of each test, from what all processes wrote."""
    lines = [line.split("\t") for path in folder.iterdir() for line in path.read_text().splitlines()]
    return {name: float(seconds) for seconds, name in lines}


def slowest(seconds: Mapping[str, float]) -> str:
    """A Markdown table of the slowest tests, and which share of all CPU seconds they take."""
    rows = Counter(seconds).most_common(SHOWN)
    share = sum(found for _, found in rows) / max(sum(seconds.values()), 1e-9)
    head = f"{len(seconds):,} tests take {sum(seconds.values()):.0f} CPU seconds; the slowest {len(rows)}, {share:.0%}:"
    cells = [f"| {found:.1f} | `{name.removeprefix('tests/')}` |" for name, found in rows]
    return "\n".join([head, "", "| CPU s | test |", "| --- | --- |", *cells, ""])


def main(arguments: list[str]) -> int:
    """Run the suite, and report."""
    chosen = [argument for argument in arguments if argument != "--write"]
    begun = time.perf_counter()
    with TemporaryDirectory() as folder:
        path = os.pathsep.join(filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]))
        command = [sys.executable, "-m", "pytest", "-p", "suite", "-n", "2", "--dist", "loadfile", *chosen]
        done = subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": path, FOLDER: folder}, check=False)
        seconds = seconds_of(Path(folder))
    by_file: Counter[str] = Counter()
    for name, found in seconds.items():
        by_file[name.partition("::")[0]] += found
    rows = [(f"{found:.1f}", name) for name, found in by_file.most_common(SHOWN)]
    print("\n".join(aligned([("CPU s", "file"), *rows])), slowest(seconds), sep="\n\n")
    print(f"{time.perf_counter() - begun:.0f} s")
    if "--write" in arguments and done.returncode == 0:
        page = ROOT / "CONTRIBUTING.md"
        page.write_text(TABLE.sub(lambda _: slowest(seconds), page.read_text()))
    return done.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
