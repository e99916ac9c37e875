"""``python -m lightning_spectral COMMAND``."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from lightning_spectral.report.command import main as report

COMMANDS = {"report": report}


def main(argv: Sequence[str]) -> int:
    """Run the command that the first argument names with the others; 2 if there is no such command."""
    if not argv or argv[0] not in COMMANDS:
        print(f"usage: python -m lightning_spectral {{{','.join(COMMANDS)}}} ...", file=sys.stderr)
        return 2
    return COMMANDS[argv[0]](argv[1:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
