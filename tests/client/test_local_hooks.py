import copy
import math
from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from federation import Fit, same_state, seeded
from torch import nn
from toy_models import variant

import lightning_spectral as ls


def random_net() -> nn.Module:
    """A sharded and a dense layer, float64."""
    sharded = ls.SpectralShardedLinear(4, 5, num_terms=2)
    sharded.load_terms(torch.randn(5, 2), torch.randn(2, 4), torch.tensor([1.0, 6.0]))
    return nn.Sequential(sharded, nn.Tanh(), nn.Linear(5, 1)).double()


def loss_of(net: nn.Module) -> torch.Tensor:
    return net(torch.linspace(-1.0, 1.0, 12, dtype=torch.float64).view(3, 4)).square().sum()


@pytest.mark.parametrize("maximize", [False, True])
def test_the_proximal_term_is_the_gradient_of_half_mu_times_the_squared_distance(maximize: bool) -> None:
    net = seeded(random_net)
    written_out, start = copy.deepcopy(net), copy.deepcopy(net)
    sign = -1.0 if maximize else 1.0
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9, maximize=maximize)
    expected = torch.optim.SGD(written_out.parameters(), lr=0.01, momentum=0.9, maximize=maximize)
    before_step = ls.ProximalTerm(mu=0.7).start_client(net, optimizer)
    for _ in range(4):
        optimizer.zero_grad()
        loss_of(net).backward()
        before_step()
        optimizer.step()

        expected.zero_grad()
        pairs = zip(written_out.parameters(), start.parameters(), strict=True)
        distance = sum((p - p0.detach()).square().sum() for p, p0 in pairs)
        (loss_of(written_out) + sign * 0.35 * distance).backward()
        expected.step()
    for ours, theirs in zip(net.parameters(), written_out.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)  # sums in another order, float64


def test_the_proximal_term_leaves_what_has_no_gradient_alone() -> None:
    net = nn.Linear(2, 1)
    before_step = ls.ProximalTerm(mu=1.0).start_client(net, torch.optim.SGD(net.parameters(), lr=1.0))
    net.weight.grad = torch.zeros_like(net.weight)
    with torch.no_grad():
        net.bias.add_(1.0)
    before_step()
    assert net.bias.grad is None


@pytest.mark.parametrize("max_norm", [0.5, 1e6])
def test_clipping_bounds_the_joint_norm_and_keeps_the_direction(max_norm: float) -> None:
    net = seeded(random_net)
    loss_of(net).backward()
    before = torch.cat([p.grad.flatten() for p in net.parameters() if p.grad is not None])
    ls.GradientClip(max_norm).start_client(net, torch.optim.SGD(net.parameters(), lr=1.0))()
    after = torch.cat([p.grad.flatten() for p in net.parameters() if p.grad is not None])
    norm = before.square().sum().sqrt()
    # torch divides by the norm plus 1e-6
    torch.testing.assert_close(after, before * min(1.0, max_norm / (float(norm) + 1e-6)), rtol=1e-12, atol=0.0)


ALGORITHMS: list[Any] = [ls.FedAvg(), ls.SpectralSharding(ls.Unbiased(), keep_ratio={0.3: 0.5, 0.6: 0.5}, clip_tau=2.0)]


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=["dense", "spectral"])
class TestInRounds:
    @pytest.fixture
    def fit(self, fit: Fit, algorithm: Any) -> Fit:
        """Fits of three rounds."""
        return partial(fit, algorithm=algorithm, max_epochs=3)

    @pytest.mark.sampled(1)
    def test_fedprox_is_the_penalty_in_every_clients_loss(
        self, algorithm: Any, lit_mlp: Any, data: Any, fit: Fit
    ) -> None:
        start: list[torch.Tensor] = []

        def on_train_epoch_start(self: Any) -> None:
            start[:] = [p.detach().clone() for p in self.parameters()]  # one local epoch: what was sent

        def training_step(self: Any, batch: Any, batch_idx: int) -> Any:
            distance = sum((p - s).square().sum() for p, s in zip(self.parameters(), start, strict=True))
            return lit_mlp.training_step(self, batch, batch_idx) + 0.5 * distance

        ours = fit(seeded(lit_mlp), data, local_hooks=[ls.ProximalTerm(mu=1.0)]).weights
        penalised = variant(lit_mlp, on_train_epoch_start=on_train_epoch_start, training_step=training_step)
        # float32, three rounds of three steps on weights of order one
        torch.testing.assert_close(ours, fit(seeded(penalised), data).weights, rtol=1e-5, atol=1e-6)
        assert not torch.allclose(ours, fit(seeded(lit_mlp), data).weights, rtol=1e-2)

    @pytest.mark.sampled(1)
    def test_clipping_is_that_of_the_users_own_hook(self, algorithm: Any, lit_mlp: Any, data: Any, fit: Fit) -> None:
        def clip(self: Any, optimizer: Any) -> None:
            own = [p for group in optimizer.param_groups for p in group["params"]]  # in the order of the sum
            nn.utils.clip_grad_norm_(own, 0.1)

        ours = fit(seeded(lit_mlp), data, local_hooks=[ls.GradientClip(0.1)]).state
        assert same_state(ours, fit(seeded(variant(lit_mlp, on_before_optimizer_step=clip)), data).state)
        assert not same_state(ours, fit(seeded(lit_mlp), data).state)

    def test_hooks_act_in_the_order_given(self, algorithm: Any, lit_mlp: Any, data: Any, fit: Fit) -> None:
        hooks = [ls.ProximalTerm(mu=5.0), ls.GradientClip(0.1)]
        one = fit(seeded(lit_mlp), data, local_hooks=hooks)
        assert not same_state(one.state, fit(seeded(lit_mlp), data, local_hooks=hooks[::-1]).state)


def test_the_trainers_own_clipping_points_to_ours(lit: Any, data: Any, quiet: Any) -> None:
    trainer = pl.Trainer(max_epochs=1, gradient_clip_val=0.5, **quiet)
    with pytest.raises(ValueError, match=r"local_hooks=\[GradientClip\(0\.5\)\]"):
        trainer.fit(ls.FederatedModule(lit, clients_per_round=2), data)
    (scores,) = trainer.validate(ls.FederatedModule(lit, clients_per_round=2), data, verbose=False)
    assert math.isfinite(scores["val_loss"])  # validation clips nothing


@pytest.mark.parametrize("hooks", [ls.GradientClip(1.0), [ls.GradientClip], ["clip"]])
def test_anything_but_a_list_of_hooks_is_refused(hooks: Any, lit: Any) -> None:
    with pytest.raises(TypeError, match=r"`local_hooks` must be (an instance of|a list, got one entry)"):
        ls.FederatedModule(lit, clients_per_round=2, local_hooks=hooks)
