"""Algorithms that own something from round to round: what `new_state` returns is saved, stepped and resumed."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from federation import Fit, check_resumes, same_state, seeded
from torch import nn
from toy_models import variant

import lightning_spectral as ls
from lightning_spectral.algorithms.fed_avg import DenseRound, FedAvgHalf, dense_mean
from lightning_spectral.protocol.cohort import Cohort
from lightning_spectral.protocol.exchange import returned_tensors
from lightning_spectral.protocol.records import WorkUnit

BETA = 0.7


class Velocity(nn.Module):
    """One buffer for each parameter of the server."""

    def __init__(self, server: nn.Module) -> None:
        super().__init__()
        for index, parameter in enumerate(server.parameters()):
            self.register_buffer(f"velocity_{index}", torch.zeros_like(parameter))


@dataclass(frozen=True)
class ServerMomentum(ls.FedAvg):
    """``v <- beta v + pseudo-gradient`` in the algorithm, and a plain step of ``v`` at the server."""

    beta: float = BETA

    class round(DenseRound):
        def close(self) -> None:
            super().close()
            algorithm: Any = self.half.algorithm
            for parameter, velocity in zip(self.half.server.parameters(), self.half.state.buffers(), strict=True):
                velocity.mul_(algorithm.beta).add_(parameter.grad)
                parameter.grad = velocity.clone()

    def new_state(self, server: nn.Module, seed: int) -> nn.Module:
        return Velocity(server)


class Master(nn.Module):
    """A parameter for each of the server's, which the server optimizer steps in its place."""

    def __init__(self, server: nn.Module) -> None:
        super().__init__()
        self.weights = nn.ParameterList(p.detach().clone() for p in server.parameters())


class MasterWeights(ls.FedAvg):
    """The server's weights are a copy of those in the state."""

    class round(DenseRound):
        def close(self) -> None:
            super().close()
            for own, master in zip(self.half.server.parameters(), self.half.state.parameters(), strict=True):
                own.grad, master.grad = None, own.grad

    class half(FedAvgHalf):
        def settle(self) -> None:
            with torch.no_grad():
                for own, master in zip(self.server.parameters(), self.state.parameters(), strict=True):
                    own.copy_(master)

    def new_state(self, server: nn.Module, seed: int) -> nn.Module:
        return Master(server)


@pytest.fixture
def fit(fit: Fit) -> Fit:
    return partial(fit, max_epochs=3)


def test_momentum_in_the_state_is_that_of_the_server_optimizer(lit_mlp: Any, data: Any, fit: Fit) -> None:
    plain = fit(seeded(lit_mlp), data)
    expected = fit(seeded(lit_mlp), data, server_optimizer=ls.FedAvgM(lr=1.0, momentum=BETA))
    ours = fit(seeded(lit_mlp), data, algorithm=ServerMomentum())
    assert same_state(ours.state, expected.state)
    assert not same_state(ours.state, plain.state)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("server_optimizer", [None, ls.FedAvgM(lr=1.0, momentum=BETA), ls.FedAdam(lr=0.01)], ids=repr)
def test_parameters_of_the_state_are_stepped_and_settled_into_the_server(
    server_optimizer: Any, lit_mlp: Any, data: Any, fit: Fit
) -> None:
    expected = fit(seeded(lit_mlp), data, server_optimizer=server_optimizer)
    ours = fit(seeded(lit_mlp), data, algorithm=MasterWeights(), server_optimizer=server_optimizer)
    assert same_state(ours.state, expected.state)
    assert all(parameter.grad is None for parameter in ours.model.parameters())  # of the state too


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("algorithm", "names"),
    [
        (ServerMomentum(), [f"state.velocity_{i}" for i in range(6)]),
        (MasterWeights(), [f"state.weights.{i}" for i in range(6)]),
    ],
    ids=["buffers", "parameters"],
)
def test_the_state_is_in_the_checkpoint_and_resumes_bit_for_bit(
    algorithm: Any, names: list[str], lit_mlp: Any, data: Any, fit: Fit, tmp_path: Path
) -> None:
    options = {"algorithm": algorithm, "server_optimizer": ls.FedAvgM(lr=1.0, momentum=0.5)}
    part = check_resumes(fit, lit_mlp, data, tmp_path, **options)
    saved = torch.load(tmp_path / "2.ckpt", weights_only=True)
    state = saved["federation_lasting"]["models"][""]["algorithm"]
    assert [f"state.{name}" for name in state] == names
    assert same_state(
        {**saved["state_dict"], **{f"state.{name}": value for name, value in state.items()}}, part.tensors
    )
    assert all(bool(value.any()) for value in state.values())


def test_every_run_of_one_algorithm_has_its_own_state_drawn_from_its_seed(lit_mlp: Any) -> None:
    algorithm = variant(ls.FedAvg, new_state=lambda self, server, seed: nn.ParameterList([torch.tensor(float(seed))]))()
    one, two = (ls.FederatedModule(lit_mlp(), algorithm=algorithm, clients_per_round=1, seed=s) for s in (3, 5))
    assert [float(model.state.state_dict()["0"]) for model in (one, two)] == [3.0, 5.0]
    assert ls.FederatedModule(lit_mlp(), clients_per_round=1).state is None


@pytest.mark.parametrize("name", ["collect", "keep", "own_model"])
def test_a_method_of_the_wrong_half_is_refused_with_its_class(name: str) -> None:
    with pytest.raises(TypeError, match=f"Misplaced defines {name}, which a device calls: write a ClientSide with it"):
        type("Misplaced", (ls.FedAvg,), {name: lambda self, *_: {}})


def finished(absolute: bool) -> dict[str, torch.Tensor]:
    """Two clients with coefficients 1.5 and 0.5, whose sum is 2: one moves everything by 1, the other by 3."""
    server = nn.BatchNorm1d(2)
    units = (WorkUnit(0, coefficient=1.5), WorkUnit(1, coefficient=0.5))
    before = returned_tensors(server)
    mean = dense_mean(server, before, Cohort(0, 0, {1.0: units}, absolute=absolute))
    for unit, step in zip(units, (1.0, 3.0), strict=True):
        mean.add({name: tensor + step for name, tensor in before.items()}, unit.coefficient)
    return dict(mean.finish())


def test_absolute_coefficients_move_parameters_but_not_buffers_further_than_clients_went():
    changes = finished(absolute=True)

    assert changes["weight"].tolist() == [3.0, 3.0]  # 1.5 * 1 + 0.5 * 3
    assert changes["running_var"].tolist() == [1.5, 1.5]  # half of that


def test_shares_average_both():
    assert {tuple(change.tolist()) for change in finished(absolute=False).values()} == {(1.5, 1.5)}
