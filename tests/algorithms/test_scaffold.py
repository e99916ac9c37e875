"""SCAFFOLD against loops over all clients, and in runs."""

from functools import partial
from typing import Any

import pytest
import torch
from direct_rounds import DirectRounds, assert_close
from federation import Fit, same_state, seeded
from other_process import LitPlain
from torch import Tensor, nn
from toy_models import LitMLP

import lightning_spectral as ls
from lightning_spectral.client.device import ClientSide
from lightning_spectral.protocol.records import Download, Upload, WorkUnit

SHARES = {0: 0.1, 1: 0.2, 2: 0.3, 3: 0.4}
COHORTS = [(1, 3), (0,), (0, 1, 2), (3,), (2, 3), (1,), (0, 1, 2, 3)]
STEPS = {0: 1, 1: 2, 2: 3, 3: 5}
LEARNING_RATE = 0.05
DECAY = 0.01


def examples(client: int) -> tuple[Tensor, Tensor]:
    """Each client's data is a different regression."""
    generator = torch.Generator().manual_seed(client)
    x = torch.randn(8, 3, generator=generator, dtype=torch.float64)
    return x, x @ torch.randn(3, 1, generator=generator, dtype=torch.float64) + client


def line() -> nn.Linear:
    return seeded(nn.Linear, 3, 1).double()


def loss_of(client: int, weight: Tensor, bias: Tensor) -> Tensor:
    x, y = examples(client)
    return (x @ weight.T + bias - y).square().mean()


def train_with(side: ClientSide, download: Download) -> Upload:
    """Local steps as a device takes them, with torch's SGD."""
    client = line()
    side.load(client, download)
    optimizer = torch.optim.SGD(client.parameters(), lr=LEARNING_RATE, weight_decay=DECAY)
    actions = side.start(client, download)
    for _ in range(STEPS[download.unit.client_id]):
        optimizer.zero_grad()
        loss_of(download.unit.client_id, *client.parameters()).backward()
        actions.before_step(optimizer)
        optimizer.step()
    options = (({"lr": LEARNING_RATE},),)
    upload = side.collect(client, Download(download.unit, 1.0, download.tensors, options=options))
    return Upload(upload.unit, upload.tensors, num_steps=STEPS[download.unit.client_id])


@pytest.fixture
def rounds() -> DirectRounds:
    return DirectRounds(ls.Scaffold(), line(), SHARES)


@pytest.fixture
def train(rounds: DirectRounds) -> Any:
    return partial(train_with, rounds.half.device_half)


def test_rounds_are_those_of_the_published_algorithm(rounds: DirectRounds, train: Any) -> None:
    """Algorithm 1 with option II, and shares d in place of 1/N; the server's control is a sum over all clients."""
    x = [p.detach().clone() for p in rounds.server.parameters()]
    controls = {client: [torch.zeros_like(p) for p in x] for client in SHARES}
    for cohort in COHORTS:
        coefficients = {client: SHARES[client] / 0.5 for client in cohort}
        server = [sum(SHARES[i] * controls[i][k] for i in SHARES) for k in range(2)]
        moved = [torch.zeros_like(p) for p in x]
        for client in cohort:
            y = [p.clone() for p in x]
            for _ in range(STEPS[client]):
                y = [p.requires_grad_() for p in y]
                gradients = torch.autograd.grad(loss_of(client, *y), y)
                y = [
                    (p - LEARNING_RATE * (g + DECAY * p - own + c)).detach()
                    for p, g, own, c in zip(y, gradients, controls[client], server, strict=True)
                ]
            controls[client] = [
                own - c + (before - after) / (STEPS[client] * LEARNING_RATE)
                for own, c, before, after in zip(controls[client], server, x, y, strict=True)
            ]
            moved = [m + coefficients[client] * (after - before) for m, after, before in zip(moved, y, x, strict=True)]
        x = [p + m for p, m in zip(x, moved, strict=True)]
        rounds.play(coefficients, train)
        assert_close(rounds.weights(), dict(zip(("weight", "bias"), x, strict=True)), 1e-12)
        sums = [sum(SHARES[i] * controls[i][k] for i in SHARES) for k in range(2)]
        assert_close(rounds.state.pieces(), dict(zip(("weight", "bias"), sums, strict=True)), 1e-12)


@pytest.mark.slow
def test_at_the_optimum_of_all_data_no_client_drifts(rounds: DirectRounds, train: Any) -> None:
    """Federated averaging converges to another point, because clients take different numbers of steps."""
    weight, bias = torch.zeros(1, 3).double().requires_grad_(), torch.zeros(1).double().requires_grad_()
    optimizer = torch.optim.LBFGS([weight, bias], max_iter=500, tolerance_grad=1e-14, tolerance_change=0)

    def closure() -> Tensor:
        optimizer.zero_grad()
        decay = DECAY / 2 * (weight.square().sum() + bias.square().sum())
        loss = sum(SHARES[client] * loss_of(client, weight, bias) for client in SHARES) + decay
        loss.backward()
        return loss

    optimizer.step(closure)
    optimum = {"weight": weight.detach(), "bias": bias.detach()}
    averaging = DirectRounds(ls.FedAvg(), line(), SHARES)
    for _ in range(400):
        rounds.play(SHARES, train)
        averaging.play(SHARES, lambda download: train_without_correction(train, download))
    assert_close(rounds.weights(), optimum, 1e-6)
    assert float((averaging.weights()["bias"] - optimum["bias"]).abs()) > 1e-2


def train_without_correction(train: Any, download: Download) -> Upload:
    zeros = {f"correction:{name}": torch.zeros_like(tensor) for name, tensor in download.tensors.items()}
    return train(Download(download.unit, 1.0, {**download.tensors, **zeros}))


def test_a_client_left_out_keeps_its_control(rounds: DirectRounds, train: Any) -> None:
    rounds.play(SHARES, train)
    ours, theirs = rounds.copy(), rounds.copy()
    ours.play(SHARES, train, left_out=(0, 2))
    theirs.play({client: SHARES[client] for client in (1, 3)}, train)
    assert_close(ours.state.pieces(), theirs.state.pieces(), 1e-14)
    assert list(ours.store) == list(theirs.store)
    for key in ours.store:
        assert same_state(ours.store[WorkUnit(*key)], theirs.store[WorkUnit(*key)])


def test_a_client_that_takes_no_step_or_learns_nothing_keeps_its_control(rounds: DirectRounds, train: Any) -> None:
    def idle(download: Download) -> Upload:
        return Upload(download.unit, train(download).tensors, num_steps=0)

    rounds.play(SHARES, idle)
    assert len(rounds.store) == 0
    assert not bool(rounds.state.values.any())


def test_a_parameter_outside_of_the_loss_gets_the_correction_alone(rounds: DirectRounds) -> None:
    side = rounds.half.device_half
    opened, (unit,) = rounds.open({0: 0.1})
    download, _ = opened.send(unit)
    download.tensors["correction:bias"].fill_(3.0)
    client: Any = line()
    client.weight.requires_grad_(False)  # as a user's hook might do
    side.start(client, download).before_step(torch.optim.SGD(client.parameters(), lr=1.0))
    assert client.bias.grad.tolist() == [3.0]
    assert client.weight.grad is None


class TestInARun:
    @pytest.fixture
    def fit(self, fit: Fit) -> Fit:
        """Fits of SCAFFOLD with five of twelve clients."""
        return partial(fit, algorithm=ls.Scaffold(), clients_per_round=5, local_epochs=2)

    def test_the_first_round_is_that_of_federated_averaging(self, data: Any, fit: Fit) -> None:
        ours, theirs = fit(seeded(LitPlain), data), fit(seeded(LitPlain), data, algorithm=None)
        assert same_state(ours.state, theirs.state)
        two = fit(seeded(LitPlain), data, max_epochs=2)
        assert not same_state(two.state, fit(seeded(LitPlain), data, max_epochs=2, algorithm=None).state)

    def test_controls_are_means_of_gradients(self, data: Any, fit: Fit) -> None:
        fitted = fit(seeded(LitPlain), data, max_epochs=3, local_hooks=[ls.client.GradientClip(1.0)])
        assert 0 < fitted.logged["fl/control_norm"] < 1.0 + 1e-6  # the mean of clipped gradients

    def test_a_download_has_twice_the_bytes_and_an_upload_eight_more(self, data: Any, fit: Fit) -> None:
        ours = fit(seeded(LitPlain), data).ledger.bytes_per_client()[1.0]
        (down, up) = fit(seeded(LitPlain), data, algorithm=None).ledger.bytes_per_client()[1.0]
        assert ours == (2 * down, up + 8)

    def test_the_sizes_of_sub_models_are_known_before_anybody_trains(self, data: Any, fit: Fit) -> None:
        clock = ls.VirtualClock(ls.simulation.DeviceProfile(1e6, 1e6, 1e9))
        assert fit(seeded(LitPlain), data, clock=clock).history.column("fl/virtual_seconds")[0] > 0

    @pytest.mark.parametrize(
        ("optimizer", "message"),
        [
            (partial(torch.optim.Adam, lr=0.1), "SCAFFOLD needs plain SGD, got Adam; use torch.optim.SGD without"),
            (partial(torch.optim.SGD, lr=0.1, momentum=0.9), "needs plain SGD, got momentum=0.9; leave it out"),
            (partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True), "needs plain SGD, got momentum=0.9"),
            (partial(torch.optim.SGD, lr=0.1, maximize=True), "needs plain SGD, got maximize=True"),
        ],
    )
    def test_other_optimizers_are_refused_by_name(self, optimizer: Any, message: str, data: Any, fit: Fit) -> None:
        class Lit(LitMLP):
            def configure_optimizers(self) -> Any:
                return optimizer(self.parameters())

        with pytest.raises(ValueError, match=message):
            fit(seeded(Lit), data)

    @pytest.mark.parametrize(
        ("rates", "message"),
        [
            ((0.1, 0.2), "one learning rate for all parameters, got 0.1, 0.2; give all parameter groups the same"),
            ((0.1, None), r"yours does not step net.2.weight, net.2.bias, .*; give it all of them, or freeze"),
        ],
    )
    def test_groups_that_differ_are_refused(self, rates: Any, message: str, data: Any, fit: Fit) -> None:
        class Lit(LitMLP):
            def configure_optimizers(self) -> Any:
                parts = zip((self.net[0], self.net[1:]), rates, strict=True)
                return torch.optim.SGD([{"params": list(part.parameters()), "lr": lr} for part, lr in parts if lr])

        with pytest.raises(ValueError, match=message):
            fit(seeded(Lit), data)

    def test_a_schedule_that_makes_rates_differ_is_refused_when_it_does(self, data: Any, fit: Fit) -> None:
        class Lit(LitMLP):
            def configure_optimizers(self) -> Any:
                groups = [{"params": list(part.parameters())} for part in (self.net[0], self.net[1:])]
                optimizer = torch.optim.SGD(groups, lr=0.1)
                schedules = [lambda epoch: 1.0, lambda epoch: 0.5**epoch]
                return [optimizer], [torch.optim.lr_scheduler.LambdaLR(optimizer, schedules)]

        with pytest.raises(ls.ClientError, match=r"Round 1, client \d+, collecting: ValueError: .* got 0.05, 0.1"):
            fit(seeded(Lit), data, max_epochs=2)
