"""What devices can say wrong: it is refused at the gate, counted and named as that client's failure, never averaged."""

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from fake_line import remote, toy_line
from federation import Fit, Fitted, seeded
from hypothesis import given
from hypothesis import strategies as st
from other_process import LitFails
from toy_models import LitMLP, LitSmall

import lightning_spectral as ls
from lightning_spectral.errors import RecordError
from lightning_spectral.network.gate import read_identity
from lightning_spectral.network.line import Answer, Question
from lightning_spectral.network.messages import IDENTITY, Holding, Identity, identity_parts, record_of, record_parts
from lightning_spectral.protocol.codec import VERSION
from lightning_spectral.protocol.records import Upload
from lightning_spectral.server import Faults, LeaveOut

Parts = dict[str, bytes]
FIRST = 100  # the node that misbehaves, whenever it is asked
TOLERANT = Faults(on_error=LeaveOut(), on_not_finite=LeaveOut())


def changed(**changes: Any) -> Callable[[Parts], Parts]:
    """A device whose upload has other fields; a function among them maps the tensors."""

    def change(parts: Parts) -> Parts:
        upload = record_of(parts, Upload)
        new = {name: value(upload.tensors) if callable(value) else value for name, value in changes.items()}
        return record_parts(replace(upload, **new))

    return change


def each(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Any], Any]:
    return lambda tensors: {name: change(tensor) for name, tensor in tensors.items()}


def fit_with(fit: Fit, spoil: Callable[[Parts], Any], faults: Faults = TOLERANT) -> Fitted:
    def act(question: Question, answer: Parts) -> Any:
        return spoil(answer) if question.node == FIRST else answer

    line = toy_line(LitMLP, spoil=act)
    options: dict[str, Any] = {"clients_per_round": 12, "seed": 3, "max_epochs": 2, "faults": faults}
    return fit(seeded(LitMLP), remote(line, wait_for=12), **options)


NO_ROWS = "untrained rows of net.0.weight are no rows"
SPOILT: dict[str, tuple[Callable[[Parts], Parts], str]] = {
    "other shapes": (changed(tensors=each(lambda tensor: tensor[:1])), "of shape"),
    "other types": (changed(tensors=each(torch.Tensor.double)), "float64"),
    "a tensor less": (changed(tensors=lambda tensors: dict(list(tensors.items())[1:])), "it lacks net"),
    "a tensor more": (changed(tensors=lambda tensors: {**tensors, "backdoor": torch.zeros(3)}), "backdoor, which was"),
    "no such row": (changed(untrained_rows={"net.0.weight": torch.tensor([10**6])}), NO_ROWS),
    "half a row": (changed(untrained_rows={"net.0.weight": torch.tensor([0.5])}), NO_ROWS),
    "rows of nothing": (changed(untrained_rows={"other": torch.tensor([0])}), "untrained rows of other are no"),
    "cut short": (lambda parts: {**parts, "head": parts["head"][:-1]}, "truncated"),
    "half a record": (lambda parts: {"head": parts["head"]}, "holds no Upload"),
    "refused": (lambda parts: {"refused": b"no memory left"}, "no memory left"),
    "NaN": (changed(tensors=each(lambda tensor: torch.full_like(tensor, torch.nan))), "not finite"),
}


@pytest.mark.parametrize("name", SPOILT)
def test_an_upload_that_cannot_be_used_is_left_out(name: str, fit: Fit) -> None:
    spoil, message = SPOILT[name]
    with pytest.warns(ls.SpectralWarning, match=message):
        fitted = fit_with(fit, spoil)
    reasons = [row.left_out for row in fitted.ledger.rows if row.left_out is not None]
    assert reasons == 2 * ["not_finite" if name == "NaN" else "error"]
    assert torch.isfinite(fitted.weights).all()


def test_by_default_such_an_upload_ends_the_run(fit: Fit) -> None:
    with pytest.raises(ls.ClientError, match=r"Round 0, client \d+, network: .* cannot be used: .* of shape"):
        fit_with(fit, SPOILT["other shapes"][0], Faults())


@pytest.mark.parametrize(
    ("make", "message"),
    [(LitFails, r"local training: Unpicklable: the sensor is broken"), (LitSmall, r"loading: ")],
    ids=["a module that fails", "not the server's module"],
)
def test_a_failure_on_a_device_has_its_address(make: Any, message: str, fit: Fit) -> None:
    with pytest.raises(ls.ClientError, match=rf"Round 0, client \d+, {message}"):
        fit(seeded(LitMLP), remote(toy_line(make)))


WARD = Identity("ward 7", {"": Holding(80, 64, 0.5, 3, 1e6), "words": Holding(0, 0)})


def identity_in(data: bytes) -> Identity:
    return read_identity(Answer("a ticket", {IDENTITY: data}))


def test_mutations_of_an_identity_are_refused_or_make_one_within_bounds() -> None:
    data, rng, refused = identity_parts(WARD)[IDENTITY], random.Random(0), 0
    assert identity_in(data) == WARD
    for _ in range(3000):
        damaged = bytearray(data)
        damaged[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        del damaged[rng.randrange(len(data)) if rng.random() < 0.2 else len(data) :]
        try:
            read = identity_in(bytes(damaged))
        except RecordError:
            refused += 1
            continue
        for holding in read.holdings.values():
            assert min(holding.num_examples, holding.examples_per_epoch, holding.num_held_out) >= 0
            assert holding.keep_ratio is None or 0 < holding.keep_ratio <= 1
    assert 1000 < refused < 3000


@pytest.mark.parametrize(
    ("identity", "message"),
    [
        (Identity("ward", {"": Holding(-1, 0)}), "identity cannot be read: Expected"),
        (Identity("ward", {"": Holding(2**40, 0)}), "identity cannot be read: Expected"),
        (Identity("ward", {"": Holding(1, 1, keep_ratio=float("nan"))}), "identity cannot be read: Expected"),
        (Identity("ward", {"": Holding(1, 1, budget_bytes=-1.0)}), "identity cannot be read: Expected"),
        (Identity(1001 * "w", {}), "identity cannot be read: Expected"),
        (Identity(7, {}), "identity cannot be read: Expected"),  # type: ignore[arg-type]
        (
            Identity("ward", {}, VERSION + 1),
            rf"version {VERSION + 1} of the format, and those of the server {VERSION}; install the same version",
        ),
    ],
)
def test_an_identity_out_of_bounds_is_refused(identity: Identity, message: str) -> None:
    with pytest.raises(RecordError, match=message):
        read_identity(Answer("a ticket", identity_parts(identity)))


@given(st.binary(max_size=300))
def test_other_bytes_are_no_identity(data: bytes) -> None:
    with pytest.raises(RecordError):
        identity_in(data)
