"""The command line: ``python -m lightning_spectral fit --config run.yaml``, and ``sweep``, ``report`` and others."""

from __future__ import annotations

import os
import sys
from importlib import import_module
from importlib.util import find_spec

OF_LIGHTNING = ("fit", "validate", "test")
# Those that go without Lightning's parser, by the module of their `main`; each is imported only when it is used.
OTHERS = {
    "sweep": "lightning_spectral.sweep.command",
    "report": "lightning_spectral.report.page",
    "doctor": "lightning_spectral.testing.doctor",
    "network": "lightning_spectral.network.command",
}
EPILOG = """Four further commands: `sweep` trains a config with several settings and seeds, `report RUN ...` writes a
page on runs, `doctor` checks this installation, and `network` trains clients on other machines; each has a `--help`."""


def main() -> None:
    """Run a command: one of LightningCLI, such as ``fit``, or ``sweep``, ``report``, ``doctor`` or ``network``.

    Raises:
        SystemExit: With the status of one of the last four, if jsonargparse is not installed, or if the command line
            is wrong.
    """
    command = "".join(sys.argv[1:2])
    if command and not command.startswith("-") and command not in (*OF_LIGHTNING, *OTHERS):
        print(
            f"error: there is no command {command!r}; choose from {', '.join((*OF_LIGHTNING, *OTHERS))}",
            file=sys.stderr,
        )
        sys.exit(2)
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # so that a user's own modules are found, as with `python -m`
    if command not in ("report", "doctor", "network") and find_spec("jsonargparse") is None:
        sys.exit('The command line needs jsonargparse: pip install "lightning-spectral[cli]"')
    os.environ.setdefault("JSONARGPARSE_DEPRECATION_WARNINGS", "off")  # Lightning 2.6 calls methods by their old names
    if command in OTHERS:
        sys.exit(import_module(OTHERS[command]).main(sys.argv[2:]))
    from lightning_spectral.plugin.cli import FederatedCLI, errors_in_one_line

    with errors_in_one_line():
        FederatedCLI(parser_kwargs={"epilog": EPILOG})


if __name__ == "__main__":
    main()
