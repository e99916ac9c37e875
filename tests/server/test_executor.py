"""Rounds without Lightning: the device half's executor is exchangeable, and the order of its uploads has no effect."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from federation import Fit, same_state, seeded
from torch import Tensor
from unreliable_executor import Unreliable

import lightning_spectral as ls
from lightning_spectral.client.device import Device
from lightning_spectral.client.forms import options_of
from lightning_spectral.client.local_loop import LocalSettings
from lightning_spectral.protocol.cohort import Workers
from lightning_spectral.protocol.records import ClientOutcome, Download, RoundSummary, Upload, WorkUnit
from lightning_spectral.server.executor import Executor, SequentialExecutor
from lightning_spectral.server.processes import Processes
from lightning_spectral.server.round import Engine, OpenRound
from lightning_spectral.simulation import Conditions

SIZES = (40, 30, 20, 15, 10, 5)
ALGORITHMS: list[Any] = [ls.FedAvg(), ls.SpectralSharding(keep_ratio={0.3: 0.5, 0.6: 0.5}, spectral_start=None)]


class Backwards(SequentialExecutor):
    """Trains all clients before it returns their uploads, the last one first."""

    def run(self, downloads: Iterable[Download]) -> Iterator[Upload]:
        uploads = [self.kept(self.device.run(download)) for download in downloads]
        return reversed(uploads)

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
    half = algorithm.bind(server)
    device = Device(server, half.device_half, [template], data.client_data, LocalSettings())
    engine = Engine(
        algorithm,
        half,
        data.client_directory(algorithm.capacities(data.num_clients, 0)),
        lambda _: make_executor(device),
        seed=0,
        local_epochs=2,
        options=lambda: (options_of(template),),
        **conditions,
    )
    optimizer, summaries = torch.optim.SGD(server.parameters(), lr=1.0), []
    units = [WorkUnit(client_id, coefficient=size) for client_id, size in enumerate(SIZES)]
    for round_idx in range(rounds):
        engine.open_round(round_idx, units).play(units)
        summaries.append(engine.close_round())
        optimizer.step()
        engine.settle()
        optimizer.zero_grad()
    return server.state_dict(), summaries


def told(clients: Iterable[ClientOutcome]) -> list[dict[str, Any]]:
    """What is the same whenever a client answers; since Python 3.13 dataclasses that hold a NaN are unequal."""
    return [{**vars(client), "seconds": None} for client in clients]


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
    """Returns every upload twice."""

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


def test_downloads_are_drawn_as_the_executor_takes_them(
    lit_mlp: Any, uneven: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
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
