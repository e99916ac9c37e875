"""Tables of measurements, printed or written into a documentation page between two comments."""

import platform
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from lightning_spectral.tables import aligned

PAGE = Path(__file__).parents[1] / "docs" / "performance.md"


def show(rows: Sequence[Sequence[str]]) -> None:
    print("\n".join(aligned(rows)))


def write(name: str, versions: Mapping[str, str], rows: Sequence[Sequence[str]], page: Path = PAGE) -> None:
    """Replace the text between ``<!-- name -->`` and ``<!-- end -->`` with command, versions, machine and table.

    Raises:
        ValueError: If the page does not have exactly one such place.
    """
    numbers = {"Python": platform.python_version(), **versions}
    setup = ", ".join(f"{package} {number}" for package, number in numbers.items())
    header, *lines = [f"| {' | '.join(row)} |" for row in rows]
    rule = f"|{' --- |' * len(rows[0])}"
    table = "\n".join([header, rule, *lines])
    text, place = page.read_text(), re.compile(f"(<!-- {name} -->\n).*?(<!-- end -->)", re.DOTALL)
    block = f"\n    {command()}\n\n{setup}; {processor()}.\n\n{table}\n\n"
    written, times = place.subn(lambda found: f"{found[1]}{block}{found[2]}", text)
    if times != 1:
        raise ValueError(f"{page.name} must have `<!-- {name} -->` ... `<!-- end -->` exactly once, got {times} times.")
    page.write_text(written)


def command() -> str:
    """Return the command line of this benchmark."""
    arguments = [argument for argument in sys.argv[1:] if argument != "--write"]
    return " ".join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *arguments])


def processor() -> str:
    """Return the number and name of the processors, where the system reports them."""
    info = Path("/proc/cpuinfo")
    names = re.findall(r"^model name\s*: (.*)$", info.read_text(), re.MULTILINE) if info.exists() else []
    return f"{len(names)} x {names[0]}" if names else platform.machine()
