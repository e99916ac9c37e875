"""The gate: all answers of devices are read and checked here before the server uses them.

Each reader raises `RecordError` if the answer is not what was asked for: the caller counts that as the failure of this
one client. What is read is bounded before it is parsed, by what the server asked for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from lightning_spectral.client.device import Instructions
from lightning_spectral.client.forms import Forms
from lightning_spectral.errors import RecordError, from_extra
from lightning_spectral.network.line import Answer
from lightning_spectral.network.messages import Identity, Part, Parts, handshake_of, record_of
from lightning_spectral.protocol.codec import VERSION
from lightning_spectral.protocol.records import Download, Failure, Handshake, LoggedValue, Upload
from lightning_spectral.sums.exact_mean import can_be_summed

with from_extra("network"):
    from msgspec import MsgspecError, msgpack

Form = Mapping[str, tuple[torch.dtype, torch.Size]]
SMALL = 2**16  # bytes of what a device says besides tensors and their names
PER_CLIENT = 256  # bytes of what a client says of another in secure sums, for each of whom it was told
PER_TENSOR = 512  # bytes of the name, type and place of a tensor, as often as an upload may name it
LONGEST, MOST = 1000, 1000  # characters of a text, entries of a list
NAME = 200  # characters of the name of a client or of a logged value
MOST_STEPS, MOST_SECONDS = 2**40, 1e9
FAILING = "loading", "local training", "collecting"
CLIENTS = "clients/"  # begins the names of what devices log, so that none passes for a metric of the server
NOT_NEGATIVE = {"running_var": "variance", "num_batches_tracked": "count"}  # buffers, by the ends of their names


def read_parts(answer: Answer) -> Parts:
    """The parts of an answer; `RecordError` if there is none, or the device refuses."""
    if answer.reason is not None:
        raise RecordError(shown(answer.message) or "no answer")
    if Part.REFUSED in answer.parts:
        raise RecordError(shown(answer.parts[Part.REFUSED][: 4 * LONGEST].decode(errors="replace")))
    return answer.parts


def read_identity(answer: Answer) -> Identity:
    """Who a device says that it is."""
    data = read_parts(answer).get(Part.IDENTITY, b"")
    _check_size("identity", len(data), SMALL)
    try:
        identity = msgpack.decode(data, type=Identity)
    except (MsgspecError, ValueError, RecursionError) as error:
        raise RecordError(f"its identity cannot be read: {error}.") from error
    if identity.version != VERSION:
        raise RecordError(
            f"its records have version {identity.version} of the format, and those of the server {VERSION}; install "
            "the same version of lightning_spectral on both."
        )
    _check_name("client", identity.client)
    for model, holding in identity.holdings.items():
        if not min(1, holding.num_examples) <= holding.examples_per_epoch <= holding.num_examples:
            raise RecordError(
                f"it says that an epoch has {holding.examples_per_epoch} of its {holding.num_examples} examples"
                f"{f' for {shown(model)!r}' if model else ''}."
            )
    return identity


def read_metrics(answer: Answer) -> dict[str, float]:
    """What a device says of an evaluation: metrics by name."""
    parts = read_parts(answer)
    _check_sizes(parts, SMALL)
    upload = record_of(parts, Upload)
    if upload.failure is not None:
        raise RecordError(shown(upload.failure.message))
    return {name: logged.value for name, logged in _logged(upload.logged).items()}


def read_handshake(asked: Handshake, answer: Answer) -> Handshake:
    """What a device says in a step of secure sums; what it means is checked where it is used."""
    parts = read_parts(answer)
    _check_size("handshake", len(parts.get(Part.HANDSHAKE, b"")), SMALL + PER_CLIENT * len(asked.said))
    return replace(asked, said=handshake_of(parts).said)


class UploadGate:
    """Reads uploads, and compares them with what an untrained sub-model would send back.

    Args:
        module: The server's module, which takes the forms of clients.
        told: What devices are told once.
    """

    def __init__(self, module: nn.Module, told: Instructions) -> None:
        self._told, self._forms = told, Forms(module, told.side.take_form)
        self._usual: dict[float, Form] = {}
        self._own = set[str]()  # names of what the algorithm's device half logs, which the server reads
        is_masked = any(end.hides_values for end in told.ends.values())
        buffers = [name for name, buffer in module.named_buffers() if not (is_masked or buffer.is_complex())]
        self._kinds = {name: kind for name in buffers for end, kind in NOT_NEGATIVE.items() if name.endswith(end)}
        self._most_bytes = SMALL + sum(PER_TENSOR + 8 * len(name) for name in module.state_dict())

    def most_bytes(self, download: Download) -> int:
        """Most bytes of the answer to a download: twice what the first one of its capacity takes."""
        if download.capacity not in self._usual:
            self._usual[download.capacity] = self._expected(download)
        values = sum(kind.itemsize * shape.numel() for kind, shape in self._usual[download.capacity].values())
        return 2 * (self._most_bytes + values)

    def read(self, download: Download, answer: Answer) -> Upload:
        """The upload that answers a download.

        Names, types and shapes of its tensors are right, values may be NaN. What else it says is within bounds, and a
        failure of any kind is that of the client.
        """
        parts = read_parts(answer)
        _check_sizes(parts, self._most_bytes)
        upload = record_of(parts, Upload)
        if upload.unit.key != download.unit.key:
            raise RecordError(f"it is about client {upload.unit.client_id}, and was sent by {download.unit.client_id}")
        unit = download.unit  # with the server's own coefficient
        upload = replace(upload, loss=_summable(upload.loss), loss_before=_summable(upload.loss_before))
        if upload.missing:
            if not download.held.issuperset(upload.missing):
                raise RecordError("it lacks tensors that came with this download")
            return Upload(unit, {}, missing=upload.missing)
        if upload.left_out is None and upload.failure is None:
            if upload.client_state:
                raise RecordError("it holds the client's state, which stays on its device")
            if upload.lost_state and download.last_turn is None:
                raise RecordError("it says that it has lost a state that it never had")
            self._check(download, upload)
            logged = _logged(upload.logged).items()
            named = {name if name in self._own else CLIENTS + name: value for name, value in logged}
            return replace(upload, unit=unit, logged=named)
        if upload.left_out == "error" and upload.failure is not None:
            return Upload(unit, {}, left_out="error", failure=_of_client(upload.failure))
        may_be = ("no_update", "not_finite", "spent", *(("dropped_out",) if download.masking is not None else ()))
        if upload.left_out in may_be and upload.failure is None:
            return Upload(unit, {}, loss=upload.loss, left_out=upload.left_out)
        raise RecordError(f"it cannot be left out as {upload.left_out!r}")

    def _check(self, download: Download, upload: Upload) -> None:
        """Check tensors' form and figures; the form of masks differs from download to download."""
        found = _form_of(upload.tensors)
        if found != self._usual.get(download.capacity):
            expected = self._usual[download.capacity] = self._expected(download)
            if found != expected:
                raise RecordError(shown(_difference(found, expected)))
        try:
            values = self._told.unpack(download, upload).tensors
        except ValueError as error:
            raise RecordError(shown(str(error))) from error
        for name, kind in self._kinds.items():
            if name in values and bool((values[name] < 0).any()):
                raise RecordError(f"{name} holds a negative {kind}")
            if name in values and kind == "count" and bool((values[name] % 1 > 0).any()):
                raise RecordError(f"{name} holds a count that is not whole")
        for name, rows in upload.untrained_rows.items():
            is_list = name in values and values[name].dim() > 0 and rows.dtype is torch.int64 and rows.dim() == 1
            if not (is_list and bool(((rows >= 0) & (rows < len(values[name]))).all())):
                raise RecordError(f"the untrained rows of {shown(name)} are no rows of a tensor that was asked for")
        if not 0 <= upload.num_steps < MOST_STEPS:
            raise RecordError(f"it says that it took {upload.num_steps} steps")
        if not upload.seconds.keys() <= {"load", "train"}:
            raise RecordError("it reports times of other stages than loading and training")
        if not all(0.0 <= seconds < MOST_SECONDS for seconds in upload.seconds.values()):
            raise RecordError("it reports a time that is negative or impossible")
        for names in (upload.unreached or (), upload.discarded, upload.put_back):
            if len(names) > MOST or any(name != shown(name) for name in names):
                raise RecordError(f"it lists more than {MOST} names, or names that cannot be shown")

    def _expected(self, download: Download) -> Form:
        """The form of the upload that answers a download."""
        with self._forms.client(download.capacity) as client:
            self._told.load(client, download)
            self._told.phases(client, download)
            collected = self._told.sized(client, download)
            self._own.update(collected.logged)
            return _form_of(collected.tensors)


def _summable(figure: float) -> float:
    """A figure, or NaN if means and squares of such figures might overflow."""
    return figure if can_be_summed(abs(figure)) else float("nan")


def _logged(said: Mapping[str, LoggedValue]) -> dict[str, LoggedValue]:
    """What a device logs, whose names can be shown and whose values can be averaged."""
    if len(said) > MOST:
        raise RecordError(f"it logs {len(said)} values; at most {MOST} are read")
    for name in said:
        _check_name("value", name)
    return {name: replace(logged, value=_summable(logged.value)) for name, logged in said.items()}


def _of_client(failure: Failure) -> Failure:
    """A failure on a device as that of the client, which ends no run that goes on without such clients."""
    if failure.stage not in FAILING:
        raise RecordError("it reports an unknown stage")
    message = shown(failure.message)
    if failure.stage == "local training":
        return Failure(failure.stage, message)
    return Failure("network", f"The device failed in {failure.stage}: {message}")


def _check_sizes(parts: Parts, most: int) -> None:
    """Check what a record holds besides the values of tensors, before any of it is parsed."""
    _check_size("record", len(parts.get(Part.HEAD, b"")), most)
    _check_size("list of tensors", int.from_bytes(parts.get(Part.VALUES, b"")[:8], "little"), most)  # of safetensors


def _check_size(what: str, size: int, most: int) -> None:
    if size > most:
        raise RecordError(f"its {what} takes {size:,} bytes besides the values of tensors; at most {most:,} are read.")


def _check_name(what: str, name: str) -> None:
    if not (0 < len(name) <= NAME and name.isprintable()):
        raise RecordError(f"the name of a {what} has 1 to {NAME} characters that can be shown, got {name[:50]!r}.")


def shown(said: str) -> str:
    """A text of a device, in one line that can be shown."""
    return "".join(letter if letter.isprintable() else " " for letter in said[:LONGEST])


def _form_of(tensors: Mapping[str, Tensor]) -> Form:
    return {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}


def _difference(found: Form, expected: Form) -> str:
    if lacking := sorted(expected.keys() - found.keys()):
        return f"it lacks {', '.join(lacking)}"
    if unknown := sorted(found.keys() - expected.keys()):
        return f"it holds {', '.join(unknown)}, which was not asked for"
    name = next(name for name in found if found[name] != expected[name])
    (kind, shape), (wanted, size) = found[name], expected[name]
    return f"{name} is {kind} of shape {tuple(shape)}, and must be {wanted} of shape {tuple(size)}"
