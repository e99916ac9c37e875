"""Flower's side of the network: what travels, what its errors mean, and the two apps, called without its processes."""

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from fake_line import data_of_node, toy_client_data
from federation import same_state, seeded
from flwr.app import ConfigRecord, Context, Error, Message, RecordDict
from flwr.proto.message_pb2 import PullObjectResponse
from flwr.proto.node_pb2 import Node
from flwr.serverapp import Grid
from flwr.supercore.constant import TaskType
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
from flwr.supercore.inflatable.inflatable_utils import ObjectUnavailableError
from flwr.supercore.superexec import run_superexec
from flwr.supercore.superexec.executor.types import ExecutionSpec
from flwr.supercore.task_identity import TaskIdentity
from flwr.supernode import start_client_internal
from hypothesis import given
from hypothesis import strategies as st
from other_process import toy_data
from ternary import Ternary
from toy_models import LitMLP

import lightning_spectral as ls
import lightning_spectral.network as net
from lightning_spectral.network import flower, local_network, supernode
from lightning_spectral.network.device import answered, service_of
from lightning_spectral.network.flower import LARGE, FlowerLine, as_records, parts_of
from lightning_spectral.network.line import Question
from lightning_spectral.network.roster import Roster
from lightning_spectral.network.worker import Job

PARTS = st.dictionaries(st.text(max_size=8), st.binary(max_size=20) | st.just(bytes(LARGE)), max_size=4)


class FakeGrid(Grid):
    """Nodes that answer at once, in this process; Flower's own message ids, and what its SuperLink has of answers."""

    node, run = Node(node_id=1), SimpleNamespace(run_id=1)

    def __init__(self, app: Any, node_configs: dict[int, dict[str, Any]]) -> None:
        self.app, self.replies, self.objects = app, dict[str, Message](), dict[str, bytes]()
        self.asked, self.handed_on = dict[str, Message](), dict[str, Message]()
        self._runtime_client, self.spoil = self, dict[str, Callable[[bytes], bytes]]()
        self.contexts = {
            node: Context(run_id=1, node_id=node, node_config=config, state=RecordDict(), run_config={})
            for node, config in node_configs.items()
        }

    def set_run(self, run: Any) -> None: ...

    def create_message(self, *args: Any, **kwargs: Any) -> Message:
        raise NotImplementedError

    def send_and_receive(self, *args: Any, **kwargs: Any) -> Iterable[Message]:
        raise AssertionError("it sleeps three seconds between two looks")

    def get_node_ids(self) -> Iterable[int]:
        return list(self.contexts)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        return [self._push(message) for message in messages]

    def _push(self, message: Message) -> str:
        message.metadata.__dict__["_message_id"] = ticket = message.object_id
        try:
            reply = self.app(message, self.contexts[message.metadata.dst_node_id])
        except Exception as error:
            reply = Message(Error(code=2, reason=repr(error)), reply_to=message)
        self.asked[ticket], self.replies[ticket] = message, reply
        return ticket

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        raise AssertionError("it waits for the slowest device")

    def PullMessages(self, request: Any) -> Any:
        gone = [Message(Error(3), reply_to=self.handed_on[t]) for t in request.message_ids if t in self.handed_on]
        tickets = [ticket for ticket in request.message_ids if ticket in self.replies]
        self.handed_on.update((ticket, self.asked[ticket]) for ticket in tickets)
        found = [*gone, *map(self.replies.pop, tickets)]
        for reply in found:
            for name, part in get_all_nested_objects(reply).items():
                self.objects[name] = self.spoil.get(name, bytes)(part.deflate())
        heads = [SimpleNamespace(metadata=reply.metadata) for reply in found]
        return SimpleNamespace(messages_list=heads, message_object_trees=[*map(get_object_tree, found)])

    def PullObject(self, request: Any) -> PullObjectResponse:
        content = self.objects.get(request.object_id)
        found = {"object_found": content is not None, "object_available": bool(content)}
        return PullObjectResponse(object_content=content, **found)

    def ConfirmMessageReceived(self, request: Any) -> None:
        del self.objects[request.message_object_id]


@given(PARTS)
def test_parts_travel_unchanged(parts: dict[str, bytes]) -> None:
    assert parts_of(as_records(parts)) == parts


def test_large_parts_that_are_equal_are_one_object() -> None:
    first, second = (as_records({"head": head, "values": bytes(range(256)) * 256}) for head in (b"a", b"b"))
    assert first["large"].object_id == second["large"].object_id
    assert first.object_id != second.object_id


def test_small_parts_are_three_objects_with_their_message() -> None:
    message = Message(as_records({"head": b"a", "values": bytes(LARGE - 1)}), dst_node_id=7, message_type="train")
    assert len(get_all_nested_objects(message)) == 3


def test_nodes_are_listed_once_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    grid, now = FakeGrid(None, {7: {}}), 100.0
    line = FlowerLine(grid)
    monkeypatch.setattr(time, "monotonic", lambda: now)
    assert line.nodes() == [7]
    grid.contexts[8] = grid.contexts.pop(7)
    now = 100.9
    assert line.nodes() == [7]
    now = 101.0
    assert line.nodes() == [8]


def test_what_is_not_a_part_is_left_out() -> None:
    assert parts_of(RecordDict({"small": ConfigRecord({"text": "no bytes"}), "other": ConfigRecord({})})) == {}


@pytest.mark.parametrize(("code", "reason"), [(2, "error"), (8, "dropped_out"), (4, "late"), (5, "dropped_out")])
def test_errors_of_flower_are_our_reasons(code: int, reason: str) -> None:
    grid = FakeGrid(lambda message, context: Message(Error(code=code, reason="why"), reply_to=message), {7: {}})
    line = FlowerLine(grid)
    ticket = line.ask(Question(7, "train", {"a": b"b"}))
    assert ticket is not None
    (answer,) = line.answers([ticket])
    assert (answer.ticket, answer.reason, answer.message) == (ticket, reason, "why")
    assert list(line.answers([ticket])) == []  # at most once


def with_chunks(chunks: str) -> Callable[[bytes], bytes]:
    """An array that names others of its chunks."""

    def change(content: bytes) -> bytes:
        head, body = content.split(bytes(1), 1)
        if not head.startswith(b"Array "):
            return content
        body = body.replace(b'"arraychunk_ids": [0]', f'"arraychunk_ids": {chunks}'.encode())
        return b" ".join([*head.split(b" ")[:-1], str(len(body)).encode()]) + bytes(1) + body

    return change


MALFORMED: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "a chunk that it does not have": (with_chunks("[7]"), "IndexError"),
    "no chunk": (with_chunks("[]"), "ValueError: Unexpected set"),
    "no list of chunks": (with_chunks("[0"), "JSONDecodeError"),
    "a chunk named often": (with_chunks(str([0] * 100)), "its objects count as 6,555,400 bytes; at most 5,000"),
    "of no known kind": (lambda content: b"X" + content, "KeyError: 'X"),
    "without a head": (lambda content: content[:20], "ValueError"),
    "no message": (lambda content: content.replace(b"Message ", b"ConfigRecord ", 1), "Error"),
    "large": (lambda content: content + bytes(2**22), "its objects count as 4,"),
}


def two_answers() -> tuple[FakeGrid, FlowerLine, list[Any], list[Message]]:
    """A line with two nodes that have been asked and have answered, their tickets, and their answers."""
    grid = FakeGrid(lambda one, context: Message(as_records(parts_of(one.content)), reply_to=one), {7: {}, 8: {}})
    line = FlowerLine(grid)
    questions = [Question(node, "train", {"values": bytes([node]) * LARGE}, most_bytes=5000) for node in (7, 8)]
    tickets = [line.ask(question) for question in questions]
    return grid, line, tickets, [grid.replies[str(ticket)] for ticket in tickets]


@pytest.mark.parametrize("name", MALFORMED)
def test_a_malformed_answer_is_its_senders_failure(name: str) -> None:
    grid, line, tickets, replies = two_answers()
    spoil, message = MALFORMED[name]
    own = get_all_nested_objects(replies[0]).keys() - get_all_nested_objects(replies[1]).keys()
    grid.spoil = dict.fromkeys(own, spoil)
    answer, honest = line.answers(tickets)
    assert (answer.ticket, answer.reason) == (tickets[0], "error")
    assert message in answer.message
    assert (honest.ticket, honest.parts) == (tickets[1], {"values": bytes([8]) * LARGE})
    assert not grid.objects.keys() & {reply.object_id for reply in replies}  # the SuperLink may forget them


def test_an_answer_belongs_to_the_question_that_the_superlink_says() -> None:
    grid, line, tickets, replies = two_answers()
    del grid.replies[str(tickets[1])]
    grid.spoil = {replies[0].object_id: lambda content: content.replace(*(str(t).encode() for t in tickets))}
    assert [answer.ticket for answer in line.answers(tickets)] == [tickets[0]]


def test_a_device_that_is_slow_to_send_holds_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    grid, line, tickets, replies = two_answers()
    last = replies[0].object_id
    grid.spoil = {last: lambda content: b""}
    asked = [line.ask(Question(node, "train", seconds=5.0)) for node in (7, 8)]
    del grid.replies[str(asked[0])]
    assert [answer.ticket for answer in line.answers(tickets)] == [tickets[1]]
    assert list(line.answers(tickets)) == []
    grid.objects[last] = replies[0].deflate()
    assert [answer.ticket for answer in line.answers(tickets)] == [tickets[0]]
    assert line._awaited.keys() == set(asked)
    monkeypatch.setattr(time, "monotonic", lambda: math.inf)
    assert list(line.answers([])) == []
    assert not line._awaited


def test_an_answer_of_many_objects_is_not_fetched() -> None:
    grid, line, _, _ = two_answers()
    ticket = str(line.ask(Question(7, "train", {str(i): bytes([i]) * LARGE for i in range(60)}, most_bytes=5000)))
    grid.PullObject = None  # type: ignore[assignment, method-assign]
    (answer,) = line.answers([ticket])
    assert "its objects count as 8,126,464 bytes; at most 5,000 are read" in answer.message  # 124 of them


def test_a_body_that_is_too_large_has_no_ticket() -> None:
    grid = FakeGrid(None, {7: {}})
    grid.push_messages = lambda messages: []  # type: ignore[method-assign]
    assert FlowerLine(grid).ask(Question(7, "train")) is None


@pytest.fixture(autouse=True)
def _within_a_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Messages read from here in which run their process is, and servers where they keep what they see."""
    monkeypatch.setenv("FLWR_HOME", str(tmp_path))
    for name in ("_run_id", "_node_id", "_task_id"):
        monkeypatch.setattr(TaskIdentity, name, 1, raising=False)


DATA, HERE = "fake_line:data_of_node", __name__


@pytest.fixture
def without_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Devices answer in this process."""

    @cache
    def service(job: bytes) -> Any:
        given = json.loads(job)
        named = given["modules"], given["client"], given["config"], str(given["node"]), given["trusted"]
        return service_of(*named, given["accelerator"], given["share_errors"])

    def ask(job: Job, question: str, parts: Any, seconds: float) -> dict[str, bytes]:
        return answered(lambda: service(job.written()).answer(question, parts), job.share_errors)

    monkeypatch.setattr(flower, "ask", ask)


SHARDED = ls.SpectralSharding(keep_ratio=0.5, layers=ls.LayerChoices(keep_first_and_last_dense=False))


@pytest.mark.usefixtures("without_workers")
@pytest.mark.parametrize("options", [{"algorithm": SHARDED}, {"filters": [Ternary(0.5)]}], ids=["sharded", "ternary"])
def test_the_two_apps_give_the_bits_of_the_simulation(options: Any, quiet: Any) -> None:
    trained = []

    def federation(config: Any) -> ls.FederatedModule:
        trained.append(ls.FederatedModule(seeded(LitMLP), clients_per_round=4, seed=3, **options))
        return trained[-1]

    def trainer(config: Any) -> pl.Trainer:
        return pl.Trainer(**quiet, max_epochs=2, num_sanity_val_steps=0)

    app = net.client_app("toy_models:LitMLP", DATA, trusted=["ternary"])
    grid = FakeGrid(app, {90 - i: {"client": str(i)} for i in range(12)})
    server = net.server_app(federation, trainer, val=lambda: toy_data().val, wait_for=12, patience=1.0)
    server(grid, Context(run_id=1, node_id=0, node_config={}, state=RecordDict(), run_config={}))
    simulated = federation({})
    trainer({}).fit(simulated, toy_data())
    assert same_state(trained[0].state_dict(), simulated.state_dict())


def asked(data: str, module: str = "toy_models:LitMLP", /, **config: Any) -> str:
    """What the server warns of when it asks a device who it is."""
    roster = Roster(FlowerLine(FakeGrid(net.client_app(module, data, share_errors=True), {7: config})), patience=0.0)
    with pytest.warns(UserWarning, match="Node 7 was rejected: ") as caught:
        roster.look()
    return str(caught[0].message)


def no_data(config: Any) -> Any:
    return torch.zeros(3)


def data_of_ward(config: Any) -> Any:
    return data_of_node({"client": config["ward"]})


def stream(config: Any) -> Any:
    return net.ClientData(iter([1, 2]))


class LitNeeds(LitMLP):
    def __init__(self, width: int) -> None:
        super().__init__(width=width)


made = torch.nn.Linear(2, 2)


@pytest.mark.usefixtures("without_workers")
def test_what_is_wrong_with_a_device_is_named_when_it_says_who_it_is() -> None:
    assert "TypeError: `client(config)` must be an instance of ClientData" in asked(f"{HERE}:no_data")
    said = asked(f"{HERE}:data_of_ward", client="0", folder="x")
    assert "`client(config)` reads config['ward'], and the configuration of run and node holds client, folder" in said
    said = asked(f"{HERE}:stream")
    assert "TypeError: `train` must be a map-style data set, with `__len__` and `__getitem__`" in said
    said = asked(DATA, f"{HERE}:LitNeeds", client="0")
    assert ":LitNeeds is called without arguments, and needs width; name a function that gives them." in said
    said = asked(DATA, f"{HERE}:made", client="0")
    assert ":made must be a class or function that makes the module, got a Linear." in said
    for name in ("nowhere:data", f"{HERE}:nothing"):
        assert f"{name} cannot be imported; the device's log says why." in asked(name)


def test_module_and_data_are_given_by_name() -> None:
    with pytest.raises(TypeError, match=r"`module` must be a name, such as .*; got <class '.*LitMLP'>"):
        net.client_app(LitMLP, DATA)  # type: ignore[arg-type]
    for name in ("LitMLP", ":b", "a:", "a:b()"):
        with pytest.raises(ValueError, match='`client` must be a name of the form "file:name", such as'):
            net.client_app({"a": "a:b"}, name)


class Killing(FakeGrid):
    """Kills the first process of a device before the second round."""

    def _push(self, message: Message) -> str:
        pids = [int(file.name) for file in self.folder.iterdir()]
        if message.metadata.group_id == "1" and len(pids) == 1:
            os.kill(pids[0], signal.SIGKILL)
        return super()._push(message)


def test_a_device_that_is_killed_says_what_is_lost(tmp_path: Path, quiet: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Module, frozen base and all stay in its process; with another one the bits are the same."""
    monkeypatch.setenv("FLWR_HOME", str(tmp_path))
    (pids := tmp_path / "pids").mkdir()
    device = net.client_app("toy_models:LitMLP", DATA, accelerator="cpu")
    grid = Killing(device, {7: {"client": "3", "folder": str(pids)}})
    grid.folder = pids
    models = [ls.FederatedModule(seeded(LitMLP), algorithm=ls.LoRA(2), clients_per_round=1, seed=3) for _ in range(2)]
    options = {"max_epochs": 4, "num_sanity_val_steps": 0}
    server = net.server_app(lambda config: models[0], lambda config: pl.Trainer(**quiet, **options), patience=60.0)
    server(grid, Context(run_id=1, node_id=0, node_config={}, state=RecordDict(), run_config={}))
    assert len(list(pids.iterdir())) == 2
    examples = toy_client_data()[3]
    alone = ls.FederatedDataModule(examples, ls.NaturalPartitioner([0] * len(examples)), batch_size=4)
    pl.Trainer(**quiet, **options).fit(models[1], alone)
    assert same_state(models[0].state_dict(), models[1].state_dict())


def test_the_process_that_hands_messages_on_imports_neither_torch_nor_lightning() -> None:
    script = """
import sys
from lightning_spectral.network import client_app
client_app("app:LitNet", "app:client")
heavy = {"torch", "lightning", "msgspec", "safetensors"} & set(sys.modules)
assert not heavy, heavy
"""
    subprocess.run([sys.executable, "-c", script], check=True)


@pytest.mark.parametrize(
    ("federation", "trainer", "message"),
    [
        (lambda config: LitMLP(), None, r"`federation\(config\)` must be an instance of FederatedModule, got"),
        (lambda config: ls.FederatedModule(LitMLP(), clients_per_round=1), dict, r"`trainer\(config\)` must be an"),
    ],
)
def test_what_the_server_gets_is_checked(federation: Any, trainer: Any, message: str) -> None:
    server = net.server_app(federation, trainer)
    grid = FakeGrid(net.client_app("toy_models:LitMLP", DATA), {7: {"client": "0"}})
    with pytest.raises(TypeError, match=message):
        server(grid, Context(run_id=1, node_id=0, node_config={}, state=RecordDict(), run_config={}))


@pytest.mark.usefixtures("without_workers")
@pytest.mark.parametrize("name", ["wait_for", "patience", "deadline", "at_once"])
def test_what_the_run_says_comes_before_what_the_app_says(name: str, quiet: Any) -> None:
    server = net.server_app(lambda run: ls.FederatedModule(LitMLP()), lambda run: pl.Trainer(**quiet), **{name: 1})
    grid = FakeGrid(net.client_app("toy_models:LitMLP", DATA), {7: {"client": "0"}})
    with pytest.raises(ValueError, match=f"`{name}` must be .*, got -1"):
        server(grid, Context(run_id=1, node_id=0, node_config={}, state=RecordDict(), run_config={name: -1}))


def test_a_node_waits_for_a_message_at_most_a_fifth_longer_than_it_must(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses, slept = supernode.Pauses(), list[float]()
    monkeypatch.setattr(time, "sleep", slept.append)
    for _ in range(2):
        slept.clear()
        pauses.sleep(0.5)  # for its own answer
        waited = 0.0
        for _ in range(40):
            pauses.sleep(3.0)
            assert slept[-1] <= min(3.0, supernode.SHORTEST * supernode.GROWTH + 0.2 * waited) + 1e-9
            waited += slept[-1]
        assert slept[-1] == 3.0


def test_a_message_and_its_parts_are_not_waited_for_by_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    def pull(name: str) -> bytes:
        tries.append(name)
        if len(tries) <= 2:  # two of Flower's pauses are at least 2.4 seconds
            raise ObjectUnavailableError(name)
        return b"content"

    program, sent, pipe = supernode.program, RecordDict(), os.pipe()
    replaced = {start_client_internal: ["time", "pull_objects"], run_superexec: ["get_executor"]}
    for module, names in {**replaced, program: ["pull_and_inflate_object_from_tree"]}.items():
        for name in names:
            monkeypatch.setattr(module, name, getattr(module, name))
    monkeypatch.setattr(run_superexec, "time", time)
    monkeypatch.setattr(os, "pipe", lambda: pipe)
    for name, pid in (("flower_supernode", 1), ("flower_superexec", 0)):
        monkeypatch.setattr(supernode, name, lambda: None)
        monkeypatch.setattr(os, "fork", lambda pid=pid: pid)
        monkeypatch.setattr(sys, "argv", ["supernode", "--port=9"])
        supernode.main()
    assert "--runtime-api-address=127.0.0.1:9" in sys.argv
    tries, start = list[str](), time.monotonic()
    assert start_client_internal.pull_objects(["a"], pull) == {"a": b"content"}
    run_superexec.time.sleep(60.0)  # there is a message
    tries.clear()
    pulled = program.pull_and_inflate_object_from_tree(
        get_object_tree(sent), lambda name: pull(name) and sent.deflate(), lambda name: None
    )
    assert pulled == sent
    assert time.monotonic() - start < 2.0
    start = time.monotonic()
    run_superexec.time.sleep(0.2)  # there is none
    assert time.monotonic() - start > 0.15


def test_what_a_node_replaces_in_flower_is_there() -> None:
    assert start_client_internal.time is time
    assert run_superexec.time is time
    assert run_superexec.get_executor("subprocess").__class__ is supernode.ForkingExecutor.__base__


def test_the_program_for_a_message_runs_in_a_fork(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def program(address: str, token: str, insecure: bool, parent_pid: int | None) -> None:
        (tmp_path / "said").write_text(f"{address} {token} {insecure} {parent_pid} {os.getppid()}")

    forked, fork = list[int](), os.fork  # there may be other children, of packages that are imported
    monkeypatch.setattr(supernode.program, "run_clientapp", program)
    monkeypatch.setattr(os, "fork", lambda: forked.append(fork()) or forked[-1])
    executor = supernode.ForkingExecutor()
    spec = ExecutionSpec(TaskType.CLIENT_APP, "127.0.0.1:9", "a token", True, None, False, 7, False, 1)
    assert executor.launch(spec).status == "accepted"
    os.waitid(os.P_PID, forked[0], os.WEXITED | os.WNOWAIT)
    executor.reconcile()
    with pytest.raises(ChildProcessError):
        os.waitpid(forked[0], os.WNOHANG)
    assert (tmp_path / "said").read_text() == f"127.0.0.1:9 a token True 7 {os.getpid()}"


# starts another in a session of its own, which starts a third; both ignore that they are asked to end
FAMILY = """\
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
depth, folder = int(sys.argv[1]), sys.argv[2]
open(f"{folder}/{depth}", "w").write(str(os.getpid()))
if depth:
    subprocess.Popen([sys.executable, "-c", sys.argv[3], str(depth - 1), *sys.argv[2:]], start_new_session=depth == 2)
time.sleep(600)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="Flower's processes need POSIX")
@pytest.mark.parametrize("without_warning", [True, False])
def test_all_that_a_process_has_started_ends_with_it(
    tmp_path: Path, without_warning: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_network, "END_SECONDS", 0.3)
    command = [sys.executable, "-c", FAMILY, "2", str(tmp_path), FAMILY]
    process = subprocess.Popen(command, start_new_session=True)
    files = [tmp_path / str(depth) for depth in (2, 1, 0)]
    until = time.monotonic() + 60
    while not all(file.exists() and file.read_text() for file in files):
        assert time.monotonic() < until
        time.sleep(0.05)
    local_network.end(process, without_warning=without_warning)
    assert process.returncode == -signal.SIGKILL
    assert not {int(file.read_text()) for file in files} & {pid for pid, _ in local_network.processes()}
