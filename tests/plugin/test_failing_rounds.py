"""Rounds that fail at an awkward moment: what is saved, restored and reported."""

import random
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
import torch
from federation import Fit, same_state, seeded
from torch import nn

import lightning_spectral as ls
from lightning_spectral.algorithms.filter import instructions
from lightning_spectral.client.device import watching
from lightning_spectral.protocol.records import Download, Upload, WorkUnit
from lightning_spectral.server.executor import SequentialExecutor
from lightning_spectral.server.processes import Processes
from lightning_spectral.server.round import Engine, OpenRound


def global_states() -> list[Any]:
    return [random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()]


class FailsOnCopies(ls.RoundCallback):
    """Fails in the dense round that `UpdateAlignment` adds."""

    def on_round_end(self, trainer: Any, pl_module: Any, summary: Any) -> None:
        def fail(batch: Any, batch_idx: int) -> Any:
            raise FloatingPointError("in the extra round")

        pl_module.module.training_step = fail


@pytest.mark.parametrize("where", ["a client", "the extra round"])
def test_global_generators_are_restored_when_a_round_fails(where: str, lit_mlp: Any, data: Any, fit: Fit) -> None:
    module, callbacks = seeded(lit_mlp), []
    if where == "a client":
        module.training_step = lambda batch, batch_idx: [][0]
    else:
        callbacks = [FailsOnCopies(), ls.plugin.callbacks.UpdateAlignment(1)]
    before = global_states()
    with pytest.raises(ls.ClientError, match=r"IndexError|in the extra round"):
        fit(module, data, callbacks=callbacks)
    assert global_states() == before


def test_a_failed_fit_leaves_no_round_and_can_be_repeated(lit_mlp: Any, data: Any, fit: Fit) -> None:
    model = ls.FederatedModule(seeded(lit_mlp), clients_per_round=3)
    step, model.module.training_step = model.module.training_step, lambda batch, batch_idx: [][0]
    with pytest.raises(ls.ClientError, match="IndexError"):
        fit(model, data)
    assert model.engine.round_is_open
    with pytest.raises(AssertionError, match="SVDRefresh opens a round"):
        model.engine.round  # noqa: B018
    model.module.training_step = step
    assert same_state(fit(model, data).state, fit(seeded(lit_mlp), data, clients_per_round=3).state)


def test_a_failure_held_back_keeps_its_cause(lit: Any, data: Any) -> None:
    algorithm = ls.FedAvg()
    clients = data.client_directory(algorithm.capacities.of_clients(12, 0))
    executor: Any = None
    half = algorithm.bind(lit)
    engine = Engine(algorithm, half, instructions(half), {}, clients, executor, seed=0, processes=Processes(0, 2))
    opened = OpenRound(engine, executor, 0, [])
    cause = KeyError("the reason")
    with opened.containing_failures(WorkUnit(3)):
        raise ls.ClientError("Round 0, client 3, local training: KeyError: 'the reason'") from cause
    assert opened.failure is not None
    assert opened.failure.__cause__ is cause


def test_a_watch_leaves_no_hook_behind() -> None:
    layer = nn.Linear(2, 1)
    with ExitStack() as blocks:
        unreached = watching({"layer": layer.weight}, blocks)  # no step was taken
    layer(torch.ones(1, 2)).sum().backward()
    assert [*unreached] == ["layer"]


class Silent(SequentialExecutor):
    def run(self, downloads: Iterable[Download]) -> Iterator[Upload]:
        return iter(())


def test_an_executor_that_returns_nothing_is_named(lit: Any, data: Any, fit: Fit) -> None:
    class Federation(ls.FederatedModule):
        def make_executor(self, engine: Engine) -> SequentialExecutor:
            return Silent(super().make_executor(engine).device)  # type: ignore[attr-defined]

    with pytest.raises(
        ls.errors.RoundError, match=r"Round 0: nothing was received from client \d+, client \d+; an executor"
    ):
        fit(Federation(lit, clients_per_round=2), data)
