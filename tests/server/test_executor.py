"""Executors may answer in any order, elsewhere, and with less than they were sent: the weights are the same."""

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from bare_engine import bare_engine
from federation import Fit, Fitted, same_state, seeded
from mixed_federation import EVERY_SYSTEM
from observed_runs import halving_first_weight
from other_process import (
    LitFails,
    LitFrozen,
    LitPlain,
    OtherProcess,
    Worker,
    data_of_clients,
    sorted_data,
    sorted_data_of_clients,
    toy_data,
)
from torch import Tensor
from toy_models import LitMLP, LitSmall

import lightning_spectral as ls
from lightning_spectral.client.device import Device
from lightning_spectral.client.local_loop import LocalSettings
from lightning_spectral.client.user_optimizer import options_of
from lightning_spectral.protocol.codec import decode
from lightning_spectral.protocol.cohort import Workers
from lightning_spectral.protocol.records import ClientOutcome, Download, RoundSummary, Upload, WorkUnit
from lightning_spectral.server.executor import Executor, SequentialExecutor
from lightning_spectral.server.processes import Processes
from lightning_spectral.server.round import Engine, OpenRound, downloads_sent, uploads_of
from lightning_spectral.simulation import Conditions

SIZES = (40, 30, 20, 15, 10, 5)
ALGORITHMS: list[Any] = [ls.FedAvg(), ls.SpectralSharding(keep_ratio={0.3: 0.5, 0.6: 0.5}, spectral_start=None)]


class Unreliable(SequentialExecutor):
    """Answers in blocks of three and in random order; every fourth upload is lost, and its client trains again.

    Attributes:
        num_calls: How often it was called.
        num_lost: How many uploads were lost.
    """

    def __init__(self, device: Device) -> None:
        super().__init__(device)
        self.num_calls = self.num_lost = 0
        self._chance = random.Random(0)
        self._num_trained = 0

    def run(self, downloads: Iterable[Download]) -> Iterator[Upload]:
        self.num_calls += 1
        remaining = iter(downloads)
        while block := list(islice(remaining, 3)):
            while block:
                self._chance.shuffle(block)
                upload = self.device.run(block[-1])
                self._num_trained += 1
                if self._num_trained % 4 == 0:
                    self.num_lost += 1
                else:
                    block.pop()
                    # a copy, because clients may train again before the server has read it
                    yield replace(upload, tensors={name: tensor.clone() for name, tensor in upload.tensors.items()})


class Backwards(SequentialExecutor):
    """Trains all clients before it returns their uploads, the last one first."""

    def run(self, downloads: Iterable[Download]) -> Iterator[Upload]:
        return reversed([self.kept(self.device.run(download)) for download in downloads])

    def kept(self, upload: Upload) -> Upload:
        return replace(upload, tensors={name: tensor.clone() for name, tensor in upload.tensors.items()})


class Careless(Backwards):
    """Forgets that the next client trains in the same memory."""

    def kept(self, upload: Upload) -> Upload:
        return upload


@pytest.fixture
def uneven(toy: Any) -> ls.FederatedDataModule:
    keys = [client_id for client_id, size in enumerate(SIZES) for _ in range(size)]
    return ls.FederatedDataModule(toy, ls.NaturalPartitioner(keys), batch_size=4)


def played(
    algorithm: Any,
    make_executor: Callable[[Device], Executor],
    server: Any,
    data: ls.FederatedDataModule,
    rounds: int = 2,
    **conditions: Any,
) -> tuple[dict[str, Tensor], list[RoundSummary]]:
    """Play rounds of all clients with plain averaging; return the server's weights and the summaries."""
    (template,), _ = server.configure_optimizers()

    def executor(engine: Engine) -> Executor:
        return make_executor(Device(server, engine.instructions, [template], data.client_data, LocalSettings()))

    engine = bare_engine(
        algorithm,
        server,
        data.client_directory(algorithm.capacities.of_clients(data.num_clients, 0)),
        executor,
        local_epochs=2,
        options=lambda: (options_of(template),),
        **conditions,
    )
    optimizer, summaries = torch.optim.SGD(server.parameters(), lr=1.0), []
    units = [WorkUnit(client_id, coefficient=size) for client_id, size in enumerate(SIZES)]
    for round_idx in range(rounds):
        engine.open_round(round_idx, units).play(units)
        engine.round.gather()
        summaries.append(engine.apply_round())
        optimizer.step()
        engine.settle()
        optimizer.zero_grad()
    return server.state_dict(), summaries


def told(clients: Iterable[ClientOutcome]) -> list[dict[str, Any]]:
    """What is the same whenever a client answers; since Python 3.13 dataclasses that hold a NaN are unequal."""
    return [{**vars(client), "seconds": None} for client in clients]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=["dense", "spectral"])
def test_answers_in_any_order_give_the_same_weights_bit_for_bit(algorithm: Any, lit_mlp: Any, uneven: Any) -> None:
    start = seeded(lit_mlp).state_dict()
    in_order, expected = played(algorithm, SequentialExecutor, seeded(lit_mlp), uneven)
    backwards, summaries = played(algorithm, Backwards, seeded(lit_mlp), uneven)
    assert same_state(in_order, backwards)
    assert not same_state(in_order, start)
    unreliable, repeated = played(algorithm, Unreliable, seeded(lit_mlp), uneven)
    assert same_state(in_order, unreliable)
    for found in (summaries, repeated):
        for ours, theirs in zip(found, expected, strict=True):
            assert told(ours.clients) == told(theirs.clients)  # in the cohort's order, whichever client answered first
            assert ours.diagnostics == theirs.diagnostics
    careless, _ = played(algorithm, Careless, seeded(lit_mlp), uneven)
    assert not same_state(in_order, careless)  # or the test would show nothing


@pytest.mark.sampled(1)
@pytest.mark.parametrize("executor", [SequentialExecutor, Backwards, Unreliable])
@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=["dense", "spectral"])
def test_a_round_without_lightning_is_that_of_a_trainer(
    algorithm: Any, executor: Any, lit_mlp: Any, uneven: Any, fit: Fit
) -> None:
    fitted = fit(seeded(lit_mlp), uneven, algorithm=algorithm, clients_per_round=len(SIZES), local_epochs=2)
    server = seeded(lit_mlp)
    algorithm.bind(server).initialize(Workers())
    weights, _ = played(algorithm, executor, server, uneven, rounds=1)
    assert same_state(weights, fitted.state)


@pytest.mark.parametrize("executor", [SequentialExecutor, Backwards])
def test_clients_that_will_not_report_back_are_not_asked_to_train(executor: Any, lit_mlp: Any, uneven: Any) -> None:
    asked: list[int] = []

    class Watched(executor):  # type: ignore[misc]
        def run(self, downloads: Iterable[Download]) -> Iterator[Upload]:
            downloads = list(downloads)
            asked.extend(download.unit.client_id for download in downloads)
            return super().run(downloads)  # type: ignore[no-any-return]

    gone = Conditions(ls.ClientDropout([0.0, 1.0, 0.0, 0.0, 1.0, 0.0]))
    _, (summary,) = played(ls.FedAvg(), Watched, seeded(lit_mlp), uneven, rounds=1, conditions=gone)
    assert asked == [0, 2, 3, 5]
    assert summary.left_out["dropped_out"] == 2
    assert [client.left_out for client in summary.clients] == [None, "dropped_out", None, None, "dropped_out", None]


class Twice(SequentialExecutor):
    def run(self, downloads: Iterable[Download]) -> Iterator[Upload]:
        for upload in super().run(downloads):
            yield upload
            yield upload


class Offline(SequentialExecutor):
    """Fails with the second client."""

    def run(self, downloads: Iterable[Download]) -> Iterator[Upload]:
        for place, download in enumerate(downloads):
            if place == 1:
                raise ConnectionError("no route to the devices")
            yield self.device.run(download)


def test_an_upload_that_comes_twice_is_refused(lit_mlp: Any, uneven: Any) -> None:
    with pytest.raises(ls.ClientError, match=r"Round 0, client 0: its executor returned .* twice"):
        played(ls.FedAvg(), Twice, seeded(lit_mlp), uneven)


def test_an_error_of_the_executor_is_raised_as_it_is(lit_mlp: Any, uneven: Any) -> None:
    with pytest.raises(ConnectionError, match="no route"):
        played(ls.FedAvg(), Offline, seeded(lit_mlp), uneven)


def test_with_several_processes_an_error_waits_for_them_and_names_the_client_sent_to_last(
    lit_mlp: Any, uneven: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Processes, "gather", lambda self, value: [value, value])
    with pytest.raises(ls.ClientError, match=r"Round 0, client 1: ConnectionError: no route .* \(process 0"):
        played(ls.FedAvg(), Offline, seeded(lit_mlp), uneven, processes=Processes(size=2))


def test_downloads_are_drawn_as_the_executor_takes_them(lit_mlp: Any, uneven: Any, monkeypatch: Any) -> None:
    """So one that trains clients one after another holds one at a time."""
    drawn: list[int] = []
    trained: list[int] = []
    send = OpenRound.send

    def noted(opened: OpenRound, unit: WorkUnit) -> Any:
        drawn.append(unit.client_id)
        return send(opened, unit)

    monkeypatch.setattr(OpenRound, "send", noted)

    class Watched(SequentialExecutor):
        def run(self, downloads: Iterable[Download]) -> Iterator[Upload]:
            for download in downloads:
                yield self.device.run(download)
                trained.append(download.unit.client_id)
                assert drawn == trained

    played(ls.FedAvg(), Watched, seeded(lit_mlp), uneven, rounds=1)
    assert trained == list(range(len(SIZES)))


@dataclass
class Devices(Executor):
    """Each answers with what it was sent; some have lost the weight, and some say so whatever they were sent."""

    lost: set[int]
    stubborn: set[int] = field(default_factory=set)
    asked: list[int] = field(default_factory=list)

    def run(self, downloads: Iterable[Download]) -> Iterator[Upload]:
        for download in downloads:
            client = download.unit.client_id
            self.asked.append(client)
            lacks = client in self.stubborn or (client in self.lost and download.held)
            yield Upload(download.unit, {} if lacks else download.travelling, missing=("weight",) if lacks else ())


def downloads(*held: bool) -> list[Download]:
    """One for each client, without the weight where it holds that."""
    tensors = {"weight": torch.ones(3), "bias": torch.ones(1)}
    names = frozenset({"weight"})
    return [
        Download(WorkUnit(i), 1.0, tensors, frozen={"weight": "digest"}, held=names if holds else frozenset())
        for i, holds in enumerate(held)
    ]


def test_what_a_device_lost_is_sent_after_the_others_have_answered() -> None:
    devices, asked = Devices({1, 2}), downloads(True, True, True, False)
    uploads = {upload.unit.client_id: upload for upload in uploads_of(devices, asked)}
    assert devices.asked == [0, 1, 2, 3, 1, 2]
    assert [upload.missing for upload in uploads.values()] == [(), (), ("weight",), ("weight",)]
    assert {client: set(upload.tensors) for client, upload in uploads.items()} == {
        0: {"bias"},
        1: {"weight", "bias"},
        2: {"weight", "bias"},
        3: {"weight", "bias"},
    }
    sent = {client: downloads_sent(asked[client], upload) for client, upload in uploads.items()}
    assert {client: [download.num_bytes for download in both] for client, both in sent.items()} == {
        0: [4],
        1: [4, 16],
        2: [4, 16],
        3: [16],
    }
    assert downloads_sent(None, uploads[0]) == []


@pytest.mark.parametrize("held", [True, False])
def test_a_device_that_lacks_what_it_was_just_sent_has_failed(held: bool) -> None:
    devices = Devices(set(), stubborn={0})
    (upload,) = uploads_of(devices, downloads(held))
    assert devices.asked == ([0, 0] if held else [0])
    assert upload.failure is not None
    assert upload.failure.stage == "loading"
    assert upload.failure.message == "the device says that it lacks weight, which came with this download."


def test_downloads_are_drawn_one_by_one_if_some_are_sent_again() -> None:
    devices, drawn = Devices({0}), list[int]()

    def drawing() -> Iterator[Download]:
        for download in downloads(True, False):
            drawn.append(download.unit.client_id)
            yield download

    uploads = uploads_of(devices, drawing())
    assert (next(uploads).unit.client_id, drawn) == (1, [0, 1])
    assert next(uploads).missing == ("weight",)
    assert next(uploads, None) is None


FitAs = Callable[..., Fitted]
SYSTEMS: dict[str, dict[str, Any]] = {  # `test_check_algorithm` plays rounds of all of them in another process
    **{
        name: EVERY_SYSTEM[name]
        for name in ("FedAvg", "personal head", "spectral", "SCAFFOLD", "Zampling", "LoRA", "width")
    },
    "averages of each width": {
        "algorithm": ls.WidthSharding(
            keep_ratio={0.25: 0.5, 0.75: 0.5}, step_widths=(0.25, 0.5, 0.75), averages_per_width=True
        )
    },
}


class Elsewhere(ls.FederatedModule):
    """A federation whose clients train in another process."""

    worker: Worker
    executor: OtherProcess
    keeps = True

    def make_executor(self, engine: Engine) -> Executor:
        trainer, self.module.trainer = self.module._trainer, None
        data = sorted_data_of_clients if self.local_hooks else data_of_clients
        start = engine.instructions, self.module, self.templates
        self.executor = OtherProcess(self.worker, *start, data, self.local_hooks, self.keeps)
        self.module.trainer = trainer
        return self.executor


class OverABadLine(ls.FederatedModule):
    """A federation whose uploads are shuffled and sometimes lost."""

    executor: Unreliable

    def make_executor(self, engine: Engine) -> Executor:
        in_order = super().make_executor(engine)
        assert isinstance(in_order, SequentialExecutor)
        self.executor = Unreliable(in_order.device)
        return self.executor


@contextmanager
def closing(model: ls.FederatedModule) -> Iterator[None]:
    try:
        yield
    finally:
        if isinstance(model, Elsewhere):
            model.executor.close()


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    worker = Worker()
    yield worker
    worker.close()


@pytest.fixture
def fit_as(fit: Fit, worker: Worker) -> FitAs:
    """Fits of three rounds with the given class and options of a federation."""

    def fit_as(
        federated: type[ls.FederatedModule],
        system: Mapping[str, Any],
        lit: type[LitMLP] = LitMLP,
        callbacks: Sequence[pl.Callback] = (),
        local_hooks: Sequence[ls.client.LocalHook] = (),
    ) -> Fitted:
        options: dict[str, Any] = {"clients_per_round": 4, "local_epochs": 2, "seed": 3, **system}
        model = federated(seeded(lit), local_hooks=local_hooks, **options)
        if isinstance(model, Elsewhere):
            model.worker = worker
        with closing(model):
            return fit(model, sorted_data() if local_hooks else toy_data(), max_epochs=3, callbacks=callbacks)

    return fit_as


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", SYSTEMS)
def test_other_executors_give_the_same_bits(name: str, fit_as: FitAs) -> None:
    lit = {"SCAFFOLD": LitPlain, "averages of each width": LitSmall}.get(name, LitMLP)
    theirs = fit_as(ls.FederatedModule, SYSTEMS[name], lit)
    assert all(row["train_loss"] > 0 and row["train_acc"] > 0 for row in theirs.rows)
    elsewhere, over_a_bad_line = (fit_as(federated, SYSTEMS[name], lit) for federated in (Elsewhere, OverABadLine))
    for ours in elsewhere, over_a_bad_line:
        assert same_state(ours.tensors, theirs.tensors)
        assert ours.ledger.rows == theirs.ledger.rows
        assert ours.rows == theirs.rows
        assert ours.logged == theirs.logged
    executor = over_a_bad_line.model.executor
    assert (executor.num_calls, executor.num_lost) == (3, 3)  # a call for each round; 12 of 15 uploads arrived


@pytest.mark.filterwarnings("ignore:.*without an optimizer")  # what clients write is meant to be lost
def test_a_device_keeps_the_frozen_base_that_is_not_sent_again(fit_as: FitAs) -> None:
    """From round 1 on, the weight that the other process was given at the start is out of date."""
    ours, theirs = (
        fit_as(federated, SYSTEMS["spectral"], LitFrozen, [halving_first_weight(round_idx=1)])
        for federated in (Elsewhere, ls.FederatedModule)
    )
    assert same_state(ours.tensors, theirs.tensors)
    assert ours.ledger.rows == theirs.ledger.rows
    assert {4 * 6 * 12, 0} <= {row.frozen_bytes for row in ours.ledger.rows if row.round_idx > 0}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["FedAvg", "spectral", "width"])
def test_a_device_knows_the_classes_that_it_lacks_from_its_own_data(name: str, fit_as: FitAs) -> None:
    hooks = [ls.MaskedLogits("net.5")]
    ours, theirs = (
        fit_as(federated, SYSTEMS[name], local_hooks=hooks) for federated in (Elsewhere, ls.FederatedModule)
    )
    assert same_state(ours.tensors, theirs.tensors)
    assert ours.rows == theirs.rows
    unmasked = fit_as(ls.FederatedModule, SYSTEMS[name], local_hooks=[ls.GradientClip(float("inf"))])
    assert not same_state(ours.state, unmasked.state)


def test_only_downloads_and_uploads_travel(fit_as: FitAs) -> None:
    executor = fit_as(Elsewhere, SYSTEMS["FedAvg"]).model.executor
    sent = [decode(*parts, Download) for parts in executor.sent]
    assert [download.unit for download in sent] == [decode(*parts, Upload).unit for parts in executor.received]
    assert [download.round_idx for download in sent] == 4 * [0] + 4 * [1] + 4 * [2]


class Forgetting(Elsewhere):
    """Every client has a device that has just been switched on."""

    keeps = False


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*without an optimizer")  # what clients write is meant to be lost
def test_a_device_that_lost_the_frozen_base_is_sent_it_again(fit_as: FitAs) -> None:
    ours, theirs = (fit_as(federated, SYSTEMS["spectral"], LitFrozen) for federated in (Forgetting, ls.FederatedModule))
    assert same_state(ours.tensors, theirs.tensors)
    assert ours.rows[0] == theirs.rows[0]  # all without the base
    base, again = 4 * (6 * 12 + 12), 0
    for row, expected in zip(ours.ledger.rows, theirs.ledger.rows, strict=True):
        if not expected.frozen_bytes:  # the download came twice, the second time with the base
            expected = expected._replace(downlink_bytes=2 * expected.downlink_bytes + base, frozen_bytes=base)
            again += 1
        assert row == expected
    assert again > 0
    assert len(ours.model.executor.sent) == len(ours.ledger.rows) + again


@pytest.mark.slow
def test_a_failure_in_another_process_has_its_address(fit_as: FitAs) -> None:
    with pytest.raises(ls.ClientError, match=r"Round 0, client \d+, local training: Unpicklable: the sensor is broken"):
        fit_as(Elsewhere, SYSTEMS["FedAvg"], LitFails)
