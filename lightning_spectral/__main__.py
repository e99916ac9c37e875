"""The command line: ``python -m lightning_spectral fit --config run.yaml``."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec


def main() -> None:
    """Run a command: those of LightningCLI, which are ``fit``, ``validate``, ``test`` and ``predict``.

    Raises:
        SystemExit: If jsonargparse is not installed, or the command line is wrong.
    """
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # a user's own modules are found, as with `python -m`
    if find_spec("jsonargparse") is None:
        sys.exit('The command line needs jsonargparse: pip install "lightning-spectral[cli]"')
    os.environ.setdefault("JSONARGPARSE_DEPRECATION_WARNINGS", "off")  # Lightning 2.6 calls methods by their old names
    from lightning_spectral.plugin.cli import FederatedCLI

    FederatedCLI()


if __name__ == "__main__":
    main()
