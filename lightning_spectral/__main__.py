"""The command line: ``python -m lightning_spectral fit --config run.yaml``, or ``report RUN ...``."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec

from lightning_spectral.report.command import main as report

EPILOG = "A further command, `report RUN ...`, writes a page on runs; see `report --help`."


def main() -> None:
    """Run a command: ``report``, or ``fit``, ``validate``, ``test`` or ``predict`` of LightningCLI.

    Raises:
        SystemExit: With the status of a report, if jsonargparse is not installed, or if the command line is wrong.
    """
    if sys.argv[1:2] == ["report"]:
        sys.exit(report(sys.argv[2:]))
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # so that a user's own modules are found, as with `python -m`
    if find_spec("jsonargparse") is None:
        sys.exit('The command line needs jsonargparse: pip install "lightning-spectral[cli]"')
    os.environ.setdefault("JSONARGPARSE_DEPRECATION_WARNINGS", "off")  # Lightning 2.6 calls methods by their old names
    from lightning_spectral.plugin.cli import FederatedCLI

    FederatedCLI(parser_kwargs={"epilog": EPILOG})


if __name__ == "__main__":
    main()
