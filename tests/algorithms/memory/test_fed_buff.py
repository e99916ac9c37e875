"""FedBuff against a loop that plays events one by one, and what it says about who takes part and how stale that is."""

import copy
import heapq
import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from federation import Fit, check_resumes, same_state, seeded
from linear_models import LitLine, lines, vector
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from toy_models import LitMLP

import lightning_spectral as ls
from lightning_spectral.algorithms.memory.fed_buff import DRAWS, BufferRound, FedBuffHalf, Flights
from lightning_spectral.participation import UniformParticipation
from lightning_spectral.protocol.records import WorkUnit
from lightning_spectral.protocol.rng import derived_generator

SIZES = (4, 9, 3, 2, 5, 6, 8)
DURATIONS = [math.sqrt(prime) for prime in (5, 17, 2, 29, 11, 7, 61)]  # nobody finishes together
SEED, STEPS, CLOCK = 5, 5, ls.VirtualClock(ls.simulation.DeviceProfile(1, 1, 1))


def trained(line: LitLine, data: Any, client: int) -> LitLine:
    """A client's model after two full-batch steps."""
    local = copy.deepcopy(line)
    optimizer: Any = local.configure_optimizers()
    for _ in range(2):
        optimizer.zero_grad()
        local.training_step([tensor[data.partition[client]] for tensor in data.train.tensors], 0).backward()
        optimizer.step()
    return local


def event_loop(
    line: LitLine, data: Any, concurrency: int, size: int, is_damped: bool, from_current: bool = False
) -> tuple[Tensor, list[int]]:
    """Asynchronous training as it happens: clients train when they are sent a model, and updates wait in a queue.

    Returns:
        The weights after `STEPS` steps, and how stale each update was. With ``from_current``, clients train from the
        weights that the server has when their update arrives, which is wrong.
    """
    server, step, now, buffer = copy.deepcopy(line), 0, 0.0, dict[int, Tensor]()
    queue: list[tuple[float, int, int, Tensor]] = []
    staleness: list[int] = []
    generator = derived_generator(SEED, "participation", 0)

    while step < STEPS:
        busy = {*buffer, *(client for _, client, *_ in queue)}
        if free := min(concurrency - len(queue), len(SIZES) - len(busy)):
            order = UniformParticipation(free + len(busy)).cohort(len(SIZES), generator).tolist()
            for client in [client for client in order if client not in busy][:free]:
                update = vector(trained(server, data, client)) - vector(server)
                heapq.heappush(queue, (now + DURATIONS[client], client, step, update))
        now, client, begun, update = heapq.heappop(queue)
        if from_current:
            update = vector(trained(server, data, client)) - vector(server)
        staleness.append(step - begun)
        buffer[client] = SIZES[client] * update / (math.sqrt(1 + step - begun) if is_damped else 1)
        if len(buffer) == size:
            change = sum(buffer.values()) / sum(SIZES[client] for client in buffer)
            nn.utils.vector_to_parameters(vector(server) + change, server.parameters())
            step, buffer, generator = step + 1, {}, derived_generator(SEED, "participation", step + 1)
    return vector(server), staleness


@pytest.mark.sampled(3)
@pytest.mark.filterwarnings("ignore:Round .*the training loss")  # of one or two clients
@pytest.mark.parametrize(("concurrency", "size"), [(4, 3), (7, 2), (6, 1), (2, 3)])
@pytest.mark.parametrize("weights", ["inverse_sqrt", "equal"])
def test_rounds_are_the_steps_of_an_event_loop(concurrency: int, size: int, weights: Any, fit: Fit) -> None:
    """A step rounds to the grid of sums, 2^-50 for each of at most three updates; steps of 0.1 hardly enlarge that."""
    line, given = seeded(LitLine, lr=0.03).double(), lines(3, SIZES)
    examples = TensorDataset(*(tensor.double() for tensor in given.train.tensors))  # type: ignore[attr-defined]
    data = ls.FederatedDataModule(examples, given.partitioner, batch_size=1000)
    algorithm = ls.FedBuff(concurrency, DURATIONS, "fixed", weights)
    run: dict[str, Any] = {"clients_per_round": size, "local_epochs": 2, "seed": SEED, "max_epochs": STEPS}
    fitted = fit(copy.deepcopy(line), data, algorithm=algorithm, **run)
    expected, staleness = event_loop(line, data, concurrency, size, weights == "inverse_sqrt")
    torch.testing.assert_close(fitted.weights, expected, rtol=0, atol=1e-12)
    means = [sum(staleness[n * size : (n + 1) * size]) / size for n in range(STEPS)]
    assert fitted.history.column("fl/staleness") == pytest.approx(means)
    assert max(means) > 0
    others, _ = event_loop(line, data, concurrency, size, weights == "inverse_sqrt", from_current=True)
    assert float((others - expected).abs().max()) > 1e-4


@pytest.mark.sampled(1)
@pytest.mark.parametrize("server", [None, ls.FedAvgM(lr=0.5, momentum=0.9)])
def test_with_equal_durations_it_is_federated_averaging_bit_for_bit(server: Any, data: Any, fit: Fit) -> None:
    run: dict[str, Any] = {"clients_per_round": 5, "max_epochs": 3, "server_optimizer": server, "seed": 1}
    ours = fit(seeded(LitMLP, norm=True), data, algorithm=ls.FedBuff(5, durations=0.3, law="fixed"), **run)
    theirs = fit(seeded(LitMLP, norm=True), data, **run)
    assert same_state(ours.state, theirs.state)
    assert ours.ledger.rows == theirs.ledger.rows
    assert ours.history.column("fl/virtual_seconds") == pytest.approx([0.3, 0.3, 0.3])


def test_a_resumed_run_is_the_uninterrupted_one(data: Any, fit: Fit, tmp_path: Path) -> None:
    """The queue and the versions are in the checkpoint, since updates that were under way arrive afterwards."""
    algorithm = ls.FedBuff(7, durations={1.0: 0.5, 3.0: 0.5})
    part = check_resumes(fit, partial(LitMLP, norm=True), data, tmp_path, algorithm=algorithm, clients_per_round=3)
    assert max(part.history.column("fl/staleness")) > 0
    assert float(part.state["net.1.running_var"].min()) > 0


class Halving(ls.RoundCallback):
    """Halves the weights after each step of the server, and compares what is kept with what clients are sent."""

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        for parameter in pl_module.module.parameters():
            parameter.data.mul_(0.5)

    def on_round_start(self, trainer: Any, pl_module: Any, opened: Any) -> None:
        sent = dict(pl_module.module.named_parameters())
        assert same_state(pl_module.state.sent(pl_module.state.version, sent), sent)


def test_a_version_is_what_clients_are_sent_if_a_callback_changes_the_server(data: Any, fit: Fit) -> None:
    run: dict[str, Any] = {"algorithm": ls.FedBuff(6), "clients_per_round": 2, "callbacks": [Halving()]}
    assert len(fit(seeded(LitMLP), data, max_epochs=3, **run).rows) == 3


def flights(*options: Any, **more: Any) -> Flights:
    """The queue of an algorithm before its first round."""
    state = ls.FedBuff(*options, **more).new_state(nn.Linear(1, 1), seed=0)
    state.advance()
    return state


def arrivals(state: Flights, size: int, num_clients: int, rounds: int) -> list[list[tuple[int, int]]]:
    """Of each round, the clients in the order of arrival, and how stale they are."""
    found = []
    for round_idx in range(rounds):
        state.cohort(UniformParticipation(size), num_clients, derived_generator(0, "participation", round_idx))
        assert state.buffer is not None
        found.append([(client, state.version - version) for client, version in state.buffer.versions.items()])
        state.advance()
    return found


def test_a_client_that_is_twice_as_slow_takes_part_half_as_often() -> None:
    """With exponential durations arrivals are a Poisson process, so each is independently one of the six slow ones."""
    state, number, chance = flights(12, [1.0] * 6 + [2.0] * 6, "exponential", max_staleness=100), 2000, 1 / 3
    slow = sum(client >= 6 for ((client, _),) in arrivals(state, 1, 12, number))
    assert abs(slow - number * chance) <= 5 * math.sqrt(number * chance * (1 - chance))


@pytest.mark.parametrize(("law", "variance"), [("fixed", 0.0), ("half-normal", math.pi / 2 - 1), ("exponential", 1.0)])
def test_durations_have_the_mean_that_is_asked_for(law: Any, variance: float) -> None:
    drawn = DRAWS[law](10_000, torch.Generator().manual_seed(1))
    assert float(drawn.min()) >= 0
    assert abs(float(drawn.mean()) - 1) <= 5 * math.sqrt(variance / 10_000)


def test_clients_are_distinct_and_their_versions_not_too_old() -> None:
    rounds = arrivals(flights(9, {1.0: 0.7, 6.0: 0.3}, max_staleness=3), 4, 30, 60)
    assert all(len({client for client, _ in cohort}) == 4 for cohort in rounds)
    assert {staleness for cohort in rounds for _, staleness in cohort} == {0, 1, 2, 3}
    assert len({client for cohort in rounds for client, _ in cohort}) > 20


def test_a_client_that_takes_too_long_is_abandoned_for_others() -> None:
    state = flights(3, [1.0, 1.0, 99.0, 1.0], "fixed", max_staleness=2)
    assert all(client != 2 for cohort in arrivals(state, 2, 4, 20) for client, _ in cohort)
    assert state.buffer is not None
    assert {flight.version >= state.version - 3 for flight in state.buffer.flights} == {True}


def test_clients_of_a_round_stay_the_same_once_the_server_has_stepped() -> None:
    """A checkpoint during validation asks for them again; a failed round is repeated with them."""
    state, pair = flights(4), UniformParticipation(2)
    first, again, later = (state.cohort(pair, 9, torch.Generator().manual_seed(seed)).tolist() for seed in (0, 0, 1))
    assert first == again != later
    assert flights(4).cohort(UniformParticipation(0.2), 9, torch.Generator().manual_seed(0)).tolist() == first
    state.cohort(pair, 9, torch.Generator().manual_seed(0))
    state.advance()
    assert state.cohort(pair, 9, torch.Generator().manual_seed(0)).tolist() == first


class Aged(ls.FedBuff):
    class round(BufferRound):
        """Whoever takes part, clients are up to two steps behind."""

        def staleness(self, unit: WorkUnit) -> int:
            return min(self.version, unit.client_id % 3)

    half, promises = FedBuffHalf, ls.FedBuff.promises


def test_it_keeps_the_contract_with_clients_that_are_stale() -> None:
    x = torch.randn(8, 6)
    ls.testing.check_algorithm(Aged(3), seeded(LitMLP), (x, x.argmax(1) % 3))


@pytest.mark.parametrize(
    ("options", "run", "message"),
    [
        ({"concurrency": 0}, {}, "`concurrency` must be at least 1, got 0"),
        ({"durations": -1.0}, {}, "`durations` must be positive and finite, got -1.0"),
        ({"law": "normal"}, {}, "`law` must be 'fixed', 'half-normal' or 'exponential', got 'normal'"),
        ({"staleness_weights": "none"}, {}, "`staleness_weights` must be 'inverse_sqrt' or 'equal', got 'none'"),
        ({"max_staleness": -1}, {}, "`max_staleness` must be at least 0, got -1"),
        ({"concurrency": 13}, {}, "`concurrency` must be at most num_clients=12, got 13; lower it"),
        ({"durations": [1.0, 2.0]}, {}, "`durations` lists 2 values for 12 clients"),
        ({}, {"participation": ls.Uniform(active=4)}, "participation=Uniform.* would draw others; leave it out"),
        (
            {},
            {"clock": ls.VirtualClock(ls.simulation.DeviceProfile(1, 1, 1))},
            "simulates time itself, and .*; leave it out",
        ),
        ({}, {"filters": [ls.SecureSums()]}, "which FedBuff does not promise"),
    ],
)
def test_what_cannot_work_is_refused_with_the_rule(options: Any, run: Any, message: str, data: Any, fit: Fit) -> None:
    run = {"clients_per_round": None if "participation" in run else 4, **run}
    with pytest.raises(ValueError, match=message):
        fit(seeded(LitMLP), data, algorithm=ls.FedBuff(**{"concurrency": 4, **options}), **run)
