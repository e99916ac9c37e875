"""Flower itself on this machine, with TLS and keys: bit equality, what is killed, and who is refused."""

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Collection, Iterator
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from loopback_runs import TESTS, expected, run_config, same, wait_for, weights, write_app

STRANGERS = "a stranger's filter"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("flwr") is None, reason="Flower is not installed: constraints-network.txt"),
]


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    from lightning_spectral.network.local_network import LocalNetwork

    folder = tmp_path_factory.mktemp("network")
    write_app(folder, "loopback_app")
    write_app(folder, "other_packages_app", "loopback_app")
    with LocalNetwork(folder, {"PYTHONPATH": str(TESTS.parent)}) as network:
        for client in range(3):
            network.add_node(str(client))
        yield network


def command(network: Any, app: str, settings: dict[str, Any]) -> list[str]:
    return ["flwr", "run", str(network.folder / app), "server", "--stream", "--run-config", run_config(settings)]


def run(network: Any, folder: Path, app: str = "loopback_app", **settings: Any) -> str:
    """Run an app to its end, and return its log."""
    printed: str = network.run(command(network, app, {"folder": str(folder), **settings}))
    assert "`Trainer.fit` stopped" in printed, printed + network.log("superlink")[-3000:]
    return printed


@pytest.mark.parametrize(
    "algorithm",
    ["fedavg", "spectral", "scaffold", "lora", "zampling", "width", "fiarse", "stale", "two models", STRANGERS],
)
def test_the_weights_are_those_of_the_simulation(network: Any, tmp_path: Path, algorithm: str) -> None:
    run(network, tmp_path, rounds=3, algorithm=algorithm)
    assert same(weights(tmp_path), expected(tmp_path, rounds=3, algorithm=algorithm))


def test_secure_sums_give_the_weights_of_plain_ones(network: Any, tmp_path: Path) -> None:
    run(network, tmp_path, rounds=3, algorithm="secure sums")
    assert same(weights(tmp_path), expected(tmp_path, rounds=3, algorithm="fedavg"))


def test_demo_runs_an_app_of_ones_own_as_the_simulation_does(tmp_path: Path) -> None:
    write_app(tmp_path, "loopback_app")
    settings = run_config({"folder": str(tmp_path), "rounds": 2, "algorithm": "spectral"})
    command = [sys.executable, "-m", "lightning_spectral", "network", "demo", str(tmp_path / "loopback_app")]
    environment = {**os.environ, "PYTHONPATH": str(TESTS.parent)}
    done = subprocess.run(
        [*command, "--run-config", settings], env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert same(weights(tmp_path), expected(tmp_path, rounds=2, algorithm="spectral"))


def test_models_of_other_packages_learn_as_in_the_simulation(network: Any, tmp_path: Path) -> None:
    """GPT-2 and BERT of transformers and a DenseNet of MONAI, by terms and by adapters, all in one federation."""
    for package in ("transformers", "monai"):
        pytest.importorskip(package, reason="neither Flower nor we need it: install it beside constraints-network.txt")
    run(network, tmp_path, "other_packages_app", rounds=2)
    assert same(weights(tmp_path), expected(tmp_path, "other_packages_app", rounds=2))


def test_a_run_goes_on_after_the_link_was_killed(network: Any, tmp_path: Path) -> None:
    run(network, tmp_path, rounds=1, algorithm="scaffold")
    network.kill("superlink")
    network.start_link()
    first = tmp_path / "first.ckpt"
    shutil.move(tmp_path / "last.ckpt", first)
    run(network, tmp_path, rounds=2, algorithm="scaffold", resume=str(first))
    assert same(weights(tmp_path), expected(tmp_path, rounds=2, algorithm="scaffold"))


def test_a_run_goes_on_after_the_server_app_was_killed_alone(network: Any, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"algorithm": "scaffold", "folder": str(tmp_path)}
    start(network, "killed", rounds=8, **settings)
    wait_for(lambda: "round 1: in, in, in" in network.log("killed"))
    (server_app,) = processes_of("flwr-serverapp", network)
    os.kill(server_app, signal.SIGKILL)
    network.kill("killed")
    first = tmp_path / "first.ckpt"
    shutil.move(tmp_path / "last.ckpt", first)
    assert 1 <= torch.load(first, weights_only=False)["epoch"] < 4
    run(network, tmp_path, rounds=5, algorithm="scaffold", resume=str(first))
    assert same(weights(tmp_path), expected(tmp_path, rounds=5, algorithm="scaffold"))


def processes_of(program: str, network: Any) -> list[int]:
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended, or is somebody else's
            kit = str(network.kit.folder).encode()
            if program.encode() in (folder / "cmdline").read_bytes() and kit in (folder / "environ").read_bytes():
                found.append(int(folder.name))
    return found


def start(network: Any, name: str, **settings: Any) -> None:
    """Start a run, and go on while it runs."""
    network.start(name, command(network, "loopback_app", settings))


def test_a_node_that_is_killed_has_dropped_out(network: Any, tmp_path: Path) -> None:
    start(network, "run", folder=str(tmp_path), rounds=3, patience=5.0)
    wait_for(lambda: "round 0: in, in, in" in network.log("run"))
    network.kill("node-2", without_warning=True)
    wait_for(lambda: "`Trainer.fit` stopped" in network.log("run"))
    assert re.search("round 2: dropped_out, in, in", network.log("run"))
    from lightning_spectral.network.status import status_of

    rows = {row["client"]: row for row in status_of(network.kit.folder)}
    assert rows["2"]["left_out"].keys() == {"dropped_out"}
    for client, row in rows.items():
        assert row["connected"] == (client in ("0", "1"))
        assert min(row["answered"], row["sent_bytes"], row["received_bytes"]) > 0
    network.kill("run")
    network.start_node("2")


WORKER, NODE = "lightning_spectral.network.worker", "lightning_spectral.network.supernode"


def test_a_run_goes_on_after_a_worker_was_killed(network: Any, tmp_path: Path) -> None:
    start(network, "worker", algorithm="lora", folder=str(tmp_path), rounds=4)
    wait_for(lambda: "round 0: in, in, in" in network.log("worker"))
    os.kill(processes_of(WORKER, network)[0], signal.SIGKILL)
    wait_for(lambda: "`Trainer.fit` stopped" in network.log("worker"))
    network.kill("worker")
    assert network.log("worker").count("in, in, in") == 4
    assert same(weights(tmp_path), expected(tmp_path, algorithm="lora", rounds=4))


def test_a_client_whose_message_is_not_handed_on_has_dropped_out(network: Any, tmp_path: Path) -> None:
    start(network, "unanswered", folder=str(tmp_path), rounds=3)
    wait_for(lambda: "round 0: in, in, in" in network.log("unanswered"))
    # what hands messages on lives for a fraction of a second
    while not (forks := children_in(network, children_in(network, children_in(network, [os.getpid()])))):
        assert "`Trainer.fit` stopped" not in network.log("unanswered")
    os.kill(forks[0], signal.SIGKILL)
    wait_for(lambda: "`Trainer.fit` stopped" in network.log("unanswered"))
    network.kill("unanswered")
    assert re.search("round [12]: (dropped_out|in), in, in", network.log("unanswered"))  # or in time for another try
    assert len(processes_of(WORKER, network)) == 3


def children_in(network: Any, parents: Collection[int]) -> list[int]:
    """The processes of SuperNodes that some processes have started: SuperNodes, what waits for messages, its forks."""
    from lightning_spectral.network.local_network import processes

    known = dict(processes())
    return [pid for pid in processes_of(NODE, network) if known.get(pid) in parents]


def test_nothing_remains_of_nodes_that_are_killed(network: Any, tmp_path: Path) -> None:
    run(network, tmp_path, rounds=1)
    assert len(processes_of(WORKER, network)) == 3
    for node in children_in(network, [os.getpid()]):
        os.kill(node, signal.SIGKILL)
        os.waitpid(node, 0)
    wait_for(lambda: not processes_of(WORKER, network) + processes_of(NODE, network), 60)
    for client in range(3):
        come_back(network, str(client))


def come_back(network: Any, client: str) -> None:
    """Start a killed node again and again, as a service does: the link lets it in once it has missed it."""
    name, told = f"node-{client}", "SuperNode ID"
    before = network.log(name).count(told)

    def is_back() -> bool:
        if network._processes[name].poll() is not None:
            network.kill(name)
            network.start_node(client)
        return bool(network.log(name).count(told) > before)

    wait_for(is_back)


def test_a_foreign_key_and_a_foreign_authority_are_refused(network: Any, tmp_path: Path) -> None:
    from lightning_spectral.network.kit import write_certificates

    network.add_node("stranger", register=False)
    write_certificates(tmp_path, "127.0.0.1")
    refused(network, "Failed to activate SuperNode")
    network.start_node("stranger", authority=tmp_path / "ca.crt")
    refused(network, "certificate verify failed")


def test_a_key_that_is_enrolled_for_one_name_passes_for_no_other(network: Any, tmp_path: Path) -> None:
    network.add_node("3")
    (own := network.kit.folder / "thief").mkdir()
    node = (network.kit.folder / "3" / "registered").rename(own / "registered").read_text()
    wait_for(lambda: "SuperNode ID" in network.log("node-3"))
    log = run(network, tmp_path, rounds=1)
    network.kill("node-3")
    assert f"Node {node} was rejected: it says that it is client '3', and its key is that of 'thief'; give" in log
    assert "round 0: in, in, in\n" in log


def refused(network: Any, why: str) -> None:
    """Wait until the node of a stranger says why it is not connected, and end it."""
    wait_for(lambda: why in network.log("node-stranger"))
    network.kill("node-stranger")
