"""``python -m lightning_spectral network``: ``init FOLDER`` writes an app, ``demo`` runs one on this machine."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from argparse import ArgumentParser, ArgumentTypeError, RawDescriptionHelpFormatter
from collections.abc import Sequence
from pathlib import Path

from lightning_spectral.errors import from_extra
from lightning_spectral.network.cli.new_app import write_app

DESCRIPTION = """\
Federated learning over a network, by Flower.

  init FOLDER   write a small app that trains from the start, to be changed
  demo          start a SuperLink, SuperNodes and a run on this machine, with TLS and node keys made on the spot
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        argv: Command-line arguments, without the name of the program; those of this process by default.

    Returns:
        0, or 1 if something failed; the reason is then on standard error.
    """
    arguments = _parser().parse_args(argv)
    try:
        if arguments.command == "init":
            write_app(arguments.folder)
            print(NEXT.format(folder=arguments.folder))
            return 0
        return _demo(arguments.clients, arguments.rounds)
    except (ModuleNotFoundError, FileExistsError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


NEXT = """\
wrote {folder}/app.py and {folder}/pyproject.toml
`python -m lightning_spectral network demo` runs such an app here; docs/network.md says how to run it on yours."""


def _demo(clients: int, rounds: int) -> int:
    with from_extra("network"):
        import flwr  # noqa: F401

        from lightning_spectral.network.cli.local_network import NAME, LocalNetwork
    with tempfile.TemporaryDirectory(prefix="spectral-network-") as path:
        folder = Path(path)
        write_app(folder / "app")
        print("Starting a SuperLink, with a certificate and keys for this run alone ...", flush=True)
        with LocalNetwork(folder) as network:
            for client in range(clients):
                network.add_node(str(client))
                print(f"Client {client} is connected.", flush=True)
            print("Starting the run. Each message to a client starts a process there, which takes seconds.", flush=True)
            config = f"rounds={rounds} clients={clients}"
            command = ["flwr", "run", str(folder / "app"), NAME, "--stream", "--run-config", config]
            return _shown(network.environment, command)


def _shown(environment: dict[str, str], command: Sequence[str]) -> int:
    """Run a command and show those of its lines that are about rounds; show all of them if it fails."""
    lines, finished = list[str](), False
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    ) as process:
        for line in process.stdout or ():
            lines.append(line)
            finished |= "`Trainer.fit` stopped" in line
            if line.startswith(("Round ", "Spectral start")):
                print(line, end="", flush=True)
    if not finished:
        raise RuntimeError("The run did not finish:\n" + "".join(lines))
    return process.returncode


def _parser() -> ArgumentParser:
    program = "python -m lightning_spectral network"
    parser = ArgumentParser(program, description=DESCRIPTION, formatter_class=RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True, metavar="init|demo")
    init = commands.add_parser("init", help="write an app into a new folder")
    init.add_argument("folder", type=Path)
    demo = commands.add_parser("demo", help="run an app on this machine")
    demo.add_argument("--clients", type=_positive, default=3, help="number of SuperNodes")
    demo.add_argument("--rounds", type=_positive, default=3)
    return parser


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ArgumentTypeError(f"it must be a whole number of at least 1, got {text!r}")
    return int(text)
