"""Flower as the network: its SuperLink carries messages, its two apps run the server's Trainer and the devices.

A device imports this file for every message, so it imports neither torch nor Lightning.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_spectral.errors import check_is, from_extra
from lightning_spectral.network.line import LONGEST, Answer, Line, Question
from lightning_spectral.network.status import FILE
from lightning_spectral.network.worker import Job, ask

with from_extra("network"):
    from flwr.app import DEFAULT_TTL, Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest
    from flwr.proto.runtime_pb2 import PullAppMessagesRequest
    from flwr.serverapp import Grid, ServerApp
    from flwr.supercore.inflatable import inflatable_object as flower_object
    from flwr.supercore.inflatable import inflatable_utils as flower_objects
    from flwr.supercore.inflatable.inflatable_protobuf_utils import make_pull_object_fn_protobuf

if TYPE_CHECKING:
    import lightning.pytorch as pl

    from lightning_spectral.protocol.records import ExclusionReason

Config = Mapping[str, Any]

# Flower's error codes that are no failure of a device's code; a worker that stopped responding (8) was killed
REASONS: dict[int, ExclusionReason] = {3: "dropped_out", 4: "late", 5: "dropped_out", 8: "dropped_out"}
SLACK = 60.0  # seconds that Flower keeps a message after we have given it up
OBJECT, AROUND = 2**16, 2**22  # bytes that any object counts as, and of what Flower writes around the parts
# what a run's configuration may say to RemoteClients
FROM_RUN = "wait_for", "patience", "deadline", "keep_first", "at_once"
LARGE = OBJECT  # bytes; a part of so many is sent once however many messages hold it, and is three objects more
SMALL_PARTS, LARGE_PARTS = "small", "large"


def client_app(
    module: str | Mapping[str, str],
    client: str,
    *,
    accelerator: str = "auto",
    share_errors: bool = False,
    trusted: Collection[str] = (),
) -> ClientApp:
    """Make the app that a device runs.

    It belongs into a file of its own, which Flower imports for every message. Module and data are given by name, and
    made in another process, which is started once a run and imports your code: what is at module level there, such as
    a cache, lasts from message to message, until nobody has asked the device for a quarter of an hour.

    Args:
        module: Where your LightningModule's class is, or a function that makes the module, such as ``"app:LitNet"``;
            with several models, one for each name. It must be the one that the server trains.
        client: Where the function is that returns the device's own data, `ClientData`, or that of each model by name.
            It is called with the configuration of the run and of the node:
            ``--node-config 'client="ward 7" folder="/data"'``.
        accelerator: Where a device trains, as for a Trainer: ``"cpu"``, ``"gpu"``, or by default what it has.
        share_errors: Whether the server is sent the texts of exceptions, which may quote the device's data; by default
            it is told their class, and the device logs them.
        trusted: Packages, besides this one and those of module and data, whose classes the server may send, such as
            filters.

    Raises:
        TypeError: If the module or the function is given itself.
        ValueError: If a name is none of the form ``"file:name"``.

    Note:
        A device is known by the entry ``client`` of its node's configuration, or ``partition-id``, or by the number
        that Flower gives it, which changes when it is switched off and on.

    Example:
        >>> app = client_app("app:LitNet", "app:client", accelerator="cpu")
    """
    if sys.platform == "win32":
        raise OSError("A device needs Linux or macOS: it keeps a process that is found by a Unix socket.")
    modules = dict(module) if isinstance(module, Mapping) else {"": module}
    for argument, names in (("module", modules.values()), ("client", [client])):
        for name in names:
            _check_name(argument, name)
    app = ClientApp()

    def answer(message: Message, context: Context) -> Message:
        config = {**context.run_config, **context.node_config}
        job = Job(context.node_id, context.run_id, modules, client, config, accelerator, share_errors, tuple(trusted))
        parts = ask(job, message.metadata.message_type, parts_of(message.content), message.metadata.ttl)
        return Message(as_records(parts), reply_to=message)

    app.query()(answer)
    app.query("agree")(answer)
    app.train()(answer)
    app.evaluate()(answer)
    return app


def _check_name(argument: str, name: Any) -> None:
    if not isinstance(name, str):
        raise TypeError(
            f'`{argument}` must be a name, such as "app:LitNet", so that messages do not import what it names; got '
            f"{name!r}."
        )
    if not re.fullmatch(r"\w+(\.\w+)*:\w+(\.\w+)*", name):
        raise ValueError(f'`{argument}` must be a name of the form "file:name", such as "app:LitNet", got {name!r}.')


def server_app(
    federation: Callable[[Config], Any],
    trainer: Callable[[Config], pl.Trainer],
    *,
    val: Any = None,
    test: Any = None,
    **options: Any,
) -> ServerApp:
    """Make the app that the server runs: a Trainer's fit, on the clients that the network reaches.

    Args:
        federation: Returns the `FederatedModule` or `MultiModelModule`, as a simulation would fit it. It is called with
            the run's configuration, ``flwr run --run-config``.
        trainer: Returns the Trainer, likewise.
        val: Validation data at the server, or a function that makes it; with several models, one for each name.
        test: Test data, likewise; it is evaluated after the last round.
        **options: Further arguments of `RemoteClients`: ``wait_for``, ``patience``, ``deadline``, ``keep_first``,
            ``at_once``, ``max_share``, ``update_bound``, ``trust_names``, ``eval_batch_size``.

    Note:
        ``flwr run --run-config 'resume="path.ckpt"'`` resumes from a checkpoint. ``wait_for``, ``patience``,
        ``deadline``, ``keep_first`` and ``at_once`` may be in the run's configuration, too, and are then what it says.
    """

    def main(grid: Grid, context: Context) -> None:
        from lightning.pytorch import Trainer

        from lightning_spectral.network.remote_clients import clients_of_models
        from lightning_spectral.plugin.module import FederatedModule, MultiModelModule

        config = dict(context.run_config)
        model = federation(config)
        check_is("federation(config)", model, FederatedModule | MultiModelModule)
        given = {**options, **{name: config[name] for name in FROM_RUN if name in config}}
        line = FlowerLine(grid, Path(os.environ.get("FLWR_HOME") or Path.home() / ".flwr") / FILE)
        data = clients_of_models(model, line, _made(val, config), _made(test, config), given)
        runner = trainer(config)
        check_is("trainer(config)", runner, Trainer)
        runner.fit(model, datamodule=data, ckpt_path=config.get("resume") or None)
        if test is not None:
            runner.test(model, datamodule=data)

    app = ServerApp()
    app.main()(main)
    return app


def _made(data: Any, config: Config) -> Any:
    """Evaluation data, or what a function or class makes of the configuration."""
    from lightning_spectral.client.local_loop import call_with_accepted

    if not callable(data) or (hasattr(data, "__getitem__") and not isinstance(data, type)):
        return data
    return call_with_accepted(data, config)


@dataclass(eq=False)
class Awaited:
    """A message that was sent, and what has arrived of its answer.

    Attributes:
        most_bytes: Most bytes that the answer may take.
        until: When it is forgotten.
        answer: Name of the answer; empty as long as the SuperLink has none.
        missing: Names of its objects that have not arrived; those that a device sends last are fetched first.
        contents: Those that have, by name.
    """

    most_bytes: float
    until: float
    answer: str = ""
    missing: list[str] = field(default_factory=list)
    contents: dict[str, bytes] = field(default_factory=dict)

    def fetched(self, pull: Callable[[str], bytes]) -> Message:
        """Fetch what is missing; raise ``ObjectUnavailableError`` if its sender is not done."""
        while self.missing:
            self._check_size()
            self.contents[self.missing[-1]] = pull(self.missing[-1])
            self.missing.pop()
        self._check_size()
        return flower_objects.inflate_object_from_contents(self.answer, self.contents)

    def _check_size(self) -> None:
        """Raise ``ValueError`` if it takes too many bytes; a chunk counts as often as it is named."""
        sizes = {name: max(len(content), OBJECT) for name, content in self.contents.items()}
        fetched, joined = OBJECT * len(self.missing) + sum(sizes.values()), 0
        for content in () if self.missing else self.contents.values():
            kind, chunks, _ = flower_object.get_object_head_values_from_object_content(content)
            if kind == Array.__name__:
                named = json.loads(flower_object.get_object_body(content, Array))["arraychunk_ids"]
                joined += sum(sizes[chunks[i]] for i in named)
        if (size := max(fetched, joined)) > self.most_bytes + AROUND:
            raise ValueError(f"its objects count as {size:,} bytes; at most {self.most_bytes:,.0f} are read")


@dataclass(eq=False)
class FlowerLine(Line):
    """The nodes of a Flower run.

    Flower deletes an answer when it is pulled, so each arrives at most once. Its own way to pull waits for all objects
    of all answers, however slow their senders, and reads them whatever their size; this one fetches what is there.

    Args:
        grid: The grid that Flower gives to a server's main function.
        status: File for what a run has seen of its clients.
    """

    grid: Grid
    status: Path | None = None
    _awaited: dict[str, Awaited] = field(default_factory=dict, init=False)
    _nodes: Collection[int] = field(default=(), init=False)
    _listed: float = field(default=-LONGEST, init=False)

    def nodes(self) -> Collection[int]:
        """The nodes that were connected within the last second."""
        if (now := time.monotonic()) >= self._listed + LONGEST:
            self._nodes, self._listed = list(self.grid.get_node_ids()), now
        return self._nodes

    def ask(self, question: Question) -> str | None:
        """Push a message; a body that Flower refuses as too large has no ticket."""
        ttl = DEFAULT_TTL if question.seconds is None else question.seconds + SLACK
        content, group = as_records(question.parts), str(question.round_idx)
        message = Message(content, dst_node_id=question.node, message_type=question.kind, ttl=ttl, group_id=group)
        ticket = next(iter(self.grid.push_messages([message])), None) or None
        if ticket is not None:
            self._awaited[ticket] = Awaited(question.most_bytes, time.monotonic() + ttl)
        return ticket

    def answers(self, tickets: Collection[str]) -> Iterator[Answer]:
        """Yield the answers of which all has arrived; whatever Flower raises about one is its sender's failure."""
        grid, now = self.grid, time.monotonic()
        for ticket in [ticket for ticket, awaited in self._awaited.items() if now > awaited.until]:
            self._forget(ticket)
        unheard = [ticket for ticket in tickets if ticket in self._awaited and not self._awaited[ticket].answer]
        # asked again for what it has handed on, the SuperLink says that there was no such message
        found = grid._runtime_client.PullMessages(PullAppMessagesRequest(message_ids=unheard))
        for head, tree in zip(found.messages_list, found.message_object_trees, strict=True):
            awaited, names = self._awaited[head.metadata.reply_to_message_id], flower_object.iterate_object_tree(tree)
            awaited.answer, awaited.missing = tree.object_id, list(dict.fromkeys(part.object_id for part in names))
        pull = make_pull_object_fn_protobuf(grid._runtime_client.PullObject, grid.node, grid.run.run_id)
        for ticket in (ticket for ticket in tickets if ticket in self._awaited and self._awaited[ticket].answer):
            try:
                answer = _answer(ticket, self._awaited[ticket].fetched(pull))
            except flower_objects.ObjectUnavailableError:  # its sender is not done
                continue
            except flower_objects.ObjectPullError as error:  # its sender has given up
                answer = Answer(ticket, reason="dropped_out", message=str(error))
            except Exception as error:
                answer = Answer(ticket, reason="error", message=f"Flower fails with {type(error).__name__}: {error}")
            self._forget(ticket)
            yield answer

    def _forget(self, ticket: str) -> None:
        """Forget a message, and let the SuperLink delete what it has of its answer."""
        if answer := self._awaited.pop(ticket).answer:
            of_answer = {"node": self.grid.node, "run_id": self.grid.run.run_id, "message_object_id": answer}
            self.grid._runtime_client.ConfirmMessageReceived(ConfirmMessageReceivedRequest(**of_answer))


def _answer(ticket: str, reply: Message) -> Answer:
    if reply.has_error():
        reason = REASONS.get(reply.error.code, "error")
        return Answer(ticket, reason=reason, message=reply.error.reason or f"Flower's error {reply.error.code}")
    return Answer(ticket, parts_of(reply.content))


def as_records(parts: Mapping[str, bytes]) -> RecordDict:
    """The parts of a message, as Flower's records.

    Example:
        >>> parts_of(as_records({"digest": b"12", "values": bytes(70_000)})).keys()
        dict_keys(['digest', 'values'])
    """
    small = ConfigRecord({name: bytes(data) for name, data in parts.items() if len(data) < LARGE})
    large = {
        name: Array(dtype="uint8", shape=(len(data),), stype="bytes", data=bytes(data))
        for name, data in parts.items()
        if len(data) >= LARGE
    }
    return RecordDict({SMALL_PARTS: small, **({LARGE_PARTS: ArrayRecord(large)} if large else {})})


def parts_of(records: RecordDict) -> dict[str, bytes]:
    """The parts of a message; what is not one of them is left out."""
    small, large = records.get(SMALL_PARTS), records.get(LARGE_PARTS)
    arrays = {name: array.data for name, array in large.items()} if isinstance(large, ArrayRecord) else {}
    fields = small.items() if isinstance(small, ConfigRecord) else ()
    return {name: value for name, value in fields if isinstance(value, bytes)} | arrays
