"""A federation runs without a Trainer, with the same weights bit for bit, and what lasts between rounds is saved."""

import copy
import pickle
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from federation import Fit, same_state, seeded
from torch import Tensor
from torch.optim import Optimizer

import lightning_spectral as ls
from lightning_spectral.client.device import Device
from lightning_spectral.client.local_loop import LocalLoop, LocalSettings, LocalTrainer
from lightning_spectral.participation import Population, Sampler, UniformParticipation
from lightning_spectral.plugin.callbacks.round_callback import RoundCallback
from lightning_spectral.plugin.federation import Federation
from lightning_spectral.protocol.records import RoundSummary, WorkUnit
from lightning_spectral.server.executor import Executor, SequentialExecutor
from lightning_spectral.server.processes import Processes
from lightning_spectral.server.round import Engine

ROUNDS = 3
MIXED = ls.SpectralSharding(ls.Collective(), keep_ratio={0.5: 0.5, 1.0: 0.5})


class Owner(ls.FederatedModule):
    """A model whose clients train one after another, with nothing of a Trainer."""

    def make_executor(self, engine: Engine) -> Executor:
        return self.make_local_executor(engine)

    def make_local_executor(self, engine: Engine, local_trainer: LocalTrainer = LocalLoop) -> Executor:
        server, told, data = engine.half.server, engine.instructions, self.data.client_data
        return SequentialExecutor(Device(server, told, self.templates, data, LocalSettings(), local_trainer))


@dataclass
class Chosen:
    """Who takes part: every client has data for every model."""

    data: Mapping[str, ls.FederatedDataModule]
    participation: UniformParticipation | Sampler
    algorithms: Mapping[str, Any]
    seed: int = 0

    def data_of(self, name: str) -> ls.FederatedDataModule:
        return self.data[name]

    def population(self) -> Population:
        sizes = torch.stack([data.partition.sizes for data in self.data.values()], dim=1)
        return Population(sizes, torch.ones(len(sizes), dtype=torch.int64))

    def clients_of(self, name: str, algorithm: Any) -> Any:
        data = self.data[name]
        return data.client_directory(algorithm.capacities.of_clients(data.num_clients, self.seed))


@dataclass
class Loop:
    """Runs rounds in a plain loop; `stopped_after` turns of a round, nobody else may begin."""

    round_idx: int = 0
    stopped_after: int | None = None
    trainer: None = None
    processes: Processes = field(default_factory=Processes)
    logged: list[Sequence[RoundSummary]] = field(default_factory=list)

    def profile(self, stage: str) -> AbstractContextManager[Any]:
        return nullcontext()

    def round_callbacks(self) -> list[RoundCallback]:
        return [ls.SubmodelSampling(), ls.Aggregation()]

    def until_stopped(self, units: Iterable[WorkUnit]) -> Iterator[WorkUnit]:
        yield from list(units)[: self.stopped_after]

    def step(self, servers: Sequence[Optimizer]) -> None:
        for server in servers:
            server.step()

    def log(self, summaries: Sequence[RoundSummary]) -> None:
        self.logged.append(summaries)


def federate(
    owners: Mapping[str, Owner], data: Mapping[str, ls.FederatedDataModule], participation: Any
) -> tuple[Federation, Loop]:
    loop = Loop()
    chosen = Chosen(data, participation, {name: owner.algorithm for name, owner in owners.items()})
    return Federation(chosen, owners, loop), loop


def begin(federation: Federation, saved: dict[str, Any] | None = None) -> None:
    federation.cohorts.begin(1.0)
    for member in federation.members.values():
        member.make_optimizers()
    if saved is not None:
        federation.load_state_dict(saved)
    federation.begin_fit(resumed=saved is not None)


def play(federation: Federation, loop: Loop, rounds: Iterable[int]) -> None:
    for loop.round_idx in rounds:
        federation.start_round(loop.round_idx)
        federation.play(federation.cohorts.share(loop.round_idx))
        federation.finish_round()


def steppers(federation: Federation) -> list[Any]:
    """What Lightning saves itself: optimizers and schedulers."""
    (member,) = federation.members.values()
    return [member.stepper, *member.templates, *(schedule.scheduler for schedule in member.schedules.schedulers)]


def alone(lit_mlp: Any, data: Any, algorithm: Any) -> tuple[Owner, Federation, Loop]:
    owner = Owner(seeded(lit_mlp, momentum=0.0), algorithm=algorithm)
    return owner, *federate({"": owner}, {"": data}, UniformParticipation(4))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("algorithm", [ls.FedAvg(), MIXED, ls.Scaffold(), ls.LoRA(2)], ids=lambda a: type(a).__name__)
def test_a_plain_loop_gives_the_weights_of_a_trainer(algorithm: Any, lit_mlp: Any, data: Any, fit: Fit) -> None:
    owner, federation, loop = alone(lit_mlp, data, algorithm)
    begin(federation)
    play(federation, loop, range(ROUNDS))
    expected = fit(seeded(lit_mlp, momentum=0.0), data, algorithm=algorithm, max_epochs=ROUNDS)
    assert same_state(owner.module.state_dict(), expected.state)
    assert federation.last_stepped == ROUNDS - 1
    assert [summaries[0].round_idx for summaries in loop.logged] == list(range(ROUNDS))
    other = fit(seeded(lit_mlp, momentum=0.0), data, algorithm=algorithm, max_epochs=ROUNDS - 1)
    assert not same_state(owner.module.state_dict(), other.state)


@pytest.mark.slow
def test_a_plain_loop_trains_several_models_as_a_trainer_does(lit_mlp: Any, toy: Any, quiet: Any) -> None:
    def clients() -> dict[str, ls.FederatedDataModule]:
        return {name: ls.FederatedDataModule(toy, ls.IIDPartitioner(12), batch_size=4, seed=1) for name in ("a", "b")}

    sampler = ls.participation.LossVarianceReduced(active=4, measure="all")
    algorithms = {"a": ls.FedAvg(), "b": MIXED}
    owners = {name: Owner(seeded(lit_mlp), algorithm=algorithms[name]) for name in algorithms}
    federation, loop = federate(owners, clients(), sampler)
    begin(federation)
    play(federation, loop, range(ROUNDS))

    models = {name: ls.FederatedModule(seeded(lit_mlp), algorithm=algorithms[name]) for name in algorithms}
    model = ls.MultiModelModule(models, participation=sampler)
    pl.Trainer(**quiet, max_epochs=ROUNDS).fit(model, ls.MultiModelDataModule(clients()))
    for name, owner in owners.items():
        assert same_state(owner.module.state_dict(), models[name].module.state_dict())


@pytest.mark.sampled(1)
@pytest.mark.parametrize("algorithm", [ls.Scaffold(), ls.StaleUpdates(), MIXED], ids=lambda a: type(a).__name__)
def test_what_is_saved_is_all_that_lasts_between_rounds(algorithm: Any, lit_mlp: Any, data: Any) -> None:
    whole, federation, loop = alone(lit_mlp, data, algorithm)
    begin(federation)
    play(federation, loop, range(2))
    saved, weights, optimizers = copy.deepcopy(
        (federation.state_dict(), whole.state_dict(), [one.state_dict() for one in steppers(federation)])
    )
    play(federation, loop, range(2, 4))

    def gone_on(entries: dict[str, Any]) -> dict[str, Tensor]:
        owner, again, on = alone(lit_mlp, data, algorithm)
        owner.load_state_dict(weights)
        begin(again, entries)
        for one, state in zip(steppers(again), optimizers, strict=True):
            one.load_state_dict(state)
        play(again, on, range(2, 4))
        return owner.module.state_dict()

    assert same_state(whole.module.state_dict(), gone_on(saved))
    if saved["models"][""].pop("stored clients", None):
        assert not same_state(whole.module.state_dict(), gone_on(saved))


def test_a_round_that_ended_early_changes_nothing_and_can_be_repeated(lit_mlp: Any, data: Any) -> None:
    owner, federation, loop = alone(lit_mlp, data, MIXED)
    begin(federation)
    before = copy.deepcopy(owner.module.state_dict())
    loop.stopped_after = 2
    federation.start_round(0)
    federation.play(federation.cohorts.share(0))
    assert len(owner.engine.round.outcomes) == 2
    federation.abandon_round()
    assert same_state(before, owner.module.state_dict())
    loop.stopped_after = None
    play(federation, loop, [0])
    expected, other, plain = alone(lit_mlp, data, MIXED)
    begin(other)
    play(other, plain, [0])
    assert same_state(expected.module.state_dict(), owner.module.state_dict())
    assert not same_state(before, owner.module.state_dict())


def test_a_copy_has_no_part_in_the_fit(lit_mlp: Any, data: Any) -> None:
    owner, federation, _ = alone(lit_mlp, data, ls.FedAvg())
    begin(federation)
    copied = copy.deepcopy(owner)
    assert copied.engine_or_none is None
    assert not copied.templates
    assert copied.shared.members[""] is copied  # and not the original
    assert owner.engine is federation.members[""].engine
    unpickled: Any = pickle.loads(pickle.dumps(ls.FederatedModule(seeded(lit_mlp), clients_per_round=2)))
    assert unpickled.federation.members[""] is unpickled
