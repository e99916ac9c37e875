"""Local steps that draw their width, as in FjORD: against slow slices, plain sub-models, and wrong input."""

from typing import Any

import pytest
import torch
from federation import Fit, same_state, seeded
from one_client import client_of
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from toy_models import LitSmall

import lightning_spectral as ls
from lightning_spectral.algorithms.width import NARROW_STEPS
from lightning_spectral.nn.width.plan import cut_module
from lightning_spectral.protocol.records import Download, WorkUnit

MIXED, WIDTHS = {0.25: 0.5, 0.75: 0.5}, (0.25, 0.5, 0.75)


class LitShapes(LitSmall):
    """A convolution, norms of two kinds, attention, and a flattened layer, whose sizes all change with the width."""

    example_input_array = torch.zeros(2, 6)

    def __init__(self) -> None:
        super().__init__()
        del self.net
        self.num_features = [16, 96]  # belongs to the user's module, not to a layer
        self.conv, self.norm = nn.Conv1d(1, 16, 3, padding=1), nn.GroupNorm(8, 16)
        self.attention, self.depthwise = nn.MultiheadAttention(16, 2, batch_first=True), nn.Conv1d(16, 16, 1, groups=16)
        self.batch_norm, self.head = nn.BatchNorm1d(16), nn.Linear(16 * 6, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(self.conv(x[:, None])).relu().transpose(1, 2)
        hidden = hidden + self.attention(hidden, hidden, hidden)[0]
        return self.head(self.batch_norm(self.depthwise(hidden.transpose(1, 2))).flatten(1))


def narrowing(lit: Any, capacity: float, widths: Any = (*WIDTHS, 1.0)) -> tuple[Any, Any, ls.nn.WidthPlan]:
    half: Any = ls.WidthSharding(keep_ratio=capacity, step_widths=widths).bind(lit)
    return half.client_side, client_of(half.client_side, lit, capacity), half.plan


def narrow_copy(lit: Any, plan: ls.nn.WidthPlan, keep_ratio: float) -> Any:
    """The whole module, cut to a width."""
    copy = type(lit)()
    copy.load_state_dict(lit.state_dict())
    cut_module(copy, plan.indices(plan.first(keep_ratio)))
    return copy


@pytest.mark.parametrize("module", [LitSmall, LitShapes])
@pytest.mark.parametrize("capacity", [0.75, 1.0])
@pytest.mark.parametrize("width", [0.25, 0.5])
def test_a_step_is_that_of_the_narrower_model(module: Any, width: float, capacity: float) -> None:
    """Against a cut copy: the same outputs and gradients, zero elsewhere; the step changes nothing of the client."""
    lit: Any = seeded(module)
    _, client, plan = narrowing(lit, capacity)
    state = {name: tensor.clone() for name, tensor in lit.state_dict().items()}
    client.load_state_dict(narrow_copy(lit, plan, capacity).state_dict())
    small, alone = narrow_copy(lit, plan, width), narrow_copy(lit, plan, capacity)
    x = torch.randn(5, 6, generator=torch.Generator().manual_seed(0))
    layout = str(client)

    steps = vars(client)[NARROW_STEPS]
    steps.use(width)
    assert str(client) == str(small)  # layers know their sizes
    assert {n: t.shape for n, t in client.state_dict().items()} == {n: t.shape for n, t in small.state_dict().items()}
    out = client(x)
    steps.restore()
    out.square().sum().backward()
    expected = small(x)
    expected.square().sum().backward()
    assert torch.equal(out, expected)
    assert str(client) == layout == str(alone)
    own, left = plan.positions(plan.first(capacity)), plan.positions(plan.first(width))
    for name, parameter in client.named_parameters():
        whole = torch.zeros(state[name].shape)
        if small.get_parameter(name).grad is None:
            assert parameter.grad is None
            continue
        whole.view(-1)[left.get(name, torch.arange(whole.numel()))] = small.get_parameter(name).grad.reshape(
            left[name].shape if name in left else (-1,)
        )
        assert torch.equal(parameter.grad, whole.view(-1)[own[name]] if name in own else whole)
    before = alone.state_dict()
    assert all(torch.equal(tensor, before[name]) for name, tensor in client.state_dict().items())


def test_widths_are_drawn_evenly_up_to_the_clients_own() -> None:
    side, client, _ = narrowing(seeded(LitSmall), 0.75)
    sizes = []
    for client_id in range(10):
        actions = side.start(client, Download(WorkUnit(client_id, coefficient=1.0), 0.75, {}, round_idx=3, seed=5))
        for _ in range(60):
            actions.before_forward()
            sizes.append(client.net[0].out_features)
            actions.after_forward()
            assert client.net[0].out_features == 9
    counts = torch.tensor(sizes).bincount(minlength=13)
    assert counts.nonzero().squeeze(1).tolist() == [3, 6, 9]
    assert bool(((counts[[3, 6, 9]] - len(sizes) / 3).abs() <= 5 * (len(sizes) * 1 / 3 * 2 / 3) ** 0.5).all())
    assert sizes[:60] != sizes[60:120]
    again = side.start(client, Download(WorkUnit(0, coefficient=1.0), 0.75, {}, round_idx=3, seed=5))
    repeated = []
    for _ in range(60):
        again.before_forward()
        repeated.append(client.net[0].out_features)
    assert repeated == sizes[:60]


class LitCheckpointed(LitSmall):
    """Recomputes the activations of some layers in the backward pass."""

    reentrant = True

    def forward(self, x: Tensor) -> Tensor:
        x = self.net[0](x)
        if self.training:
            return checkpoint(self.net[1:], x, use_reentrant=self.reentrant)
        return self.net[1:](x)


class LitCurious(LitSmall):
    """Runs its layers and their backward pass in several of Lightning's hooks."""

    def look(self, *, again: bool = False) -> None:
        self.eval()
        hidden = self.net[0](torch.ones(2, 6))
        out = checkpoint(self.net[1:], hidden, use_reentrant=False) if again else self.net[1:](hidden)
        torch.autograd.grad(out.sum(), self.net[0].weight)
        self.train()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.look(again=True)

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.look()

    def on_before_backward(self, loss: Tensor) -> None:
        self.look()

    def on_after_backward(self) -> None:
        self.look()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.look(again=True)


@pytest.mark.parametrize("reentrant", [True, False])
def test_layers_that_run_again_in_the_backward_pass_are_refused(reentrant: bool, data: Any, fit: Fit) -> None:
    lit = seeded(LitCheckpointed)
    lit.reentrant = reentrant
    algorithm = ls.WidthSharding(keep_ratio=0.75, step_widths=WIDTHS)
    with pytest.raises(ls.ClientError, match=r"local training: RuntimeError: A \w+ runs again in the backward pass"):
        fit(lit, data, algorithm=algorithm)


def test_a_client_without_narrow_steps_may_compute_activations_again(data: Any, fit: Fit) -> None:
    assert fit(seeded(LitCheckpointed), data, algorithm=ls.WidthSharding(keep_ratio=0.5, step_widths=[0.5, 0.75])).rows


def test_the_users_own_passes_are_not_refused(data: Any, fit: Fit) -> None:
    algorithm = ls.WidthSharding(keep_ratio=0.75, step_widths=WIDTHS)
    fitted = fit(seeded(LitCurious), data, algorithm=algorithm)
    assert same_state(fitted.state, fit(seeded(LitSmall), data, algorithm=algorithm).state)


def test_only_the_first_narrow_step_of_a_client_is_watched_and_no_hook_is_left() -> None:
    side, client, _ = narrowing(seeded(LitSmall), 0.75)
    hooks = []
    for _ in range(2):
        actions = side.start(client, Download(WorkUnit(0, coefficient=1.0), 0.75, {}))
        for _ in range(30):
            actions.before_forward()
            is_narrow = client.net[0].out_features < 9
            actions.after_forward()
            hooks.append((is_narrow, sum(len(part._forward_pre_hooks) for part in client.modules())))
            actions.before_step(None)
            assert not any(part._forward_pre_hooks for part in client.modules())
    assert [count for _, count in hooks if count] == [4, 4]  # three linear layers and a norm, for each client
    assert all(is_narrow for is_narrow, count in hooks if count)


def test_a_client_whose_only_width_is_its_own_trains_as_without(data: Any, fit: Fit) -> None:
    fits = [
        fit(seeded(LitSmall), data, algorithm=ls.WidthSharding(keep_ratio=0.5, step_widths=w))
        for w in [(), (0.5,), (0.5, 0.75)]
    ]
    assert all(same_state(fitted.state, fits[0].state) for fitted in fits)
    assert all(fitted.ledger.rows == fits[0].ledger.rows for fitted in fits)


def test_narrow_steps_move_the_same_bytes_and_other_weights(data: Any, fit: Fit) -> None:
    algorithm = ls.WidthSharding(keep_ratio=MIXED, step_widths=WIDTHS)
    drawn = fit(seeded(LitSmall), data, algorithm=algorithm, clients_per_round=6, max_epochs=2)
    own = fit(seeded(LitSmall), data, algorithm=ls.WidthSharding(keep_ratio=MIXED), clients_per_round=6, max_epochs=2)
    assert drawn.ledger.rows == own.ledger.rows
    assert not same_state(drawn.state, own.state)


def test_measuring_losses_leaves_clients_as_they_are(data: Any, fit: Fit) -> None:
    """A sampler asks for losses before clients train, and each of these passes has a width as well."""
    algorithm = ls.WidthSharding(keep_ratio=MIXED, step_widths=WIDTHS)
    sampler = ls.LossVarianceReduced(active=4)
    fitted = fit(seeded(LitSmall), data, algorithm=algorithm, participation=sampler, clients_per_round=None)
    assert all(row["fl/loss"] > 0 for row in fitted.rows)


@pytest.mark.slow
def test_a_network_learns(data: Any, fit: Fit) -> None:
    algorithm = ls.WidthSharding(keep_ratio={0.5: 0.5, 1.0: 0.5}, step_widths=(0.25, 0.5, 1.0))
    fitted = fit(seeded(LitShapes), data, algorithm=algorithm, clients_per_round=12, max_epochs=8, local_epochs=2)
    assert fitted.rows[-1]["val_loss"] < 0.85 * fitted.rows[0]["val_loss"]


def test_manual_optimisation_is_refused() -> None:
    lit = seeded(LitSmall)
    lit.automatic_optimization = False
    algorithm = ls.WidthSharding(step_widths=[0.25, 0.5])
    with pytest.raises(ValueError, match="which with manual optimisation takes steps of its own"):
        ls.FederatedModule(lit, algorithm=algorithm, clients_per_round=1)
