"""What devices can say wrong: it is refused at the gate, counted and named as that client's failure, never averaged."""

import dataclasses
import hashlib
import json
import math
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_line import FakeLine, held_out_line, in_kit, remote, toy_line
from federation import Fit, Fitted, said_during, same_state, seeded
from hypothesis import given
from hypothesis import strategies as st
from lightning.pytorch.callbacks import EarlyStopping
from msgspec import msgpack
from other_process import LitFails
from toy_models import LitMLP, LitSmall, variant

import lightning_spectral as ls
from lightning_spectral.client.device import Instructions
from lightning_spectral.errors import RecordError
from lightning_spectral.filters.packing import ErrorFeedback
from lightning_spectral.network import roster as roster_module
from lightning_spectral.network.gate import UploadGate, read_identity
from lightning_spectral.network.line import Answer, Question
from lightning_spectral.network.messages import Holding, Identity, Kind, Part, record_of, record_parts
from lightning_spectral.network.roster import Roster
from lightning_spectral.protocol.codec import VERSION
from lightning_spectral.protocol.records import Download, Failure, LoggedValue, Upload, WorkUnit
from lightning_spectral.server import Faults, LeaveOut

Parts = dict[str, bytes]
FIRST = 100  # the node of the first client, which misbehaves whenever it is asked
TOLERANT = Faults(on_error=LeaveOut(1.0), on_not_finite=LeaveOut(1.0))


def changed(**changes: Any) -> Callable[[Parts], Parts]:
    """A device whose upload has other fields; a function among them maps the tensors."""

    def change(parts: Parts) -> Parts:
        upload = record_of(parts, Upload)
        new = {name: value(upload.tensors) if callable(value) else value for name, value in changes.items()}
        return record_parts(replace(upload, **new))

    return change


def each(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Any], Any]:
    return lambda tensors: {name: change(tensor) for name, tensor in tensors.items()}


def each_in_its_way(*spoils: Callable[[Parts], Any]) -> Callable[[Question, Parts], Any]:
    """What the first devices do to their answers."""

    def act(question: Question, answer: Parts) -> Any:
        client = question.node - FIRST
        return spoils[client](answer) if client < len(spoils) else answer

    return act


def fit_with(fit: Fit, *spoils: Callable[[Parts], Any], faults: Faults = TOLERANT) -> Fitted:
    """A fit of twelve clients, of which the first ones misbehave, each in its own way."""
    line = toy_line(LitMLP, spoil=each_in_its_way(*spoils))
    options: dict[str, Any] = {"clients_per_round": 12, "seed": 3, "max_epochs": 2, "faults": faults}
    return fit(seeded(LitMLP), remote(line, wait_for=12), **options)


FORGED = "\x1b[2J\nRound 0: client 3 is left out of the average: it lied."
NO_ROWS = "untrained rows of net.0.weight are no rows"
SPOILT: dict[str, tuple[Callable[[Parts], Parts], str]] = {
    "other shapes": (changed(tensors=each(lambda tensor: tensor[:1])), "of shape"),
    "other types": (changed(tensors=each(torch.Tensor.double)), "float64"),
    "a tensor less": (changed(tensors=lambda tensors: dict(list(tensors.items())[1:])), "it lacks net"),
    "a tensor more": (
        changed(tensors=lambda tensors: {**tensors, FORGED: torch.zeros(3)}),
        "2J Round 0: .*which was",
    ),
    "no such row": (changed(untrained_rows={"net.0.weight": torch.tensor([10**6])}), NO_ROWS),
    "half a row": (changed(untrained_rows={"net.0.weight": torch.tensor([0.5])}), NO_ROWS),
    "rows of nothing": (changed(untrained_rows={"other": torch.tensor([0])}), "untrained rows of other are no"),
    "cut short": (lambda parts: {**parts, "head": parts["head"][:-1]}, "truncated"),
    "half a record": (lambda parts: {"head": parts["head"]}, "holds no Upload"),
    "refused": (lambda parts: {"refused": b"no memory left"}, "no memory left"),
    "NaN": (changed(tensors=each(lambda tensor: torch.full_like(tensor, torch.nan))), "not finite"),
}


def test_by_default_such_an_upload_ends_the_run(fit: Fit) -> None:
    with pytest.raises(ls.ClientError, match=r"Round 0, client \d+, network: .* cannot be used: .* of shape"):
        fit_with(fit, SPOILT["other shapes"][0], faults=Faults())


FAILS = {
    LitFails: r"local training: device '\d+': Unpicklable, with the text that is in the device's log",
    LitSmall: r"network: device '\d+': The device failed in loading: KeyError, with",  # it is not the server's module
}


@pytest.mark.parametrize("make", FAILS)
def test_a_failure_on_a_device_has_its_address(make: Any, fit: Fit, caplog: Any) -> None:
    with pytest.raises(ls.ClientError, match=rf"Round 0, client \d+, {FAILS[make]}"):
        fit(seeded(LitMLP), remote(toy_line(make)))
    assert ("the sensor is broken" in caplog.text) == (make is LitFails)
    with pytest.raises(ls.ClientError, match=r"Unpicklable: the sensor is broken|KeyError: 'net"):
        fit(seeded(LitMLP), remote(toy_line(make, share_errors=True)))


def respoken(parts: Parts, kind: str, change: Callable[[dict[str, Any]], Any]) -> Parts:
    """A record whose fields were changed by someone who writes the format by hand."""
    version, name, fields = msgpack.decode(parts["head"][32:])
    assert name == kind
    change(fields)
    head = msgpack.encode((version, name, fields))
    return {**parts, "head": hashlib.sha256(head + parts["values"]).digest() + head}


NAN, INF = math.nan, math.inf
WRONG = [None, True, -7, 2**63, NAN, INF, -1e300, "", "abc", "1" * 5000, b"abc", [], [1], ["a"], {}, {"a": 1}]
WRONG += [{1: 2}, {"a": "b"}, {"a": [9.0, False, True]}, {"x" * 5000: 1.0}, {"load": -1.0}, {"load": NAN}, ["\x1b[2J"]]
FIELDS = [field.name for field in dataclasses.fields(Upload)]
# what a device may say: the others are refused
SAYS: dict[str, Callable[[Any], bool]] = {
    "num_steps": lambda value: 0 <= value < 2**40,
    "loss": lambda value: isinstance(value, float),
    "loss_before": lambda value: isinstance(value, float),
    "client_state": lambda value: value == {},
    "lost_state": lambda value: value is False,
    "seconds": lambda value: all(0 <= seconds < 1e9 for seconds in value.values()),
    "logged": lambda value: all(name.startswith("clients/") and len(name) <= 208 for name in value),
    "left_out": lambda value: value in (None, "error", "no_update", "not_finite"),
    "missing": lambda value: value == (),
    "unreached": lambda value: value is None or all(name.isprintable() for name in value),
    "discarded": lambda value: all(name.isprintable() and len(name) <= 1000 for name in value),
    "put_back": lambda value: all(name.isprintable() and len(name) <= 1000 for name in value),
    "untrained_rows": lambda value: value == {},
    "failure": lambda value: value is None,
    "unit": lambda value: isinstance(value, WorkUnit),
    "tensors": lambda value: len(value) == 4,
}


@pytest.mark.parametrize("field", FIELDS)
def test_a_field_of_an_upload_is_within_bounds_or_refused(field: str) -> None:
    seeded_mlp = seeded(LitMLP)
    half = ls.FedAvg().bind(seeded_mlp)
    gate, weights = UploadGate(seeded_mlp, Instructions(half.client_side)), dict(seeded_mlp.state_dict())
    download = Download(WorkUnit(3), 1.0, weights)
    honest = record_parts(Upload(WorkUnit(3), weights, 5, 0.5, {"acc": LoggedValue(0.5, True, True)}))
    assert gate.read(download, Answer("a ticket", honest)).num_steps == 5
    outcomes = Counter[str]()
    for value in WRONG:
        parts = respoken(honest, "Upload", lambda fields, value=value: fields.update({field: value}))
        try:
            read = gate.read(download, Answer("a ticket", parts))
        except RecordError:
            outcomes["refused"] += 1
            continue
        outcomes["read"] += 1
        assert SAYS[field](getattr(read, field)), value
        assert read.unit == download.unit
    assert outcomes["refused"] >= len(WRONG) // 2


LIES: dict[str, tuple[dict[str, Any], str]] = {
    "a failure in a stage of the server": (
        {"failure": Failure("aggregation", "?"), "left_out": "error"},
        "reports an unknown stage",
    ),
    "a failure to load": ({"failure": Failure("loading", "disk"), "left_out": "error"}, "failed in loading: disk"),
    "a failure without being left out": ({"failure": Failure("loading", "disk")}, "cannot be left out as None"),
    "a failure on several lines": ({"failure": Failure("loading", "a\n\x1bb"), "left_out": "error"}, "loading: a  b"),
    "left out as late": ({"left_out": "late"}, "cannot be left out as 'late'"),
    "lacks what came": ({"missing": ("net.0.weight",)}, "lacks tensors that came with this download"),
    "steps backwards": ({"num_steps": -7}, "took -7 steps"),
    "seconds of another stage": ({"seconds": {"apply": 1.0}}, "other stages"),
    "logs much": ({"logged": {str(i): LoggedValue(0.0, False, True) for i in range(1001)}}, "logs 1001 values"),
    "lists much": ({"put_back": ("a",) * 1001}, "lists more than 1000 names"),
    "many empty tensors": ({"tensors": {str(i): torch.zeros(0) for i in range(2000)}}, "besides the values of tensors"),
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "lies",
    [SPOILT, {name: (changed(**changes), message) for name, (changes, message) in LIES.items()}],
    ids=["what cannot be used", "lies"],
)
def test_devices_end_no_run_by_what_they_say_and_are_left_out(
    lies: dict[str, tuple[Callable[[Parts], Parts], str]], fit: Fit
) -> None:
    """Eleven of twelve devices, each in its own way, and in both rounds."""
    fitted: list[Fitted] = []
    said = said_during(lambda: fitted.append(fit_with(fit, *(spoil for spoil, _ in lies.values()))))
    for round_idx in range(2):
        for name, (_, message) in lies.items():
            told = rf"Round {round_idx}: client \d+ is left out .*{message}"
            assert any(re.match(told, one) for one in said), (name, said)
    not_finite = 2 * ("NaN" in lies)
    reasons = Counter(row.left_out for row in fitted[0].ledger.rows)
    assert reasons == Counter(error=2 * len(lies) - not_finite, not_finite=not_finite) + Counter({None: 2})
    assert torch.isfinite(fitted[0].weights).all()


class LitNormed(LitMLP):
    """Its second count, which a filter might pack, is no whole number by its type."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.net = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 3))
        self.register_buffer("num_batches_tracked", torch.zeros(2))


def with_value(name: str, value: float) -> Callable[[Parts], Parts]:
    """A device that sends a tensor whose first entry is another, perhaps one that it was not asked for."""

    def change(tensors: Any) -> Any:
        changed = tensors.get(name, torch.zeros((), dtype=torch.float64)).clone()
        changed.view(-1)[0] = value
        return {**tensors, name: changed}

    return changed(tensors=change)


VARIANCE, COUNTED = "net.1.running_var", {"buffers": {"net.1.num_batches_tracked": "min"}}
NO_COUNT, NO_VARIANCE = "num_batches_tracked holds a count that is not whole", f"{VARIANCE} holds a negative variance"
PACKS_ALL = variant(ls.Int8, device=lambda self, half: ErrorFeedback(ls.Int8()))()  # somebody's own: buffers as well
REFUSED: dict[str, tuple[type[LitMLP], dict[str, Any], Callable[[Parts], Parts], str]] = {
    "a loss": (LitMLP, {"algorithm": ls.QFedAvg()}, changed(loss_before=-1.0), r"takes powers of losses.*got -1;"),
    "no steps": (LitMLP, {"algorithm": ls.Scaffold()}, changed(num_steps=0), "divides by a client's steps"),
    "another's": (LitMLP, {}, changed(unit=WorkUnit(99)), r"it is about client 99, and was sent by \d"),
    "its own rate": (LitMLP, {"algorithm": ls.Scaffold()}, with_value("learning_rate:", 1e-6), "was not asked"),
    "a variance": (LitNormed, {}, with_value(VARIANCE, -3.0), NO_VARIANCE),
    "beside packed values": (LitNormed, {"filters": [ls.TopK(0.1)]}, with_value(VARIANCE, -3.0), NO_VARIANCE),
    "packed": (LitNormed, {"filters": [PACKS_ALL]}, with_value(f"{VARIANCE}:scales", 1e3), NO_VARIANCE),
    "a count": (LitNormed, COUNTED, with_value("net.1.num_batches_tracked", -1), "holds a negative count"),
    "half a count": (LitNormed, {}, with_value("num_batches_tracked", 0.5), NO_COUNT),
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", REFUSED)
def test_what_a_round_cannot_use_is_the_failure_of_its_sender(name: str, fit: Fit) -> None:
    make, federation, spoil, message = REFUSED[name]
    line = toy_line(make, spoil=lambda question, parts: spoil(parts) if question.node == FIRST else parts)
    options: dict[str, Any] = {"clients_per_round": 12, "faults": TOLERANT, "max_epochs": 2, **federation}
    with pytest.warns(ls.SpectralWarning, match=message):
        fitted = fit(seeded(make, momentum=0.0), remote(line), **options)
    assert Counter(row.left_out for row in fitted.ledger.rows) == {None: 22, "error": 2}
    assert math.isfinite(fitted.logged["val_loss"])


def test_a_client_with_a_huge_loss_does_not_take_part_alone(fit: Fit) -> None:
    line = toy_line(LitMLP, spoil=lambda question, parts: spoil(parts) if question.node == FIRST else parts)
    spoil, sampler = changed(loss=1e12), ls.LossVarianceReduced(active=4, measure="all")
    fitted = fit(seeded(LitMLP), remote(line), participation=sampler, clients_per_round=None, max_epochs=4)
    drawn = [row for row in fitted.ledger.rows if not row.measured]
    liar = line.there[FIRST].make().client
    assert sum(str(row.client_id) == liar for row in drawn) == 4  # it is drawn whenever it says so
    # three of the eleven others are expected in each of 4 rounds, with a variance of at most 4 * 11 * 3/11 * 8/11
    assert abs(len(drawn) - 16) <= 5 * (4 * 11 * 3 / 11 * 8 / 11) ** 0.5


EXTREMES = [0.0, -0.0, 1e-30, -1.0, 1e10, -1e30, 3e38, INF, -INF, NAN]
CHANGES: dict[str, Callable[[random.Random], Callable[[Parts], Parts]]] = {
    "any value in a field": lambda rng: partial(respoken_at_random, rng),
    "a figure": lambda rng: changed(**{rng.choice(["loss", "loss_before"]): rng.choice([*EXTREMES, 1e300])}),
    "steps": lambda rng: changed(num_steps=rng.choice([0, 1, 2**39, 2**60])),
    "all values": lambda rng: changed(tensors=each(lambda tensor: torch.full_like(tensor, rng.choice(EXTREMES)))),
    "one value": lambda rng: changed(tensors=each(partial(with_one_value, rng))),
    "another size": lambda rng: changed(tensors=each(lambda tensor: tensor * rng.choice([-1.0, 0.0, 1e6, -1e20]))),
    "bytes": lambda rng: lambda parts: {name: with_bits_flipped(rng, data) for name, data in parts.items()},
    "nothing of a part": lambda rng: lambda parts: {rng.choice(sorted(parts)): b""},
}


AGREED: dict[str, Callable[[random.Random], Callable[[Parts], Parts]]] = {
    "a handshake": lambda rng: partial(agreed_at_random, rng),
    **{name: CHANGES[name] for name in ("bytes", "nothing of a part")},
}


def agreed_at_random(rng: random.Random, parts: Parts) -> Parts:
    if Part.HANDSHAKE not in parts:  # what it is asked follows from its lies: it refuses
        return parts
    said = msgpack.decode(parts[Part.HANDSHAKE])
    return {Part.HANDSHAKE: msgpack.encode({**said, rng.choice(sorted(said)): rng.choice(WRONG)})}


def respoken_at_random(rng: random.Random, parts: Parts) -> Parts:
    field, value = rng.choice(FIELDS), rng.choice(WRONG)
    return respoken(parts, "Upload", lambda fields: fields.update({field: value}))


def with_one_value(rng: random.Random, tensor: torch.Tensor) -> torch.Tensor:
    other = tensor.clone()
    if other.is_floating_point() and other.numel():
        other.view(-1)[rng.randrange(other.numel())] = rng.choice(EXTREMES)
    return other


def with_bits_flipped(rng: random.Random, data: bytes) -> bytes:
    flipped = bytearray(data)
    for _ in range(rng.randrange(3)):
        flipped[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return bytes(flipped)


SHARDING = ls.SpectralSharding(keep_ratio=0.5, layers=ls.LayerChoices(keep_first_and_last_dense=False))
LIED_TO: dict[str, dict[str, Any]] = {
    "FedAvg": {"algorithm": ls.FedAvg()},
    "SCAFFOLD": {"algorithm": ls.Scaffold()},
    "q-FedAvg": {"algorithm": ls.QFedAvg()},
    "FedDyn": {"algorithm": ls.FedDyn(alpha=0.1)},
    "SCAFFOLD, bounded": {"algorithm": ls.Scaffold(control_bound=2.0)},
    "FedDyn, bounded": {"algorithm": ls.FedDyn(alpha=0.1, control_bound=1.0)},
    "sharding": {"algorithm": SHARDING},
    "secure sums": {"filters": [ls.SecureSums(0.6)]},  # in whose steps it lies alone: nothing bounds what is masked
}


@pytest.mark.sampled(1)
@pytest.mark.filterwarnings("ignore::lightning_spectral.SpectralWarning")
@pytest.mark.parametrize("num_rounds", [10, pytest.param(400, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", LIED_TO)
def test_a_device_that_lies_at_random_ends_no_run_of_twelve(name: str, num_rounds: int, fit: Fit) -> None:
    """In 400 rounds it spoils what `Scaffold` and `FedDyn` add up over rounds, unless they bound it."""
    rng, spoilt = random.Random(name), Counter[str]()

    def act(question: Question, parts: Parts) -> Parts:
        if question.node != FIRST:
            return parts
        kind = rng.choice(list(changes))
        spoilt[kind] += 1
        return changes[kind](rng)(parts)

    changes, kinds = (AGREED, [Kind.AGREE]) if name == "secure sums" else (CHANGES, [Kind.TRAIN, Kind.EVALUATE])
    callbacks = [ls.ClientEvaluation(5)] if Kind.EVALUATE in kinds else []
    options: dict[str, Any] = {"clients_per_round": 12, "seed": 3, "faults": TOLERANT, **LIED_TO[name]}
    data = remote(held_out_line(spoil=act, spoilt=kinds))
    fitted = fit(seeded(LitMLP, momentum=0.0), data, max_epochs=num_rounds, callbacks=callbacks, **options)
    assert sum(spoilt.values()) >= num_rounds + len(callbacks)
    assert len(spoilt) >= 0.75 * len(changes)
    assert torch.isfinite(fitted.weights).all()
    assert (fitted.logged["val_loss"] < 1.1) != (num_rounds == 400 and name in ("SCAFFOLD", "FedDyn"))  # untrained: 1.1


def identified(parts: Parts, claims: dict[str, Any], model: str = "", **has: Any) -> Parts:
    """An identity with other claims, and another holding under the name of a model."""
    said = msgpack.decode(parts[Part.IDENTITY])
    return {Part.IDENTITY: msgpack.encode({**said, "holdings": {model: {**said["holdings"][""], **has}}, **claims})}


def claimed_at_random(rng: random.Random, parts: Parts) -> Parts:
    """What a device says of who it is, with what it has under another name; of whose upload it is; and of which run."""
    if Part.IDENTITY in parts:
        name, model = rng.choice([str(rng.randrange(12)), "nobody", rng.choice(WRONG)]), rng.choice(["", "", "words"])
        is_own = name == msgpack.decode(parts[Part.IDENTITY])["client"]  # what it has is its own to say
        return parts if is_own else identified(parts, {"client": name}, model, num_examples=rng.choice([99, 2**39]))
    if Part.HEAD not in parts or rng.random() < 0.2:
        return {Part.LACKS: rng.randbytes(64)}
    unit = rng.choice([*range(12), *WRONG]), rng.choice(["", "", "words"]), rng.choice(EXTREMES)
    return respoken(parts, "Upload", lambda fields: fields.update(unit=unit))


@pytest.mark.sampled(1)
@pytest.mark.filterwarnings("ignore:Node .* was rejected", "ignore::lightning_spectral.SpectralWarning")
@pytest.mark.parametrize(("num_rounds", "is_in_kit"), [(8, False), pytest.param(60, True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", [*LIED_TO, "Ditto"])
def test_a_device_that_claims_to_be_others_changes_no_bit_of_theirs(
    name: str, num_rounds: int, is_in_kit: bool, fit: Fit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All is as if it were honest, and refused in the rounds in which it is not believed."""
    monkeypatch.setattr(roster_module, "LONGEST_PAUSE", 0.0)
    options: dict[str, Any] = {**LIED_TO, "Ditto": {"algorithm": ls.Ditto()}}[name]
    options = {**options, "clients_per_round": 12, "seed": 3, "faults": TOLERANT, "max_epochs": num_rounds}
    rng, asked, believed, found = random.Random(name), Counter[str](), set[int](), []

    def lies(line: FakeLine, question: Question, parts: Parts) -> Parts:
        if question.kind == Kind.TRAIN and question.node == FIRST + 1 and rng.random() < 0.5:
            line.there = others if FIRST in line.there else everybody  # it comes and goes, to be asked for its name
        asked[question.kind] += question.node == FIRST
        is_known = asked[Kind.TRAIN] > 0  # without a kit, a name belongs to whoever says it first
        return claimed_at_random(rng, parts) if question.node == FIRST and is_known and rng.random() < 0.5 else parts

    def is_refused(line: FakeLine, question: Question, parts: Parts) -> Parts:
        is_believed = question.kind == Kind.WHO or question.node != FIRST or question.round_idx in believed
        return parts if is_believed else {Part.REFUSED: b"?"}

    for act in (lies, is_refused):
        line = toy_line(LitMLP, folder=(folder := tmp_path / act.__name__) / "states", spoilt=(Kind.WHO, Kind.TRAIN))
        everybody, others = line.there, {node: line.there[node] for node in line.there if node != FIRST}
        names = {device.make().client: node for node, device in everybody.items()}
        line.spoil, line.status = partial(act, line), in_kit(folder, names) if is_in_kit else None
        data = remote(line, patience=0.0, trust_names=is_in_kit)
        fitted = fit(seeded(LitMLP, momentum=0.0), data, **options)
        heard = {(names[str(row.client_id)], row.round_idx) for row in fitted.ledger.rows if row.left_out is None}
        believed = {round_idx for node, round_idx in heard if node == FIRST}
        assert len(heard) == 11 * num_rounds + len(believed)
        paths = [path for path in folder.glob("states/*/*") if names[path.parent.name] != FIRST]
        kept = {path.relative_to(folder): path.read_bytes() for path in paths}
        assert bool(kept) == any(system in name for system in ("SCAFFOLD", "FedDyn", "Ditto"))
        found.append((fitted.tensors, heard, kept, data.roster.state_dict(), data.roster.holdings("")))
    assert same_state(found[0][0], found[1][0])
    assert found[0][1:] == found[1][1:]
    assert len(believed) <= num_rounds / 2
    assert believed or num_rounds < 60  # few rounds may all fall to lies
    assert min(asked.values()) >= num_rounds / 10


def test_metrics_of_devices_pass_for_none_of_the_server(fit: Fit) -> None:
    one = {"val_acc": LoggedValue(9.0, False, True), "fl/loss": LoggedValue(0.0, False, True)}
    fitted = fit_with(fit, changed(logged=one, loss=NAN))
    assert fitted.logged["val_acc"] <= 1.0 < fitted.logged["clients/val_acc"]
    assert 0.0 < fitted.logged["fl/loss"] < 2.0
    assert fitted.rows[-1]["fl/values_not_finite"] == 1.0


@pytest.mark.parametrize("loss", [-1.7e308, -1e160, -1e12])
def test_no_loss_is_so_large_that_a_mean_or_a_square_ends_the_run(loss: float, fit: Fit) -> None:
    line = toy_line(LitMLP, spoil=each_in_its_way(changed(loss=loss)))
    stopping = EarlyStopping("fl/loss", patience=100)  # which ends a run whose loss is not finite
    fitted = fit(seeded(LitMLP), remote(line), clients_per_round=12, max_epochs=3, callbacks=[stopping])
    assert [math.isfinite(row["fl/loss"]) for row in fitted.rows] == [True] * 3
    sampler: dict[str, Any] = {"participation": ls.LossVarianceReduced(active=4), "clients_per_round": None}
    assert len(fit(seeded(LitMLP), remote(line), max_epochs=3, **sampler).rows) == 3


def test_an_epsilon_that_is_none_is_not_believed(fit: Fit) -> None:
    lies = [changed(logged={"example_epsilon": LoggedValue(said, False, True)}) for said in (NAN, -1.0, 1e300)]
    assert "fl/example_epsilon" not in fit_with(fit, *lies).logged
    honest = changed(logged={"example_epsilon": LoggedValue(2.0, False, True)})
    assert fit_with(fit, *lies, honest).logged["fl/example_epsilon"] == 2.0


def test_what_a_node_says_is_shown_in_one_line_of_the_status(fit: Fit, tmp_path: Path) -> None:
    def forge(question: Question, parts: Parts) -> Any:
        return Answer(f"ticket {len(line.asked)}", reason="dropped_out", message=9 * FORGED + 1000 * "x")

    line = toy_line(LitMLP, spoil=lambda question, parts: forge(question, parts) if question.node == FIRST else parts)
    line.status = tmp_path / "status.jsonl"
    fit(seeded(LitMLP), remote(line), clients_per_round=12, max_epochs=1)
    (why,) = filter(None, (json.loads(row)["why"] for row in line.status.read_text().splitlines()))
    assert why.isprintable()
    assert len(why) == 1000


def test_a_device_that_says_again_and_again_what_it_lacks_has_no_more_time(fit: Fit) -> None:
    def stall(question: Question, parts: Parts) -> Any:
        if question.node != FIRST or question.round_idx == 0 or Part.START in question.parts:
            return parts
        return {Part.LACKS: b"the start"}

    line = toy_line(LitMLP, spoil=stall)
    fit(seeded(LitMLP), remote(line, deadline=30.0), clients_per_round=12, max_epochs=2)
    asked = [question.seconds for question in line.asked if question.node == FIRST and question.kind == Kind.TRAIN]
    assert asked[:2] == [30.0, 30.0]
    assert 0.0 < asked[2] < 30.0


@pytest.mark.filterwarnings("ignore:Round .* the training loss is")
def test_of_two_updates_a_liar_does_not_say_what_is_usual(fit: Fit) -> None:
    line = toy_line(LitMLP, spoil=each_in_its_way(changed(tensors=each(lambda tensor: torch.full_like(tensor, 1e11)))))
    line.there = {node: line.there[node] for node in (FIRST, FIRST + 1)}
    fitted = fit(seeded(LitMLP), remote(line, wait_for=2), clients_per_round=2, seed=3, max_epochs=4)
    assert all(row["fl/clients_bounded"] for row in fitted.rows)
    assert fitted.weights.abs().max() < 10.0  # of which 1e11 is half otherwise


def test_no_update_is_many_times_as_long_as_is_usual(fit: Fit) -> None:
    honest = fit_with(fit, dict)
    spoilt = changed(tensors=each(lambda tensor: torch.full_like(tensor, 1e11)))
    bounded = fit_with(fit, spoilt)
    assert [row["fl/clients_bounded"] for row in bounded.rows] == [1.0, 1.0]
    assert [row["fl/clients_bounded"] for row in honest.rows] == [0.0, 0.0]
    distance = torch.dist(bounded.weights, honest.weights)
    most = bounded.weights.numel() ** 0.5 / 12  # one of twelve, in a first round by at most the norm of as many ones
    assert distance < 1.5 * most

    line = toy_line(LitMLP, spoil=lambda question, parts: spoilt(parts) if question.node == FIRST else parts)
    data = remote(line, wait_for=12, update_bound=None)
    with pytest.warns(ls.SpectralWarning, match="times as large as the tensor itself"):
        unbounded = fit(seeded(LitMLP), data, clients_per_round=12, seed=3, max_epochs=1, faults=TOLERANT)
    assert unbounded.weights.abs().max() > 1e9


def test_no_client_has_more_than_its_share_of_a_round(fit: Fit) -> None:
    def boasts(parts: Parts) -> Parts:
        return ones(parts) if Part.HEAD in parts else identified(parts, {}, num_examples=10**9)

    def weight_of_first(**options: Any) -> float:
        line = toy_line(LitMLP, spoil=each_in_its_way(boasts), spoilt=(Kind.WHO, Kind.TRAIN))
        data = remote(line, wait_for=12, update_bound=None, **options)
        fitted = fit(seeded(LitMLP, lr=0.0), data, clients_per_round=12, max_epochs=1)
        untrained = seeded(LitMLP).state_dict()["net.0.weight"]
        change = fitted.model.module.state_dict()["net.0.weight"] - untrained
        return float(change.mean())  # 1 for a client that decides alone

    ones = changed(tensors=each(lambda tensor: tensor + 1.0))
    with pytest.warns(UserWarning, match=r"says that it has 1,000,000,000 examples, and counts as one with"):
        assert weight_of_first(max_share=0.5) == pytest.approx(0.5, abs=1e-5)
    with pytest.warns(UserWarning, match="share of 0.25 of a round's weight"):
        assert weight_of_first() == pytest.approx(0.25, abs=0.01)  # sizes are whole numbers
    assert weight_of_first(max_share=1.0) > 0.999


EVALUATIONS = (Kind.EVALUATE,)


def evaluated(value: float, **changes: Any) -> Callable[[Parts], Parts]:
    return changed(logged={"val_acc": LoggedValue(value, False, True)}, **changes)


UNUSABLE: list[tuple[Callable[[Parts], Any], str]] = [
    (evaluated(0.5, failure=Failure("evaluation", "a\x1b[2Jb"), left_out="error"), r"a \[2Jb"),
    (changed(logged={"\n": LoggedValue(0.5, False, True)}), "the name of a value has 1 to 200"),
    (evaluated(0.5, tensors={str(i): torch.zeros(0) for i in range(3000)}), "besides the values of tensors"),
    (lambda parts: {"head": b"", "values": b""}, "damaged or truncated"),
    (lambda parts: {}, "holds no Upload"),
    (lambda parts: Answer("lost on its way"), "no answer in time"),
]


def test_evaluations_that_cannot_be_used_are_named_and_left_out(fit: Fit) -> None:
    line = held_out_line(spoil=each_in_its_way(*(lie for lie, _ in UNUSABLE)), spoilt=EVALUATIONS)
    evaluation = ls.ClientEvaluation()
    data = remote(line, deadline=2.0)
    said = said_during(lambda: fit(seeded(LitMLP), data, max_epochs=1, callbacks=[evaluation]))
    for _, message in UNUSABLE:
        assert any(re.search(rf"client '\d+' is not evaluated: .*{message}", one) for one in said), (message, said)
    assert evaluation.table is not None
    assert len(evaluation.table.rows) == 12 - len(UNUSABLE)


def test_evaluations_that_are_not_finite_are_counted_and_in_no_mean(fit: Fit) -> None:
    line = held_out_line(spoil=each_in_its_way(*map(evaluated, (NAN, INF, -INF))), spoilt=EVALUATIONS)
    fitted = fit(seeded(LitMLP), remote(line), max_epochs=1, callbacks=[ls.ClientEvaluation()])
    assert fitted.logged["fl/clients/val_acc/not_finite"] == 3.0
    assert 0.0 <= fitted.logged["fl/clients/val_acc/mean"] <= 1.0
    assert "fl/clients/val_loss/not_finite" not in fitted.logged


def identity_in(data: bytes) -> Identity:
    return read_identity(Answer("a ticket", {Part.IDENTITY: data}))


def test_an_identity_out_of_bounds_is_refused() -> None:
    with pytest.raises(RecordError, match="identity cannot be read: Expected"):
        identity_in(msgpack.encode(Identity("ward", {"": Holding(2**40, 0)})))
    with pytest.raises(RecordError, match="says that an epoch has 0 of its 80 examples"):
        identity_in(msgpack.encode(Identity("ward", {"": Holding(80, 0)})))
    with pytest.raises(RecordError, match=rf"version {VERSION + 1} of .* the server {VERSION}; install the same"):
        identity_in(msgpack.encode(Identity("ward", {}, VERSION + 1)))


WARD = Identity("ward 7", {"": Holding(80, 64, 0.5, 3, 1e6)})


def otherwise(field: str) -> Iterator[bytes]:
    """Identities that say a field of `WARD`, or of what it has, otherwise than the format has it; or damaged bytes."""
    data, rng = msgpack.encode(WARD), random.Random(0)
    for value in WRONG if field else ():
        said = msgpack.decode(data)
        (said if field in said else said["holdings"][""])[field] = value
        yield msgpack.encode(said)
    for _ in range(0 if field else 3000):
        damaged = bytearray(data)
        damaged[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        yield bytes(damaged[: rng.randrange(len(data)) if rng.random() < 0.2 else None])


@pytest.mark.parametrize("field", ["", "client", "version", "holdings", *(f.name for f in dataclasses.fields(Holding))])
@pytest.mark.filterwarnings("ignore:Node .* was rejected")
def test_a_newcomer_says_who_it_is_within_bounds_or_is_rejected(field: str) -> None:
    assert identity_in(msgpack.encode(WARD)) == WARD
    rejected = []
    for said in otherwise(field):
        node = SimpleNamespace(answer=lambda question, said=said: {Part.IDENTITY: said})
        roster = Roster(FakeLine({200: node}), patience=0.0)  # type: ignore[dict-item]
        roster.look()
        rejected.append(not roster.names)
        for name in roster.names:
            assert name.isprintable()
            assert 0 < len(name) <= 200
            for holding in roster.holdings(""):
                assert 0 <= holding.examples_per_epoch <= holding.num_examples < 2**40
                assert 0 <= holding.num_held_out < 2**40
                assert holding.keep_ratio is None or 0.0 < holding.keep_ratio <= 1.0
                assert holding.budget_bytes is None or holding.budget_bytes > 0.0
    least = len(rejected) // (2 if field else 3)
    assert least < sum(rejected) <= len(rejected) - (field == "")  # some of the damage is none


def test_a_device_refuses_what_a_server_writes_by_hand_or_trains_on_it(fit: Fit) -> None:
    line = toy_line(LitMLP)
    fit(seeded(LitMLP), remote(line), max_epochs=1, clients_per_round=1)
    question = next(question for question in line.asked if question.kind == Kind.TRAIN)
    for field in (f.name for f in dataclasses.fields(Download)):
        service = line.there[question.node].make()
        honest = record_of(service.answer(Kind.TRAIN, question.parts), Upload)
        for value in WRONG:
            if field == "local_epochs" and value == 2**63:
                continue  # it trains for as long as it is told to
            parts = respoken(question.parts, "Download", lambda fields, new={field: value}: fields.update(new))
            answer = service.answer(Kind.TRAIN, parts)
            assert answer.keys() in ({"refused"}, {"head", "values"}), (field, value)
            assert b"Traceback" not in b"".join(answer.values()), (field, value)
        again = record_of(service.answer(Kind.TRAIN, question.parts), Upload)
        assert all(torch.equal(again.tensors[name], tensor) for name, tensor in honest.tensors.items()), field


@given(st.binary(max_size=300))
def test_other_bytes_are_no_identity(data: bytes) -> None:
    with pytest.raises(RecordError):
        identity_in(data)
