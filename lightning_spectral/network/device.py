"""A device: one client's own data, what is kept of its turns, and what answers the server's messages about it."""

from __future__ import annotations

import inspect
import json
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_spectral.algorithms.fed_avg import FedAvg
from lightning_spectral.algorithms.filter import Plan
from lightning_spectral.arguments import Number, Whole, check_fields, flag
from lightning_spectral.client.batches import BatchSource, Collate, examples_per_epoch
from lightning_spectral.client.batches import ClientData as ClientBatches
from lightning_spectral.client.device import Device
from lightning_spectral.client.masking import Parties
from lightning_spectral.errors import DeviceError, RecordError, check_is, from_extra
from lightning_spectral.filters import ExamplePrivacy, LocalNoise
from lightning_spectral.filters.example_privacy import FIGURE, ExampleEnd
from lightning_spectral.filters.noise import NoiseEnd
from lightning_spectral.filters.privacy import epsilon_of, joined
from lightning_spectral.functional.privacy import draws, warn_of_delta
from lightning_spectral.network import messages
from lightning_spectral.network.messages import Holding, Identity, Kind, Part, Parts, Start, record_of, record_parts
from lightning_spectral.network.objects import read_object
from lightning_spectral.network.status import write_whole
from lightning_spectral.network.workplace import Workplace, check_accelerator
from lightning_spectral.plugin.callbacks.evaluation import OWN
from lightning_spectral.protocol.codec import read_tensors, write_tensors
from lightning_spectral.protocol.exchange import KeptTensors, load_tensors, named_state
from lightning_spectral.protocol.records import Download, LoggedValue, Tensors, Upload

OWNERS_NOISE, OWNERS_PRIVACY = "noise of the owner", "privacy of the owner"  # names of filters
SPENT = "spent.json"  # in a state folder: what turns have spent of its examples' privacy, in all runs
STATE = "state/"  # before the names of what an algorithm and filters keep, as `OWN` is before those of an own model
log = logging.getLogger(__name__)
CLIENT_NAMES = ("client", "partition-id")  # where a node's configuration may say whose data it has


class Spent(DeviceError):
    """A client's examples have no privacy left to spend on a turn."""


@dataclass(frozen=True, eq=False)
class ClientData:
    """The data of one client for one model, which never leaves its device.

    Args:
        train: Any map-style data set, of this client's examples alone.
        batch_size: Examples per local step.
        val: Examples on which it does not train, for `ClientEvaluation`; ``None`` for none.
        keep_ratio: What the device can hold, one of the algorithm's; ``None`` to leave that to the algorithm.
        budget_bytes: Instead, how many bytes the device may get and send in a round, without frozen parameters, which
            it gets once: it is given the largest sub-model of the algorithm that fits. See `largest_that_fits`.
        drop_last: Whether a local epoch omits its last batch if that is smaller, unless it is the only one.
        labels: Class of each example, for hooks that need the client's classes; ``None`` if they are not known.
        collate_fn: Merges examples into a batch; ``None`` for PyTorch's default.
        num_workers: Worker processes for data that is not in memory.
        state_folder: Where an algorithm's state of this client is kept from turn to turn, such as personal parameters:
            a folder of this client and model alone; ``None`` for memory, so that it is lost when the process ends.
        local_noise: Noise that hides the client's updates even from the server; ``None`` for none. The server is told
            no losses and metrics either, but the number of examples, and whether the device failed.
        example_privacy: Noise in each local step that hides single examples; ``None`` for none. The device counts the
            epsilon of all its turns, in ``state_folder``, whatever the server says, and tells it that, but no losses.

    Raises:
        TypeError: If an argument has the wrong type, or the data set has no length.
        ValueError: If a number is out of range, the device states both a keep ratio and a budget, or its evaluations
            would tell what noise hides.

    Example:
        >>> from torch.utils.data import TensorDataset
        >>> ClientData(TensorDataset(torch.ones(50, 3)), batch_size=8, drop_last=True).holding()
        Holding(num_examples=50, examples_per_epoch=48, keep_ratio=None, num_held_out=0, budget_bytes=None)
    """

    train: Any
    batch_size: int = 32
    val: Any = None
    keep_ratio: float | None = None
    budget_bytes: float | None = None
    drop_last: bool = False
    labels: Tensor | Sequence[int] | None = field(default=None, repr=False)
    collate_fn: Collate | None = None
    num_workers: int = 0
    state_folder: str | None = None
    local_noise: LocalNoise | None = None
    example_privacy: ExamplePrivacy | None = None

    def __post_init__(self) -> None:
        if not (hasattr(self.train, "__getitem__") and hasattr(self.train, "__len__")):
            raise TypeError(
                f"`train` must be a map-style data set, with `__len__` and `__getitem__`, got {self.train!r}."
            )
        check_fields(self, batch_size=Whole(at_least=1), num_workers=Whole(at_least=0), drop_last=flag)
        check_fields(self, keep_ratio=Number(above=0, at_most=1, optional=True))
        check_fields(self, budget_bytes=Number(above=0, optional=True))
        if self.keep_ratio is not None and self.budget_bytes is not None:
            raise ValueError(
                f"`keep_ratio={self.keep_ratio}` and `budget_bytes={self.budget_bytes:,}` both say what the device can "
                "hold; leave one out."
            )
        check_is("state_folder", self.state_folder, str | None)
        for name, kind in (("local_noise", LocalNoise), ("example_privacy", ExamplePrivacy)):
            if (hides := getattr(self, name)) is not None:
                check_is(name, hides, kind)
                if self.val is not None:
                    raise ValueError(f"Evaluations on `val` would reach the server without `{name}`; leave one out.")
        if self.example_privacy is not None:
            if self.state_folder is None:
                raise ValueError("`example_privacy` counts what it has spent in the `state_folder`; give one.")
            with from_extra("privacy"):
                import dp_accounting  # noqa: F401
            warn_of_delta(self.example_privacy.delta, len(self.train), "examples of this client")

    def holding(self) -> Holding:
        """What the server is told of it."""
        size, held_out = len(self.train), 0 if self.val is None else len(self.val)
        per_epoch = examples_per_epoch(size, self.batch_size, self.drop_last)
        return Holding(size, per_epoch, self.keep_ratio, held_out, self.budget_bytes)

    def spend(self, privacy: ExamplePrivacy, steps: int = 0) -> float:
        """Count the steps of a turn that begins, if any; return the epsilon of all turns, or raise `Spent`."""
        import fcntl  # which the server's machine may lack

        spent, known = Path(self.state_folder or "") / SPENT, (len(self.train), self.batch_size)

        def written() -> list[Any]:
            return [tuple(stretch) for stretch in json.loads(spent.read_text())] if spent.exists() else []

        if steps <= 0:
            return epsilon_of(turns, privacy.delta) if (turns := written()) else 0.0
        spent.parent.mkdir(parents=True, exist_ok=True)
        with spent.with_name(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # or another process with this folder might write over this turn
            turns = joined(written(), (draws(*known)[0], privacy.multiplier(*known), steps))
            after = epsilon_of(turns, privacy.delta)
            if privacy.target_epsilon is not None and after > privacy.target_epsilon:
                raise Spent("this turn would exceed the `target_epsilon` of `example_privacy`")
            write_whole(spent, json.dumps(turns).encode())
        return after

    def batches(self, download: Download) -> ClientBatches:
        """The examples of one round, in an order that depends on the run's seed, the round and the client."""
        indices = torch.arange(len(self.train))
        order = download.seed, download.ids, self.drop_last
        labels = None if self.labels is None else (lambda: torch.as_tensor(self.labels))
        return ClientBatches(self._source, indices, self.batch_size, *order, labels=labels)

    def held_out_batches(self) -> Iterator[Any]:
        """The held-out examples in order."""
        index_batches = torch.split(torch.arange(len(self.val)), max(self.batch_size, 256))  # as at the server
        return BatchSource(self.val, self.collate_fn).batches(index_batches)

    @cached_property
    def _source(self) -> BatchSource:
        return BatchSource(self.train, self.collate_fn, self.num_workers)


class KeptStates:
    """The states of one client and model, by run and round: those that a server which resumes a run may ask for.

    A state counts once the server has the upload of its turn. So the one before is kept as well, for a server that
    ended before that. A folder keeps these two of each run, by its seed, and puts aside what no turn of it replaced.

    Args:
        folder: Where to keep them, for one client and one model; ``None`` for memory, which ends with the process.
    """

    def __init__(self, folder: str | Path | None = None) -> None:
        self.folder = None if folder is None else Path(folder)
        self._in_memory: dict[str, Tensors] = {}

    def complete(self, download: Download) -> Download | None:
        """A download with the state of the client's last turn; ``None`` if that is lost."""
        if download.last_turn is None:
            return download
        if (found := self._read(download, STATE)) is None:
            return None
        tensors = download.tensors.values()
        device = next((tensor.device for tensor in tensors), None)
        return replace(download, client_state={n: tensor.to(device or tensor.device) for n, tensor in found.items()})

    def own(self, download: Download) -> Tensors:
        """The values of the client's own model since its last turn; none if it has no such model, or has lost it."""
        return self._read(download, OWN) or {}

    def _read(self, download: Download, part: str) -> Tensors | None:
        name = _name(download.seed, download.last_turn)
        if self.folder is None:
            return _part(self._in_memory[name], part) if name in self._in_memory else None
        path = self.folder / name
        return _part(read_tensors(path.read_bytes()), part) if path.exists() else None

    def keep(self, download: Download, upload: Upload, own: Tensors) -> None:
        """Keep what follows a turn, with the values of the client's own model, and the state that it began with."""
        last, new = _name(download.seed, download.last_turn), _name(download.seed, download.round_idx)
        named = {STATE + name: tensor for name, tensor in upload.client_state.items()}
        named |= {OWN + name: tensor for name, tensor in own.items()}
        if self.folder is None:
            copies = {id(tensor): tensor.detach().to("cpu", copy=True) for tensor in named.values()}
            before = {last: self._in_memory[last]} if last in self._in_memory else {}
            self._in_memory = {**before, new: {name: copies[id(tensor)] for name, tensor in named.items()}}
            return
        is_lost = download.last_turn is not None and not (self.folder / last).exists()
        write_whole(self.folder / new, write_tensors(named))
        for path in self.folder.glob(_name(download.seed, "*")):
            if path.name not in (last, new):
                # of another's turn in this client's name, or of an earlier run with the seed
                if is_lost or _run_and_round(path)[1] > download.round_idx:
                    path.rename(path.with_name(f"aside-{path.name}"))
                else:
                    path.unlink()


def _name(seed: int | str, round_idx: int | str | None) -> str:
    return f"seed-{seed}-round-{round_idx}.safetensors"


def _run_and_round(path: Path) -> tuple[int, int]:
    seed, round_idx = path.stem.removeprefix("seed-").split("-round-")
    return int(seed), int(round_idx)


def _part(named: Tensors, part: str) -> Tensors:
    return {name.removeprefix(part): tensor for name, tensor in named.items() if name.startswith(part)}


class OwnModel(NamedTuple):
    """A module with a client's own values, the seed of the run that they are from, and the round of its last turn.

    Attributes:
        shared: Names of its floating-point tensors that are not the client's own, and are as they were.
    """

    module: nn.Module
    seed: int
    round_idx: int
    shared: tuple[str, ...]


def own_model(state_folder: str | Path, module: nn.Module, seed: int | None = None) -> OwnModel:
    """Give a module the values of a client's own model, of `Personal` or `Ditto`, on the client's device.

    Args:
        state_folder: That of `ClientData`.
        module: The user's module. Values that clients share are the server's, and stay as they are: for a personal
            head, load the server's weights before.
        seed: Seed of the run; ``None`` for the run of the client's last turn.

    Raises:
        FileNotFoundError, ValueError: If the folder has no state of such a run, or the client no model of this kind.
    """
    paths = Path(state_folder).glob(_name("*" if seed is None else seed, "*"))
    if not (found := sorted(paths, key=lambda path: path.stat().st_mtime_ns)):
        raise FileNotFoundError(f"{state_folder} has no state of such a run; name the `state_folder` of ClientData.")
    values = _part(read_tensors(found[-1].read_bytes()), OWN)
    named = named_state(module)
    if not values or (unknown := values.keys() - named.keys()):
        why = f"is of another module: this one lacks {', '.join(sorted(unknown))}" if values else "is the server's"
        raise ValueError(f"The client's model in {found[-1]} {why}.")
    load_tensors(module, values)
    shared = tuple(name for name, tensor in named.items() if name not in values and tensor.is_floating_point())
    return OwnModel(module, *_run_and_round(found[-1]), shared)


def answered(answer: Callable[[], dict[str, bytes]], share_errors: bool = False) -> dict[str, bytes]:
    """An answer; or if there is an exception, which the device logs, the answer that says so."""
    try:
        return answer()
    except (RecordError, DeviceError) as error:
        return {Part.REFUSED: str(error).encode()}
    except Exception as error:
        log.exception("A message could not be answered.")
        return {Part.REFUSED: (f"{type(error).__name__}: {error}" if share_errors else unquoted(error)).encode()}


def unquoted(error: Exception | None, remedy: str = "") -> str:
    """What the server is told of an exception: its class, because its text may quote the device's data."""
    return f"{type(error).__name__}, with the text that is in the device's log. {remedy}".rstrip()


class DeviceService:
    """Answers the server's messages for one client.

    It keeps what it was sent once, the `Start` of each model and the frozen tensors, and the sub-models that it made.
    One that has just been made, because its process ended, says what it lacks, and is sent it again. What an algorithm
    keeps for the client stays here, and is lost then unless the data has a folder for it.

    Args:
        modules: Makes the user's module, by the model's name; a single model has an empty name.
        data: The client's data, likewise.
        client: The client's name.
        trusted: Packages besides this one whose dataclasses the server may send: those of the user's own code.
        accelerator: Where the device trains, as for a Trainer.
        share_errors: Whether the server is sent the texts of exceptions, which may quote the device's data.
    """

    def __init__(
        self,
        modules: Mapping[str, Callable[[], nn.Module]],
        data: Mapping[str, ClientData],
        client: str,
        trusted: Collection[str] = (),
        accelerator: str = "auto",
        share_errors: bool = False,
    ) -> None:
        self.modules, self.data, self.client = modules, data, client
        self.trusted, self.accelerator, self.share_errors = frozenset(trusted), accelerator, share_errors
        self._starts: dict[bytes, Start] = {}
        self._devices: dict[tuple[bytes, float], tuple[Workplace, Device]] = {}
        self._kept: dict[str, KeptTensors] = {}
        self._states = {model: KeptStates(of_model.state_folder) for model, of_model in data.items()}
        self._parties = Parties()

    def answer(self, question: str, parts: Parts) -> dict[str, bytes]:
        """Answer a message, whose question is one of `Kind`; errors are reported in the reply."""
        answers: dict[str, Callable[[], dict[str, bytes]]] = {
            Kind.WHO: lambda: messages.identity_parts(self.identity()),
            Kind.AGREE: lambda: messages.handshake_parts(self._parties.answer(messages.handshake_of(parts))),
            Kind.TRAIN: lambda: self._train(parts),
            Kind.EVALUATE: lambda: self._evaluate(parts),
        }
        if question not in answers:
            return {Part.REFUSED: f"This device does not know the question {question!r}.".encode()}
        return answered(answers[question], self.share_errors)

    def identity(self) -> Identity:
        """Who the device is, and what it has for each model; `DeviceError` if it could not train."""
        check_accelerator(self.accelerator)
        return Identity(self.client, {name: data.holding() for name, data in self.data.items()})

    def _train(self, parts: Parts) -> dict[str, bytes]:
        known = parts.get(Part.DIGEST, b"")
        if Part.START in parts and messages.digest_of(parts[Part.START]) == known:
            self._starts[known] = read_object(parts[Part.START], Start, self.trusted)
        if known not in self._starts:
            return {Part.LACKS: known}
        start, download = self._starts[known], record_of(parts, Download)
        if (known, download.capacity) not in self._devices:
            self._check_model(start.model)
            workplace = Workplace(self.accelerator, start.precision, start.num_rounds)
            module = self.modules[start.model]()
            device = workplace.make_device(module, self._hiding(start, module), self.data[start.model].batches)
            device.kept = self._kept.setdefault(start.model, device.kept)
            device.parties = self._parties
            self._devices[known, download.capacity] = workplace, device
        workplace, device = self._devices[known, download.capacity]
        states, data = self._states[start.model], self.data[start.model]
        download = workplace.arrive(download)
        completed = states.complete(download)
        device.generators.save()
        try:
            upload = device.run(completed or download)
        finally:
            device.generators.restore()
        if device.instructions.keeps_state and upload.left_out is None and not upload.missing:
            states.keep(download, upload, device.instructions.own_model(upload.client_state))
        upload = replace(upload, client_state={}, lost_state=completed is None)
        if (privacy := data.example_privacy) is not None:
            said = LoggedValue(data.spend(privacy), prog_bar=False, logger=True)
            upload = replace(upload, logged={**upload.logged, FIGURE: said})
        if (failure := upload.failure) is not None:
            if isinstance(failure.cause, Spent):
                return record_parts(Upload(download.unit, {}, left_out="spent"))
            log.error("Round %d, %s: %s", download.round_idx, failure.stage, failure.message, exc_info=failure.cause)
            if not self.share_errors:
                failure = replace(failure, message=unquoted(failure.cause, failure.remedy))
            upload = replace(upload, failure=failure)
        return record_parts(upload)

    def _evaluate(self, parts: Parts) -> dict[str, bytes]:
        model, download = parts.get(Part.MODEL, b"").decode(), record_of(parts, Download)
        self._check_model(model)
        if not (data := self.data[model]).holding().num_held_out:
            raise RecordError("This client has no held-out examples.")
        workplace = Workplace(self.accelerator, parts.get(Part.PRECISION, b"32-true").decode())
        logged = dict(workplace.evaluate(self.modules[model](), data.held_out_batches(), download))
        if own := self._states[model].own(download):
            download = replace(download, tensors={**download.tensors, **own})
            evaluated = workplace.evaluate(self.modules[model](), data.held_out_batches(), download)
            logged |= {f"{OWN}{name}": value for name, value in evaluated.items()}
        return record_parts(Upload(download.unit, {}, logged=logged))

    def _hiding(self, start: Start, module: nn.Module) -> Start:
        """What the device does, with its owner's noise; `DeviceError` if the server needs what has none."""
        data, told = self.data[start.model], start.instructions
        noise = {} if data.local_noise is None else {OWNERS_NOISE: NoiseEnd(data.local_noise)}
        hides = data.example_privacy  # the last end decides how clients are trained
        privacy = {} if hides is None else {OWNERS_PRIVACY: ExampleEnd(hides, partial(data.spend, hides))}
        if taken := {*noise, *privacy} & told.ends.keys():  # which would replace it
            raise RecordError(f"The server sends a filter named {min(taken)!r}, which is this device's own.")
        try:
            if hides is not None:
                hides.check(Plan(module, FedAvg(), local_hooks=start.local_hooks))
        except ValueError as error:
            raise DeviceError(str(error)) from error
        if (noise or privacy) and (start.measures or told.side.reads_loss):
            raise DeviceError(
                f"This device hides its loss (`{'local_noise' if noise else 'example_privacy'}`), and the server asks "
                "for it. Choose an algorithm and a sampler without losses, such as FedAvg and Uniform."
            )
        return replace(start, instructions=replace(told, ends={**noise, **told.ends, **privacy}))

    def _check_model(self, model: str) -> None:
        if model not in self.modules or model not in self.data:
            raise RecordError(f"This device has no model {model!r}; it has {sorted(self.data)}.")


def service_of(
    modules: Mapping[str, str],
    client: str,
    config: Mapping[str, Any],
    node: str,
    trusted: Collection[str],
    accelerator: str,
    share_errors: bool,
) -> DeviceService:
    """What answers for a device whose module and data are made by names; the arguments are those of a `Job`."""
    made_by, make_data = {model: maker(name) for model, name in modules.items()}, _named(client)
    homes = [*modules.values(), client, *(getattr(make, "__module__", "") for make in (make_data, *made_by.values()))]
    who = next((str(config[name]) for name in CLIENT_NAMES if name in config), node)
    trusted = {*trusted, *(home.partition(":")[0].partition(".")[0] for home in homes)}
    return DeviceService(made_by, _data_by_model(make_data, config), who, trusted, accelerator, share_errors)


def maker(name: str) -> Callable[[], nn.Module]:
    """What has a name, which must make a module when it is called without arguments."""
    make: Callable[[], nn.Module] = _named(name)
    if isinstance(make, nn.Module) or not callable(make):
        raise DeviceError(f"{name} must be a class or function that makes the module, got a {type(make).__name__}.")
    try:
        parameters = inspect.signature(make).parameters.values()
    except ValueError:  # of a function in C
        return make
    needed = [p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    if needed:
        raise DeviceError(
            f"{name} is called without arguments, and needs {', '.join(needed)}; name a function that gives them."
        )
    return make


def _named(name: str) -> Any:
    try:
        return resolve_name(name)
    except (ImportError, AttributeError) as error:
        log.exception("%s cannot be imported.", name)
        raise DeviceError(f"{name} cannot be imported; the device's log says why.") from error


def _data_by_model(client: Callable[[Mapping[str, Any]], Any], config: Mapping[str, Any]) -> dict[str, ClientData]:
    """What a user's ``client(config)`` returns, by the model's name."""
    try:
        found = client(config)
    except KeyError as error:
        entries = ", ".join(sorted(config)) or "nothing"
        raise DeviceError(
            f"`client(config)` reads config[{error}], and the configuration of run and node holds {entries}; "
            "give it with `flower-supernode --node-config`."
        ) from error
    data = dict(found) if isinstance(found, Mapping) else {"": found}
    for name, one in data.items():
        check_is(f"client(config)[{name!r}]" if name else "client(config)", one, ClientData)
    return data
