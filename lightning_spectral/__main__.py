"""The command line: ``python -m lightning_spectral fit --config run.yaml``, and ``sweep``, ``report`` and others."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec

EPILOG = """Four further commands: `sweep` trains a config with several settings and seeds, `report RUN ...` writes a
page on runs, `doctor` checks this installation, and `network` trains clients on other machines; each has a `--help`."""


def main() -> None:
    """Run a command: ``sweep``, ``doctor``, ``report``, ``network``, or one of LightningCLI, such as ``fit``.

    Raises:
        SystemExit: With the status of one of the first four, if jsonargparse is not installed, or if the command
            line is wrong.
    """
    if sys.argv[1:2] == ["doctor"]:
        from lightning_spectral.testing.doctor import main as doctor

        sys.exit(doctor(sys.argv[2:]))
    if sys.argv[1:2] == ["report"]:  # it does not wait for Lightning to be imported
        from lightning_spectral.report.command import main as report

        sys.exit(report(sys.argv[2:]))
    if sys.argv[1:2] == ["network"]:
        from lightning_spectral.network.cli.command import main as network

        sys.exit(network(sys.argv[2:]))
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # so that a user's own modules are found, as with `python -m`
    if find_spec("jsonargparse") is None:
        sys.exit('The command line needs jsonargparse: pip install "lightning-spectral[cli]"')
    os.environ.setdefault("JSONARGPARSE_DEPRECATION_WARNINGS", "off")  # Lightning 2.6 calls methods by their old names
    if sys.argv[1:2] == ["sweep"]:  # its own processes import Lightning
        from lightning_spectral.sweep.command import main as sweep

        sys.exit(sweep(sys.argv[2:]))
    from lightning_spectral.plugin.cli.command import FederatedCLI
    from lightning_spectral.plugin.cli.errors import errors_in_one_line

    with errors_in_one_line():
        FederatedCLI(parser_kwargs={"epilog": EPILOG})


if __name__ == "__main__":
    main()
