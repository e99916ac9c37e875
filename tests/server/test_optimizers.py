"""The recursions of Reddi et al. (2021), Algorithm 2, written out number by number."""

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from federation import Fit, same_state, seeded
from torch import nn

import lightning_spectral as ls

ADAPTIVE: list[Any] = [
    ls.server.FedAdagrad(lr=0.3, momentum=0.5, tau=0.2),
    ls.server.FedAdagrad(lr=0.3, tau=1e-3),
    ls.server.FedAdam(lr=0.2, betas=(0.8, 0.7), tau=0.1),
    ls.server.FedAdam(),
    ls.server.FedYogi(lr=0.2, betas=(0.8, 0.7), tau=0.1),
    ls.server.FedYogi(),
]
BY_WEIGHT: list[Any] = [ls.server.FedAvgM(lr=0.5, momentum=0.6), ADAPTIVE[0], ADAPTIVE[2], ADAPTIVE[4]]
ALL = [ls.server.BoundedMomentum(momentum=0.6), *BY_WEIGHT]

SECOND_MOMENT: dict[type, Callable[[float, float, float], float]] = {
    ls.server.FedAdagrad: lambda v, delta, beta: v + delta**2,
    ls.server.FedYogi: lambda v, delta, beta: v - (1 - beta) * delta**2 * float(np.sign(v - delta**2)),
    ls.server.FedAdam: lambda v, delta, beta: beta * v + (1 - beta) * delta**2,
}


def oracle(choice: Any, start: float, deltas: list[float]) -> float:
    """The final value of one weight after the given mean changes."""
    if isinstance(choice, ls.server.FedAvgM):
        velocity = 0.0
        for delta in deltas:
            velocity = choice.momentum * velocity + delta
            start += choice.lr * velocity
        return start
    beta1, beta2 = (choice.momentum, 0.0) if isinstance(choice, ls.server.FedAdagrad) else choice.betas
    m, v, x = 0.0, choice.tau**2, start
    for delta in deltas:
        m = beta1 * m + (1 - beta1) * delta
        v = SECOND_MOMENT[type(choice)](v, delta, beta2)
        x = x + choice.lr * m / (np.sqrt(v) + choice.tau)
    return x


@pytest.mark.parametrize("choice", [ls.server.FedAvgM(lr=0.5, momentum=0.6), *ADAPTIVE], ids=repr)
def test_steps_are_those_of_the_papers_recursion(choice: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = [(3, 2), (4,), ()]
    parameters = [nn.Parameter(torch.randn(s, generator=generator, dtype=torch.float64)) for s in shapes]
    deltas = [[torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes] for _ in range(6)]
    for parameter in deltas[3]:
        parameter.zero_()  # a round in which nothing changed
    start = nn.utils.parameters_to_vector(parameters).detach()
    optimizer = choice(parameters)
    for change in deltas:
        for parameter, delta in zip(parameters, change, strict=True):
            parameter.grad = -delta
        optimizer.step()
    per_weight = torch.stack([nn.utils.parameters_to_vector(change) for change in deltas]).T.tolist()
    expected = [oracle(choice, x, d) for x, d in zip(start.tolist(), per_weight, strict=True)]
    # six steps of a few operations in float64 each, on numbers of order one
    torch.testing.assert_close(
        nn.utils.parameters_to_vector(parameters).detach(),
        torch.tensor(expected, dtype=torch.float64),
        rtol=1e-13,
        atol=1e-13,
    )


@pytest.mark.parametrize("choice", ALL, ids=repr)
def test_a_weight_without_pseudo_gradient_stays(choice: Any) -> None:
    moved, kept = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    moved.grad = torch.ones(2)
    choice([moved, kept]).step()
    assert torch.equal(kept, torch.ones(2))
    assert not torch.equal(moved, torch.ones(2))


@pytest.mark.parametrize("choice", ALL, ids=repr)
def test_groups_keep_their_own_learning_rate(choice: Any) -> None:
    fast, slow = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
    optimizer = choice([{"params": [fast]}, {"params": [slow], "lr": choice.lr / 2}])
    for parameter in (fast, slow):
        parameter.grad = torch.ones(1)
    optimizer.step()
    assert torch.equal(fast, 2 * slow)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ls.server.FedAvgM(lr=0.0), "`lr` must be positive and finite, got 0.0"),
        (lambda: ls.server.FedAvgM(momentum=1.0), "`momentum` must be in"),
        (lambda: ls.server.BoundedMomentum(momentum=1.0), "`momentum` must be in"),
        (lambda: ls.server.FedAdagrad(tau=0.0), "`tau` must be positive and finite, got 0.0"),
        (lambda: ls.server.FedAdagrad(lr=float("nan")), "`lr` must be positive and finite, got nan"),
        (lambda: ls.server.FedAdam(betas=(-0.1, 0.9)), "`betas` must be in .*, got -0.1"),
        (lambda: ls.server.FedYogi(tau=float("inf")), "`tau` must be positive and finite, got inf"),
        (lambda: ls.server.FedYogi(betas=(0.9,)), "`betas` must be two numbers"),  # type: ignore[arg-type]
    ],
)
def test_settings_out_of_range_are_refused(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


class LitLine(pl.LightningModule):
    """One full batch and one step of learning rate 0.1 per client: the mean change is -0.1 times a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(6, 1)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        return (self.line(x).squeeze(1) - y.float()).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize("choice", BY_WEIGHT, ids=repr)
def test_the_server_steps_on_the_mean_change_of_the_clients(choice: Any, toy: Any, fit: Fit) -> None:
    module = LitLine().double()
    central = copy.deepcopy(module)
    data = ls.FederatedDataModule(toy, ls.IIDPartitioner(num_clients=4), batch_size=1000)
    fit(module, data, max_epochs=3, server_optimizer=choice, trainer={"precision": "64-true"})

    batch = [toy.tensors[0].double(), toy.tensors[1]]
    deltas: list[torch.Tensor] = []
    start = nn.utils.parameters_to_vector(central.parameters()).detach().clone()
    for _ in range(3):
        central.zero_grad()
        central.training_step(batch, 0).backward()
        deltas.append(-0.1 * nn.utils.parameters_to_vector(p.grad for p in central.parameters() if p.grad is not None))
        per_weight = torch.stack(deltas).T.tolist()
        now = [oracle(choice, x, d) for x, d in zip(start.tolist(), per_weight, strict=True)]
        nn.utils.vector_to_parameters(torch.tensor(now, dtype=torch.float64), central.parameters())
    weights = [nn.utils.parameters_to_vector(m.parameters()).detach() for m in (module, central)]
    torch.testing.assert_close(*weights, rtol=1e-12, atol=1e-12)  # float64 all the way


class TestResume:
    @pytest.fixture
    def fit(self, fit: Fit) -> Fit:
        return partial(fit, algorithm=ls.SpectralSharding(keep_ratio={0.3: 0.5, 0.6: 0.5}))

    @pytest.mark.parametrize("choice", ALL, ids=repr)
    def test_resumed_run_equals_the_uninterrupted_one(
        self, choice: Any, lit_mlp: Any, data: Any, fit: Fit, tmp_path: Path
    ) -> None:
        options = {
            "server_optimizer": choice,
            "local_hooks": [ls.client.ProximalTerm(0.1), ls.client.GradientClip(0.5)],
        }
        whole = fit(seeded(lit_mlp), data, max_epochs=4, **options)
        part = fit(seeded(lit_mlp), data, max_epochs=2, **options)
        part.trainer.save_checkpoint(tmp_path / "2.ckpt")
        resumed = fit(seeded(lit_mlp), data, max_epochs=4, ckpt_path=tmp_path / "2.ckpt", **options)
        assert same_state(resumed.state, whole.state)
        assert not same_state(part.state, whole.state)

    @pytest.mark.parametrize(
        ("then", "now", "named"),
        [
            (
                {"server_optimizer": ls.server.FedAdam(lr=0.1)},
                {"server_optimizer": ls.server.FedAdam(lr=0.2)},
                "server_optimizer: 'FedAdam.lr=0.1, .* in the checkpoint, 'FedAdam.lr=0.2",
            ),
            ({}, {"server_optimizer": ls.server.FedAvgM()}, "server_optimizer: 'None' in the checkpoint, 'FedAvgM"),
            (
                {"local_hooks": [ls.client.ProximalTerm(0.1)]},
                {"local_hooks": [ls.client.ProximalTerm(0.2)]},
                "local_hooks: '.ProximalTerm.mu=0.1",
            ),
        ],
    )
    def test_other_settings_are_refused(
        self, then: Any, now: Any, named: str, lit_mlp: Any, data: Any, fit: Fit, tmp_path: Path
    ) -> None:
        fit(seeded(lit_mlp), data, **then).trainer.save_checkpoint(tmp_path / "1.ckpt")
        with pytest.raises(ValueError, match=f"another configuration(.|\n)*{named}"):
            fit(seeded(lit_mlp), data, max_epochs=2, ckpt_path=tmp_path / "1.ckpt", **now)

    def test_functions_are_not_compared(self, lit_mlp: Any, data: Any, fit: Fit, tmp_path: Path) -> None:
        first = fit(seeded(lit_mlp), data, server_optimizer=lambda p: torch.optim.SGD(p, lr=1.0))
        first.trainer.save_checkpoint(tmp_path / "1.ckpt")
        again = lambda p: torch.optim.SGD(p, lr=0.5)  # noqa: E731
        second = fit(seeded(lit_mlp), data, max_epochs=2, ckpt_path=tmp_path / "1.ckpt", server_optimizer=again)
        assert second.trainer.global_step == 2
