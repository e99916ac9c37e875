"""``python -m lightning_spectral network``: write an app, run it on this machine, and set up machines of your own."""

from __future__ import annotations

import getpass
import re
import subprocess
import sys
import tempfile
from argparse import ArgumentParser
from collections.abc import Callable, Sequence
from importlib.resources import files
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

from lightning_spectral.arguments import at_least_one, first_of
from lightning_spectral.errors import from_extra


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        argv: Command-line arguments, without the name of the program; those of this process by default.

    Returns:
        0, or 1 if something failed; the reason is then on standard error.
    """
    program = "python -m lightning_spectral network"
    parser = ArgumentParser(program, description="Federated learning over a network, by Flower.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    init = commands.add_parser("init", help="write a small app into a new folder, for you to change")
    init.add_argument("folder", type=Path)
    demo = commands.add_parser("demo", help="run an app here, with certificates and keys that are made on the spot")
    demo.add_argument("folder", type=Path, nargs="?", help="the app's; by default, what `init` writes")
    demo.add_argument("--clients", type=at_least_one, default=3, help="number of SuperNodes")
    demo.add_argument("--run-config", default="", help="as of `flwr run`, such as 'rounds=5'")
    kit = commands.add_parser("kit", help="write what a server and devices need: certificates, services, a README")
    kit.add_argument("server", help="the server's host name or IPv4 address, and perhaps :PORT")
    kit.add_argument("names", nargs="+", metavar="NAME", help="names of the devices, which are those of their clients")
    kit.add_argument("--threads", type=at_least_one, default=1, help="that each machine computes with")
    for of_devices in (demo, kit):
        of_devices.add_argument("--node-config", default="", help="further entries of each device's configuration")
    key = commands.add_parser("key", help="on a device: make its key, and print its public half")
    key.add_argument("folder", type=Path, help="the device's, in the kit")
    enrol = commands.add_parser("enrol", help="on the server: let the SuperLink accept a device's key")
    enrol.add_argument("name", help="of the device")
    enrol.add_argument("key", type=Path, nargs="?", help="file with its public half; by default, standard input")
    status = commands.add_parser("status", help="on the server: each client by name, and what the last run saw of it")
    status.add_argument("--prometheus", action="store_true", help="numbers in Prometheus' text format, for a monitor")
    for on_server in (enrol, status):
        on_server.add_argument("--kit", type=Path, default=Path("kit"), help="the kit's folder (default: %(default)s)")
    own = commands.add_parser("own", help="on a device: write its client's own model, a state dict")
    own.add_argument("state_folder", type=Path, help="that of ClientData")
    own.add_argument("module", help="what makes the module, such as app:LitNet")
    own.add_argument("-o", "--output", type=Path, default=Path("own.pt"), help="file to write (default: %(default)s)")
    own.add_argument("--weights", type=Path, help="the server's, a checkpoint or a state dict, for what clients share")
    own.add_argument("--seed", type=int, help="of the run; by default that of the client's last turn")
    door = commands.add_parser("door", help="let devices reach the SuperLink; a service of the kit runs it")
    door.add_argument("folder", type=Path, help="with ca.crt, server.pem and server.key")
    door.add_argument("--host", required=True, help="address to listen at")
    door.add_argument("--port", type=at_least_one, required=True)
    door.add_argument("--link-port", type=at_least_one, required=True, help="the SuperLink's, on loopback")
    arguments = vars(parser.parse_args(argv))
    run: dict[str, Callable[..., None]] = {"init": _init, "demo": _demo, "kit": _kit, "door": _door}
    run |= {"key": _key, "enrol": _enrol, "status": _status, "own": _own}
    try:
        run[arguments.pop("command")](**arguments)
        return 0
    except (ModuleNotFoundError, OSError, RuntimeError, UnpicklingError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def _init(folder: Path) -> None:
    write_app(folder)
    print(f"wrote app.py, device.py and pyproject.toml in {folder}")
    print(f"`python -m lightning_spectral network demo {folder}` runs it here; `network kit` sets up your machines.")


def write_app(folder: Path) -> None:
    """Write an app into a folder; ``FileExistsError`` if there is something in it."""
    if folder.exists() and any(folder.iterdir()):
        raise FileExistsError(f"{folder} is not empty; name another folder.")
    folder.mkdir(parents=True, exist_ok=True)
    name = re.sub("[^a-z0-9]+", "-", f"app-{folder.resolve().name.lower()}")[:32].strip("-")  # as Flower allows
    for file in (files("lightning_spectral.network") / "templates" / "app").iterdir():
        text = file.read_text(encoding="utf-8").replace("{name}", name)
        (folder / file.name.removesuffix(".txt")).write_text(text, encoding="utf-8")


def _kit(server: str, names: list[str], threads: int, node_config: str) -> None:
    from lightning_spectral.network.kit import Kit

    kit = Kit(Path("kit"), server, threads)
    kit.write(names, node_config)
    if getpass.getuser() == "root":
        print("warning: the services will run as root, and every app's code with them; write the kit as another user.")
    print(f"wrote {kit.folder}; {kit.folder}/README.md says how to go on")


def _key(folder: Path) -> None:
    from lightning_spectral.network.kit import write_key

    print(write_key(folder))


def _enrol(name: str, key: Path | None, kit: Path) -> None:
    from lightning_spectral.network.kit import enrol

    print(f"{name} is node {enrol(kit, name, sys.stdin.read() if key is None else key.read_text())}")


def _own(state_folder: Path, module: str, weights: Path | None, output: Path, seed: int | None) -> None:
    """Write a client's own model; refuse to write one of which a part has only the values of a new module."""
    import torch

    from lightning_spectral.network.device import maker, own_model

    made = maker(module)()
    if weights is not None:
        found = torch.load(weights, map_location="cpu", weights_only=True)
        made.load_state_dict(found.get("state_dict", found))
    own = own_model(state_folder, made, seed)
    if weights is None and own.shared:
        raise ValueError(f"Clients share {first_of(own.shared, 3)}; give the server's values, `--weights last.ckpt`.")
    torch.save(own.module.state_dict(), output)
    print(f"wrote {output}, of the run with seed {own.seed}, after the client's turn in round {own.round_idx}")


def _status(kit: Path, prometheus: bool) -> None:
    from lightning_spectral.network.status import as_prometheus, as_table, status_of

    print((as_prometheus if prometheus else as_table)(status_of(kit)))


def _door(folder: Path, host: str, port: int, link_port: int) -> None:
    from lightning_spectral.network.door import server_of

    server_of(folder, host, port, link_port).run()


def _demo(folder: Path | None, clients: int, run_config: str, node_config: str) -> None:
    """Run an app, and show those of its lines that are about rounds; all of them if it fails."""
    with from_extra("network"):
        import flwr  # noqa: F401
    from lightning_spectral.network.local_network import LocalNetwork
    from lightning_spectral.network.status import SERVER

    if folder is not None and not (folder / "pyproject.toml").is_file():
        raise FileNotFoundError(f"{folder} has no pyproject.toml; `network init FOLDER` writes an app.")
    lines, finished = list[str](), False
    with tempfile.TemporaryDirectory(prefix="spectral-network-") as path:
        if folder is None:
            write_app(folder := Path(path) / "app")
            run_config = f'clients={clients} wait_for={clients} folder="{path}/results" {run_config}'
        print("Starting a SuperLink, with a certificate and keys for this run alone ...", flush=True)
        with LocalNetwork(Path(path)) as network:
            for client in range(clients):
                network.add_node(str(client), node_config)
                print(f"Client {client} is connected.", flush=True)
            print("Starting the run. Its first message to a client starts a process there, for seconds.", flush=True)
            command = ["flwr", "run", str(folder), SERVER, "--stream", "--run-config", run_config]
            streams: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
            with subprocess.Popen(command, env=network.environment, text=True, errors="replace", **streams) as process:
                for line in process.stdout or ():
                    lines.append(line)
                    finished |= "`Trainer.fit` stopped" in line
                    if line.startswith(("Round ", "Spectral start")):
                        print(line, end="", flush=True)
    if not finished or process.returncode:
        raise RuntimeError("The run did not finish:\n" + "".join(lines))
    print("The run has finished.")
