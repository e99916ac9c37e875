"""Server optimizers take the steps of their papers and, where they coincide, of torch; what turned momentum does."""

import copy
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from federation import Fit, check_resumes, same_state, seeded
from torch import Tensor, nn
from toy_models import LitMLP, LitNet, squared_error

import lightning_spectral as ls

ADAPTIVE: list[Any] = [
    ls.FedAdagrad(lr=0.3, momentum=0.5, tau=0.2),
    ls.FedAdagrad(lr=0.3, tau=1e-3),
    ls.FedAdam(lr=0.2, betas=(0.8, 0.7), tau=0.1),
    ls.FedAdam(),
    ls.FedYogi(lr=0.2, betas=(0.8, 0.7), tau=0.1),
    ls.FedYogi(),
]
BY_WEIGHT: list[Any] = [ls.FedAvgM(lr=0.5, momentum=0.6), ADAPTIVE[0], ADAPTIVE[2], ADAPTIVE[4]]
ALL = [ls.BoundedMomentum(momentum=0.6), *BY_WEIGHT]

SECOND_MOMENT: dict[type, Callable[[float, float, float], float]] = {
    ls.FedAdagrad: lambda v, delta, beta: v + delta**2,
    ls.FedYogi: lambda v, delta, beta: v - (1 - beta) * delta**2 * float(np.sign(v - delta**2)),
    ls.FedAdam: lambda v, delta, beta: beta * v + (1 - beta) * delta**2,
}


def oracle(choice: Any, start: float, deltas: list[float]) -> float:
    """The final value of one weight after the given mean changes."""
    if isinstance(choice, ls.FedAvgM):
        velocity = 0.0
        for delta in deltas:
            velocity = choice.momentum * velocity + delta
            start += choice.lr * velocity
        return start
    beta1, beta2 = (choice.momentum, 0.0) if isinstance(choice, ls.FedAdagrad) else choice.betas
    m, v, x = 0.0, choice.tau**2, start
    for delta in deltas:
        m = beta1 * m + (1 - beta1) * delta
        v = SECOND_MOMENT[type(choice)](v, delta, beta2)
        x = x + choice.lr * m / (np.sqrt(v) + choice.tau)
    return x


def steps(choice: Any, changes: Any, sizes: Any = ((3, 2), (4,))) -> list[Any]:
    """The weights of some parameters, of two by default, after each round, float64."""
    parameters = [nn.Parameter(torch.zeros(size, dtype=torch.float64)) for size in sizes]
    optimizer, seen = choice(parameters), []
    for change in changes:
        for parameter, delta in zip(parameters, change, strict=True):
            parameter.grad = -delta
        optimizer.step()
        seen.append(nn.utils.parameters_to_vector(parameters).detach().clone())
    return seen


@pytest.mark.parametrize("choice", [ls.FedAvgM(lr=0.5, momentum=0.6), *ADAPTIVE], ids=repr)
def test_steps_are_those_of_the_papers_recursion(choice: Any) -> None:
    generator, sizes = torch.Generator().manual_seed(0), [(3, 2), (4,), ()]
    changes = [[torch.randn(s, generator=generator, dtype=torch.float64) for s in sizes] for _ in range(6)]
    for delta in changes[3]:
        delta.zero_()  # a round in which nothing changed
    per_weight = torch.stack([nn.utils.parameters_to_vector(change) for change in changes]).T.tolist()
    expected = torch.tensor([oracle(choice, 0.0, deltas) for deltas in per_weight], dtype=torch.float64)
    # six steps of a few operations in float64 each, on numbers of order one
    torch.testing.assert_close(steps(choice, changes, sizes)[-1], expected, rtol=1e-13, atol=1e-13)


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


@pytest.mark.parametrize("choice", BY_WEIGHT, ids=repr)
def test_the_server_steps_on_the_mean_change_of_the_clients(choice: Any, toy: Any, fit: Fit) -> None:
    """One full batch and one step of learning rate 0.1 per client: the mean change is -0.1 times a gradient."""
    module = LitNet(nn.Linear(6, 1), loss=squared_error).double()
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
        now = [oracle(choice, x, d) for x, d in zip(start.tolist(), torch.stack(deltas).T.tolist(), strict=True)]
        nn.utils.vector_to_parameters(torch.tensor(now, dtype=torch.float64), central.parameters())
    weights = [nn.utils.parameters_to_vector(m.parameters()).detach() for m in (module, central)]
    torch.testing.assert_close(*weights, rtol=1e-12, atol=1e-12)  # float64 all the way


class TestResume:
    @pytest.fixture
    def fit(self, fit: Fit) -> Fit:
        return partial(fit, algorithm=ls.SpectralSharding(keep_ratio={0.3: 0.5, 0.6: 0.5}))

    @pytest.mark.sampled(1)
    @pytest.mark.parametrize("choice", ALL, ids=repr)
    def test_resumed_run_equals_the_uninterrupted_one(
        self, choice: Any, lit_mlp: Any, data: Any, fit: Fit, tmp_path: Path
    ) -> None:
        hooks = [ls.ProximalTerm(0.1), ls.GradientClip(0.5)]
        check_resumes(fit, lit_mlp, data, tmp_path, server_optimizer=choice, local_hooks=hooks)

    @pytest.mark.parametrize(
        ("option", "then", "now", "named"),
        [
            ("server_optimizer", ls.FedAdam(lr=0.1), ls.FedAdam(lr=0.2), "'FedAdam.lr=0.1, .* 'FedAdam.lr=0.2"),
            ("server_optimizer", None, ls.FedAvgM(), "'None' in the checkpoint, 'FedAvgM"),
            ("local_hooks", [ls.ProximalTerm(0.1)], [ls.ProximalTerm(0.2)], "'.ProximalTerm.mu=0.1"),
        ],
    )
    def test_other_settings_are_refused(
        self, option: str, then: Any, now: Any, named: str, lit_mlp: Any, data: Any, fit: Fit, tmp_path: Path
    ) -> None:
        fit(seeded(lit_mlp), data, **{option: then}).trainer.save_checkpoint(tmp_path / "1.ckpt")
        with pytest.raises(ValueError, match=f"another configuration(.|\n)*{option}: {named}"):
            fit(seeded(lit_mlp), data, max_epochs=2, ckpt_path=tmp_path / "1.ckpt", **{option: now})

    def test_functions_are_not_compared(self, lit_mlp: Any, data: Any, fit: Fit, tmp_path: Path) -> None:
        first = fit(seeded(lit_mlp), data, server_optimizer=lambda p: torch.optim.SGD(p, lr=1.0))
        first.trainer.save_checkpoint(tmp_path / "1.ckpt")
        again = lambda p: torch.optim.SGD(p, lr=0.5)  # noqa: E731
        second = fit(seeded(lit_mlp), data, max_epochs=2, ckpt_path=tmp_path / "1.ckpt", server_optimizer=again)
        assert second.trainer.global_step == 2


BETA = 0.8
BOUNDED, AVERAGING = ls.BoundedMomentum(momentum=BETA), ls.FedAvgM(momentum=0.0)


def changes_of(drift: float) -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(0)
    noisy = lambda *shape: drift + torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    return [[noisy(3, 2), noisy(4)] for _ in range(8)]


def test_steps_are_those_of_its_definition() -> None:
    """Number by number, with norms and cosines over all parameters; cosines of both signs happen."""
    changes, beta = changes_of(1.0), 0.6
    changes[-2:] = [[-delta for delta in change] for change in changes[-2:]]
    x, v, shares, cosines = np.zeros(10), np.zeros(10), [], [0.0]
    norm = lambda vector: float(np.sqrt((vector**2).sum()))  # noqa: E731
    for change, seen in zip(changes, steps(ls.BoundedMomentum(lr=0.7, momentum=beta), changes), strict=True):
        delta = nn.utils.parameters_to_vector(change).numpy()
        if shares:
            cosines.append(float((delta * v).sum()) / (norm(delta) * norm(v)))
        v = beta * v + delta
        direction = delta + beta * v if shares else delta
        shares.append((1 + min(0.0, cosines[-1])) * norm(delta) / norm(direction))
        x = x + 0.7 * shares[-1] * direction
        np.testing.assert_allclose(seen.numpy(), x, rtol=1e-13, atol=1e-13)
    assert shares[0] == 1.0
    assert min(cosines) < -0.1
    assert max(cosines) > 0.1


def test_no_step_is_longer_than_the_mean_change() -> None:
    """FedAvgM's are, so the test can fail."""

    def stretched(choice: Any) -> float:
        changes = changes_of(3.0)
        seen = [torch.zeros(10).double(), *steps(choice, changes)]
        lengths = [float((b - a).norm()) for a, b in pairwise(seen)]
        return max(
            length / float(nn.utils.parameters_to_vector(change).norm())
            for length, change in zip(lengths, changes, strict=True)
        )

    assert stretched(ls.BoundedMomentum(momentum=0.8)) <= 1 + 1e-12
    assert stretched(ls.FedAvgM(momentum=0.8)) > 3


def test_without_momentum_and_in_the_first_round_it_is_plain_averaging() -> None:
    changes = [[delta.float().double() for delta in change] for change in changes_of(0.0)]
    plain = steps(ls.FedAvgM(momentum=0.0), changes)
    for choice in (ls.BoundedMomentum(momentum=0.0), ls.BoundedMomentum(momentum=0.8)):
        assert torch.equal(steps(choice, changes)[0], plain[0])
    assert torch.equal(torch.stack(steps(ls.BoundedMomentum(momentum=0.0), changes)), torch.stack(plain))


def test_a_round_without_changes_changes_nothing() -> None:
    changes = [*changes_of(0.0)[:2], [torch.zeros(3, 2).double(), torch.zeros(4).double()]]
    *_, before, after = steps(ls.BoundedMomentum(momentum=0.8), changes)
    assert torch.equal(after, before)
    *_, before, after = steps(ls.FedAvgM(momentum=0.8), changes)
    assert not torch.equal(after, before)


def test_nan_is_not_hidden() -> None:
    changes = changes_of(0.0)[:2]
    changes[1][0][0, 0] = float("nan")
    assert steps(ls.BoundedMomentum(momentum=0.8), changes)[-1].isnan().any()


def test_after_the_first_round_the_direction_is_always_shortened() -> None:
    """Its factor is at most 1 / (1 + beta), so the length needs no other bound; orthogonal changes reach it."""
    generator, largest = torch.Generator().manual_seed(0), 0.0
    for _ in range(1_000):
        past, change = (torch.randn(2, generator=generator).double() for _ in range(2))
        past *= 10.0 ** float(torch.randint(-6, 3, (), generator=generator))
        first, second = steps(ls.BoundedMomentum(momentum=BETA), [[past], [change]], sizes=[(2,)])
        largest = max(largest, float((second - first).norm() / (change + BETA * (BETA * past + change)).norm()))
    assert 0.99 / (1 + BETA) < largest < (1 + 1e-9) / (1 + BETA)


def squared_distance(choice: Any, change_of: Any, size: int, num_rounds: int = 6_000) -> tuple[Tensor, Tensor]:
    """Where the server's weights are in the last rounds, of an optimum at 0: mean squared distance, and mean."""
    generator, weight = torch.Generator().manual_seed(1), nn.Parameter(torch.zeros(size, dtype=torch.float64))
    optimizer, seen = choice([weight]), []
    for i in range(num_rounds):
        weight.grad = -change_of(weight.detach(), generator)
        optimizer.step()
        if i >= num_rounds // 6:
            seen.append(weight.detach().clone())
    return torch.stack(seen).square().sum(1).mean(), torch.stack(seen).mean(0)


@pytest.mark.slow
def test_around_an_optimum_it_is_noisier_than_averaging() -> None:
    """A tenth of the way to the optimum in each round, plus noise: 1.9 times the squared distance (1.8 to 2.0 here)."""

    def change_of(weight: Tensor, generator: torch.Generator) -> Tensor:
        return -0.1 * weight + torch.randn(len(weight), generator=generator, dtype=torch.float64)

    averaged, bounded = (squared_distance(choice, change_of, size=10)[0] for choice in (AVERAGING, BOUNDED))
    # Averaging has the closed form D / (1 - 0.9^2). 5,000 rounds of 10 entries, correlated over about 10: 2 % of noise.
    assert abs(averaged / (10 / (1 - 0.9**2)) - 1) < 0.1
    assert 1.6 < bounded / averaged < 2.2


@pytest.mark.slow
def test_with_few_and_unequal_clients_it_ends_beside_the_optimum() -> None:
    """One client in twenty, one a round, wants to go far, the others a little the other way: together, nowhere.

    Its long changes make long steps, of which most go where the rounds before went: a quarter of the spread, beside it.
    """

    def change_of(weight: Tensor, generator: torch.Generator) -> Tensor:
        is_far = float(torch.rand((), generator=generator, dtype=torch.float64) < 0.05)
        return 0.1 * (is_far - 0.05 - weight)

    (spread, averaged), (_, bounded) = (
        squared_distance(choice, change_of, size=1, num_rounds=12_000) for choice in (AVERAGING, BOUNDED)
    )
    deviation = float(spread * 20 / 10_000) ** 0.5  # of the mean over 10,000 rounds, correlated over 20
    assert abs(float(averaged)) < 3 * deviation
    assert float(bounded) < -4 * deviation


def test_a_small_layer_beside_a_large_noisy_one_moves_further_than_its_own_change() -> None:
    """Steady changes add up to 1 / (1 - beta) of one, and the common length divides by what the noise adds up to."""
    generator = torch.Generator().manual_seed(2)
    changes = [[torch.randn(1_000, generator=generator).double(), torch.full((1,), 1e-3).double()] for _ in range(60)]
    seen = torch.stack(steps(BOUNDED, changes, sizes=[(1_000,), (1,)]))[:, -1]
    stretch = float((seen[-1] - seen[-21]) / 20) / 1e-3
    expected = 1 / (1 - BETA) / ((1 + BETA) ** 2 + BETA**4 / (1 - BETA**2)) ** 0.5
    assert expected > 2.3
    assert abs(stretch / expected - 1) < 0.1  # cosines of 1,000 entries are of size 0.03


@pytest.mark.sampled(1)
@pytest.mark.parametrize("algorithm", [ls.FedAvg(), ls.SpectralSharding(keep_ratio=0.3)], ids=repr)
def test_no_algorithm_has_a_step_of_its_own(algorithm: Any, data: Any, fit: Fit) -> None:
    def after(**options: Any) -> Any:
        return fit(seeded(LitMLP), data, algorithm=algorithm, max_epochs=2, **options).state

    assert same_state(after(), after(server_optimizer=AVERAGING))
    assert not same_state(after(), after(server_optimizer=BOUNDED))
