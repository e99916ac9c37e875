"""Tables of measurements, printed or written as CSV files beside the documentation."""

import csv
import platform
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from lightning_spectral.tables import aligned

TABLES = Path(__file__).parents[1] / "docs" / "tables"


def show(rows: Sequence[Sequence[str]]) -> None:
    print("\n".join(aligned(rows)))


def write(name: str, versions: Mapping[str, str], rows: Sequence[Sequence[str]]) -> None:
    """Write a table to ``docs/tables``, below its command and, as a second comment, versions and machine."""
    numbers = {"Python": platform.python_version(), **versions}
    setup = ", ".join(f"{package} {number}" for package, number in numbers.items())
    with open(TABLES / f"{name}.csv", "w", newline="") as file:
        file.write(f"# {command()}\n# {setup}; {processor()}.\n")
        csv.writer(file, lineterminator="\n").writerows(rows)


def command() -> str:
    """Return the command line of this benchmark."""
    arguments = [argument for argument in sys.argv[1:] if argument != "--write"]
    return " ".join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *arguments])


def processor() -> str:
    """Return the number and name of the processors, where the system reports them."""
    info = Path("/proc/cpuinfo")
    names = re.findall(r"^model name\s*: (.*)$", info.read_text(), re.MULTILINE) if info.exists() else []
    return f"{len(names)} x {names[0]}" if names else platform.machine()
