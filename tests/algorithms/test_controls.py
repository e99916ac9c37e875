"""SCAFFOLD and FedDyn against loops over all clients, and in runs."""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from direct_rounds import DirectRounds, assert_close
from federation import Fit, check_resumes, same_state, seeded
from other_process import LitPlain
from torch import Tensor, nn
from toy_models import LitMLP, variant

import lightning_spectral as ls
from lightning_spectral.client.device import ClientSide
from lightning_spectral.protocol.records import Download, Upload, WorkUnit

SHARES = {0: 0.1, 1: 0.2, 2: 0.3, 3: 0.4}
COHORTS = [(1, 3), (0,), (0, 1, 2), (3,), (2, 3), (1,), (0, 1, 2, 3)]
STEPS = {0: 1, 1: 2, 2: 3, 3: 5}
LEARNING_RATE = 0.05
DECAY = 0.01
OPTIONS = (({"lr": LEARNING_RATE},),)


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
    upload = replace(side.collect(client, download), num_steps=STEPS[download.unit.client_id])
    return replace(upload, client_state=side.keep(client, download, upload))


def rounds_of(algorithm: Any) -> tuple[DirectRounds, Any]:
    rounds = DirectRounds(algorithm, line(), SHARES, options=OPTIONS)
    return rounds, partial(train_with, rounds.half.client_side)


def local_steps(client: int, x: Sequence[Tensor], added: Callable[[int, Tensor], Tensor]) -> list[Tensor]:
    """Plain steps with something added to the gradient of each parameter."""
    y = [p.clone() for p in x]
    for _ in range(STEPS[client]):
        y = [p.requires_grad_() for p in y]
        gradients = torch.autograd.grad(loss_of(client, *y), y)
        moves = [g + DECAY * y[k] + added(k, y[k]) for k, g in enumerate(gradients)]
        y = [(p - LEARNING_RATE * move).detach() for p, move in zip(y, moves, strict=True)]
    return y


def assert_are(rounds: DirectRounds, x: Sequence[Tensor], controls: Mapping[int, Sequence[Tensor]]) -> None:
    """Compare the server's weights, what each device keeps, and the server's sum of that."""
    names = ("weight", "bias")
    assert_close(rounds.weights(), dict(zip(names, x, strict=True)), 1e-12)
    for client, state in rounds.states.items():
        own = {name.removeprefix("control:"): tensor for name, tensor in state.items()}
        assert_close(own, dict(zip(names, controls[client], strict=True)), 1e-12)
    sums = [sum(SHARES[i] * controls[i][k] for i in SHARES) for k in range(2)]
    assert_close(rounds.state.pieces(), dict(zip(names, sums, strict=True)), 1e-12)


def test_rounds_are_those_of_the_published_algorithm() -> None:
    """Algorithm 1 with option II, and shares d in place of 1/N; the server's control is a sum over all clients."""
    rounds, train = rounds_of(ls.Scaffold())
    x = [p.detach().clone() for p in rounds.server.parameters()]
    controls = {client: [torch.zeros_like(p) for p in x] for client in SHARES}
    for cohort in COHORTS:
        coefficients = {client: SHARES[client] / 0.5 for client in cohort}
        server = [sum(SHARES[i] * controls[i][k] for i in SHARES) for k in range(2)]
        moved = [torch.zeros_like(p) for p in x]
        for client in cohort:
            own = controls[client]
            y = local_steps(client, x, lambda k, p: server[k] - own[k])  # noqa: B023
            controls[client] = [
                own - c + (before - after) / (STEPS[client] * LEARNING_RATE)
                for own, c, before, after in zip(controls[client], server, x, y, strict=True)
            ]
            moved = [m + coefficients[client] * (after - before) for m, after, before in zip(moved, y, x, strict=True)]
        x = [p + m for p, m in zip(x, moved, strict=True)]
        rounds.play(coefficients, train)
        assert_are(rounds, x, controls)


def test_rounds_are_those_of_fed_dyn() -> None:
    """Algorithm 1, with shares d in place of 1/m; h_i is minus the dual variable, h their sum over all clients."""
    alpha = 0.3
    rounds, train = rounds_of(ls.FedDyn(alpha=alpha))
    x = [p.detach().clone() for p in rounds.server.parameters()]
    h_of, h = {client: [torch.zeros_like(p) for p in x] for client in SHARES}, [torch.zeros_like(p) for p in x]
    for cohort in COHORTS:
        after = {}
        for client in cohort:
            own = h_of[client]
            y = after[client] = local_steps(client, x, lambda k, p: -own[k] + alpha * (p - x[k]))  # noqa: B023
            h_of[client] = [g - alpha * (new - old) for g, new, old in zip(own, y, x, strict=True)]
        h = [h[k] - alpha * sum(SHARES[i] * (after[i][k] - x[k]) for i in cohort) for k in range(2)]
        size = sum(SHARES[i] for i in cohort)
        x = [sum(SHARES[i] * after[i][k] for i in cohort) / size - h[k] / alpha for k in range(2)]
        rounds.absolute = False
        rounds.play({client: SHARES[client] for client in cohort}, train)
        assert_are(rounds, x, h_of)


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", [ls.Scaffold(), ls.FedDyn(alpha=2.0)], ids=repr)
def test_at_the_optimum_of_all_data_no_client_drifts(algorithm: Any) -> None:
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
    (rounds, train), averaging = rounds_of(algorithm), DirectRounds(ls.FedAvg(), line(), SHARES)
    without = partial(train_with, ls.Scaffold().bind(line()).client_side)
    for _ in range(400):
        rounds.play(SHARES, train)
        averaging.play(SHARES, lambda download: without(uncorrected(download)))
    assert_close(rounds.weights(), optimum, 1e-6)
    assert float((averaging.weights()["bias"] - optimum["bias"]).abs()) > 1e-2


def uncorrected(download: Download) -> Download:
    zeros = {f"control:{name}": torch.zeros_like(tensor) for name, tensor in download.tensors.items()}
    return replace(download, tensors={**download.tensors, **zeros}, client_state={})


def test_a_client_that_takes_no_step_or_learns_nothing_keeps_its_control() -> None:
    rounds, train = rounds_of(ls.Scaffold())
    side = rounds.half.client_side

    def idle(download: Download) -> Upload:
        trained = train(download)
        upload = replace(trained, num_steps=0, tensors={name: download.tensors[name] for name in trained.tensors})
        return replace(upload, client_state=side.keep(line(), download, upload))

    rounds.play(SHARES, idle)
    assert not any(rounds.states.values())
    assert not bool(rounds.state.values.any())
    rounds.play(SHARES, train)
    before, total = dict(rounds.states), rounds.state.values.clone()
    rounds.play(SHARES, idle)
    assert all(same_state(rounds.states[client], before[client]) for client in SHARES)
    assert torch.equal(rounds.state.values, total)


@pytest.mark.parametrize("algorithm", [ls.Scaffold(), ls.FedDyn(alpha=0.3)], ids=repr)
def test_what_a_device_loses_stays_in_the_servers_sum(algorithm: Any) -> None:
    """As the documentation says: the sum is then that of what devices keep, and of what was lost."""
    rounds, train = rounds_of(algorithm)
    rounds.play(SHARES, train)
    lost = rounds.states.pop(2)
    for _ in range(3):
        rounds.play(SHARES, train)
    for name, total in rounds.state.pieces().items():
        kept = sum(SHARES[client] * state[f"control:{name}"] for client, state in rounds.states.items())
        torch.testing.assert_close(total, kept + SHARES[2] * lost[f"control:{name}"])
        assert not torch.allclose(total, kept)


def test_a_parameter_outside_of_the_loss_gets_the_correction_alone() -> None:
    rounds, _ = rounds_of(ls.Scaffold())
    side = rounds.half.client_side
    opened, (unit,) = rounds.open({0: 0.1})
    download = replace(opened.send(unit)[0], client_state={"control:bias": torch.ones(1)})
    download.tensors["control:bias"].fill_(3.0)
    client: Any = line()
    client.weight.requires_grad_(False)  # as a user's hook might do
    side.start(client, download).before_step(torch.optim.SGD(client.parameters(), lr=1.0))
    assert client.bias.grad.tolist() == [2.0]
    assert client.weight.grad is None


def far_at_once(self: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
    """In the third round, some clients end up so far away that their updates cannot be summed."""
    if self.current_epoch == 2 and float(batch[0][0, 0]) > 1.0:
        with torch.no_grad():
            self.net[0].bias.fill_(1e13)


class TestInARun:
    @pytest.fixture
    def fit(self, fit: Fit) -> Fit:
        return partial(fit, algorithm=ls.Scaffold(), clients_per_round=5, local_epochs=2)

    def test_the_first_round_is_that_of_federated_averaging(self, data: Any, fit: Fit) -> None:
        ours, theirs = fit(seeded(LitPlain), data), fit(seeded(LitPlain), data, algorithm=None)
        assert same_state(ours.state, theirs.state)
        two = fit(seeded(LitPlain), data, max_epochs=2)
        assert not same_state(two.state, fit(seeded(LitPlain), data, max_epochs=2, algorithm=None).state)

    @pytest.mark.sampled(1)
    @pytest.mark.parametrize("algorithm", [ls.Scaffold(), ls.FedDyn(), ls.Ditto()], ids=repr)
    def test_a_resumed_run_has_the_same_states_on_devices(
        self, algorithm: Any, data: Any, fit: Fit, tmp_path: Path
    ) -> None:
        check_resumes(fit, LitPlain, data, tmp_path, algorithm=algorithm, seed=3)

    @pytest.mark.sampled(1)
    @pytest.mark.filterwarnings("ignore:Round 2. client .* is left out")
    @pytest.mark.parametrize(
        "filters", [[], [ls.TopK(0.1)], [ls.Int8()], [ls.TopK(0.1), ls.Personal(["*bias"])]], ids=repr
    )
    @pytest.mark.parametrize("algorithm", [ls.Scaffold(), ls.FedDyn()], ids=repr)
    def test_the_servers_control_is_the_sum_of_what_devices_keep(
        self, algorithm: Any, filters: Any, data: Any, fit: Fit
    ) -> None:
        """Also where an update was left out: the device then has what it had, or the sum would be another one."""
        faults = ls.Faults(on_not_finite=ls.LeaveOut(max_share=1.0))
        options = {"algorithm": algorithm, "filters": filters, "faults": faults}
        fitted = fit(seeded(variant(LitPlain, on_train_batch_end=far_at_once)), data, max_epochs=4, seed=3, **options)
        assert 0 < fitted.rows[2]["fl/left_out_not_finite"] < 5
        sizes, states = [len(indices) for indices in data.partition], fitted.model.client_states
        for name, total in fitted.model.state.pieces().items():
            none = torch.zeros_like(total)  # of a parameter that stays with clients
            own = {client: states.kept(WorkUnit(client)).get(f"control:{name}", none).double() for client, _ in states}
            expected = sum(sizes[client] / sum(sizes) * control for client, control in own.items())
            torch.testing.assert_close(total, expected, rtol=1e-5, atol=1e-7)

    @pytest.mark.sampled(1)
    @pytest.mark.parametrize("kind", [ls.Scaffold, ls.FedDyn])
    def test_the_server_shortens_what_it_keeps_of_a_control(self, kind: Any, data: Any, fit: Fit) -> None:
        """By hand, from what devices keep after each round; half of the median is less than most controls have."""
        names, sizes = [*seeded(LitPlain).state_dict()], torch.tensor([len(part) for part in data.partition])
        before, kept = torch.zeros(2, len(sizes), sum(p.numel() for p in seeded(LitPlain).parameters())).double()
        norms, shortened = torch.zeros(2, len(sizes)).double()  # the norms that controls had before
        for num_rounds in (1, 2, 3):
            options = {"algorithm": kind(control_bound=0.5), "max_epochs": num_rounds, "seed": 3}
            fitted = fit(seeded(LitPlain), data, **options)
            own = before.clone()
            for client, _ in fitted.model.client_states:
                state = fitted.model.client_states[WorkUnit(client)]
                own[client] = torch.cat([state[f"control:{name}"].flatten() for name in names])
            trained = (own != before).any(1)
            known = norms[trained & (norms > 0)]
            longest = 0.5 * statistics.median(known.tolist()) if len(known) else math.inf
            control = (kept + own - before)[trained]
            norms[trained] = control.norm(dim=1)
            shortened[trained] = (norms[trained] > longest).double()
            kept[trained] = control * (longest / norms[trained]).clamp(max=1.0)[:, None]
            before, shares = own, sizes.double() / sizes.sum()
            expected = torch.cat([shares @ kept, (shares @ shortened)[None]])
            torch.testing.assert_close(fitted.model.state.values, expected, rtol=1e-5, atol=1e-7)
        assert 0.0 < fitted.logged["fl/controls_shortened"] < 1.0

    def test_a_bound_that_nobody_reaches_changes_no_bit(self, data: Any, fit: Fit) -> None:
        free, bounded = (
            fit(seeded(LitPlain), data, max_epochs=3, seed=3, algorithm=ls.Scaffold(control_bound=bound))
            for bound in (None, 1e6)
        )
        assert torch.equal(free.weights, bounded.weights)
        assert (bounded.logged["fl/controls_shortened"], "fl/store_bytes" in free.logged) == (0.0, False)

    def test_controls_are_means_of_gradients(self, data: Any, fit: Fit) -> None:
        fitted = fit(seeded(LitPlain), data, max_epochs=3, local_hooks=[ls.GradientClip(1.0)])
        assert 0 < fitted.logged["fl/control_norm"] < 1.0 + 1e-6  # the mean of clipped gradients

    def test_a_download_has_twice_the_bytes_and_an_upload_as_many(self, data: Any, fit: Fit) -> None:
        ours = fit(seeded(LitPlain), data).ledger.bytes_per_client()[1.0]
        (down, up) = fit(seeded(LitPlain), data, algorithm=None).ledger.bytes_per_client()[1.0]
        assert ours == (2 * down, up)

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
        lit = seeded(variant(LitMLP, configure_optimizers=lambda self: optimizer(self.parameters())))
        with pytest.raises(ValueError, match=message):
            fit(lit, data)

    @pytest.mark.parametrize(
        ("rates", "message"),
        [
            ((0.1, 0.2), "one learning rate for all parameters, got 0.1, 0.2; give all parameter groups the same"),
            ((0.1, None), r"yours does not step net.2.weight, net.2.bias, .*; give it all of them, or freeze"),
        ],
    )
    def test_groups_that_differ_are_refused(self, rates: Any, message: str, data: Any, fit: Fit) -> None:
        def two_groups(self: Any) -> Any:
            parts = zip((self.net[0], self.net[1:]), rates, strict=True)
            return torch.optim.SGD([{"params": list(part.parameters()), "lr": lr} for part, lr in parts if lr])

        with pytest.raises(ValueError, match=message):
            fit(seeded(variant(LitMLP, configure_optimizers=two_groups)), data)

    def test_a_schedule_that_makes_rates_differ_is_refused_when_it_does(self, data: Any, fit: Fit) -> None:
        def two_schedules(self: Any) -> Any:
            groups = [{"params": list(part.parameters())} for part in (self.net[0], self.net[1:])]
            optimizer = torch.optim.SGD(groups, lr=0.1)
            schedules = [lambda epoch: 1.0, lambda epoch: 0.5**epoch]
            return [optimizer], [torch.optim.lr_scheduler.LambdaLR(optimizer, schedules)]

        with pytest.raises(
            ValueError, match=r"SCAFFOLD needs one learning rate for all parameters, got 0\.05, 0\.1; give"
        ):
            fit(seeded(variant(LitMLP, configure_optimizers=two_schedules)), data, max_epochs=2)
