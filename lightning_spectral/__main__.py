"""The command line: ``python -m lightning_spectral fit --config run.yaml``, and ``sweep``, ``report`` and others."""

from __future__ import annotations

import os
import sys
from importlib import import_module
from importlib.util import find_spec
from itertools import pairwise

NAME = "python -m lightning_spectral"
# The module of the `main` of each, which is imported only when it is used; none where LightningCLI has the command.
OTHERS = {"sweep": "sweep.command", "report": "report.page", "doctor": "testing.doctor", "network": "network.command"}
COMMANDS = {"fit": "", "validate": "", "test": "", **OTHERS}
HELP = f"""usage: {NAME} {{{",".join(COMMANDS)}}} ...

`fit`, `validate` and `test` do what a config describes, as in `fit --config run.yaml`; `sweep` trains a config with
several settings and seeds, `report RUN ...` writes a page on runs, `doctor` checks this installation, and `network`
trains clients on other machines. Each has a `--help`."""


def main() -> None:
    """Run a command, and exit with its status; for help, and mistakes that can be seen without, nothing is imported."""
    given = sys.argv[1:]
    command = "".join(given[:1])
    if command in ("-h", "--help"):
        print(HELP)
        return
    if command.startswith("-"):  # options before a command of Lightning
        command = next((text for text in given if COMMANDS.get(text) == ""), "")
    parts = pairwise(part for text in given for part in text.split("=", 1))
    files = [file for option, file in parts if option in ("-c", "--config") and file.endswith(".yaml")]
    mistakes = [f"there is no config {file}" for file in files if not os.path.exists(file)]
    if command not in COMMANDS:
        what = f"there is no command {command!r}" if command else "no command is given"
        mistakes = [f"{what}; choose from {', '.join(COMMANDS)}"]
    if mistakes:
        print(f"error: {mistakes[0]}", file=sys.stderr)
        sys.exit(2)
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # so that a user's own modules are found, as with `python -m`
    if command not in ("report", "doctor", "network") and find_spec("jsonargparse") is None:
        sys.exit('The command line needs jsonargparse: pip install "lightning-spectral[cli]"')
    os.environ.setdefault("JSONARGPARSE_DEPRECATION_WARNINGS", "off")  # Lightning 2.6 calls methods by their old names
    if place := COMMANDS[command]:
        sys.exit(import_module(f"lightning_spectral.{place}").main(given[1:]))
    from lightning_spectral.plugin.cli import FederatedCLI, errors_in_one_line

    with errors_in_one_line():
        FederatedCLI(parser_kwargs={"prog": NAME})


if __name__ == "__main__":
    main()
