"""Modules whose weights are samples, trained without federation."""

import copy
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from federation import tensors_only
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import lightning_spectral as ls
from lightning_spectral.functional.zampling import draw_bits
from lightning_spectral.nn.local_zampling import LocalWeights, local_weights, sampled_networks
from lightning_spectral.protocol.rng import derived_generator


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 3))


def small(module: nn.Module | None = None, **options: Any) -> nn.Module:
    return ls.nn.zample(module or mlp(), **{"compression": 2, "degree": 4, **options})


def inputs(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def toy_data() -> TensorDataset:
    x = inputs(240, 6)
    return TensorDataset(x, x[:, :3].argmax(1))


class Classifier(pl.LightningModule):
    """A stock module with its own optimizer."""

    def __init__(self, net: nn.Module | None = None) -> None:
        super().__init__()
        self.net = net or mlp()
        self.losses: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("accuracy", (self.net(batch[0]).argmax(1) == batch[1]).float().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.02)


def trainer(epochs: int, **options: Any) -> pl.Trainer:
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    return pl.Trainer(
        max_epochs=epochs, accelerator="cpu", logger=False, **{"num_sanity_val_steps": 0, **quiet, **options}
    )


def fit(model: Classifier, epochs: int, **options: Any) -> None:
    data = DataLoader(toy_data(), batch_size=24)
    trainer(epochs, val_check_interval=0.3, **options).fit(model, data, data)


def test_a_stock_trainer_trains_the_scores() -> None:
    x, y = toy_data().tensors

    @torch.no_grad()
    def accuracy(model: Classifier) -> float:  # of the expected network
        right = model.eval().net(x).argmax(1) == y
        model.train()
        return float(right.float().mean())

    model = ls.nn.zample(Classifier(), 2, degree=4)
    untrained = accuracy(model)
    fit(model, epochs=40, limit_val_batches=0)
    assert untrained < 0.6
    assert accuracy(model) > 0.85


def test_frozen_scores_learn_nothing() -> None:
    model = ls.nn.zample(Classifier(nn.Sequential(*mlp(), nn.BatchNorm1d(3, affine=True))), 2, degree=4)
    scores = local_weights(model).scores.requires_grad_(False)
    before, dense = scores.clone(), model.net[3].weight.clone()
    fit(model, epochs=1)  # of the two parameters of the normalisation
    assert torch.equal(scores, before)
    assert not torch.equal(model.net[3].weight, dense)


MODULES: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module], Tensor]]] = {
    "batch norm": (
        lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(32, 4)),
        lambda net: net(inputs(5, 3, 4, 4)),
    ),
    "attention": (
        lambda: nn.MultiheadAttention(16, 4, batch_first=True),
        lambda net: net(x := inputs(2, 5, 16), x, x)[0],
    ),
    "transformer": (
        lambda: nn.TransformerEncoder(
            nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True), 2, enable_nested_tensor=False
        ),
        lambda net: net(inputs(2, 5, 16)),
    ),
    "lstm": (lambda: nn.LSTM(8, 12, num_layers=2, batch_first=True), lambda net: net(inputs(2, 5, 8))[0]),
    "tied": (lambda: Tied(), lambda net: net(torch.arange(8).view(2, 4))),
}


class Tied(nn.Module):
    """An embedding whose weight is the last layer's, too."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(8, 16), nn.Linear(16, 8)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.head(self.embed(tokens))
        return out


@pytest.mark.parametrize("name", MODULES)
def test_modules_of_many_kinds_train_and_their_plain_twins_compute_the_same(name: str) -> None:
    build, call = MODULES[name]
    plain = build()
    keys = list(plain.state_dict())
    net = small(plain, compression=3)
    first, same = call(net), call(net)
    assert torch.equal(first, same)
    first.square().sum().backward()
    gradient = local_weights(net).scores.grad
    assert gradient is not None
    assert (gradient != 0).float().mean() > 0.2
    assert not torch.equal(call(net), first)
    torch.optim.SGD(net.parameters(), lr=0.01).step()
    expected = call(net.eval())
    restored = ls.nn.unzample(net)
    assert torch.equal(call(restored), expected)
    assert list(restored.state_dict()) == keys
    twin = build()
    twin.load_state_dict(restored.state_dict())
    twin.eval()
    assert torch.equal(call(twin), expected)
    assert all(parameter.requires_grad for parameter in restored.parameters())
    assert not any(part._forward_pre_hooks for part in restored.modules())
    if name == "tied":
        assert restored.embed.weight is restored.head.weight


def weights_by_hand(net: nn.Module, z: Tensor) -> list[Tensor]:
    """The matrix, written out, times z."""
    weights = local_weights(net)
    columns, values = weights.matrix.entries()
    return [*weights.split((values * z[columns]).sum(1))]


def test_weights_are_the_matrix_times_bits_in_training_and_times_probabilities_in_evaluation() -> None:
    net = small()
    probs = torch.rand(len(local_weights(net).probs), generator=derived_generator(0, "probabilities"))
    assert torch.equal(local_weights(net).probs, probs)
    for k in range(3):
        net(inputs(4, 6)).sum().backward()
        bits = torch.rand(len(probs), generator=derived_generator(0, "local bits", k)) < probs
        torch.testing.assert_close([net[0].weight, net[0].bias], weights_by_hand(net, bits.float())[:2])
    with torch.no_grad():
        net.eval()(inputs(4, 6))
    torch.testing.assert_close([net[2].weight, net[2].bias], weights_by_hand(net, probs)[2:])
    expected = small(sampled=False)  # in training too
    expected(inputs(4, 6))
    torch.testing.assert_close(expected[0].weight.detach(), weights_by_hand(expected, local_weights(expected).probs)[0])


def test_one_draw_serves_a_step_whatever_happens_before_its_backward_pass() -> None:
    net, x = small(), inputs(4, 6)
    first = net(x)
    with torch.no_grad():
        assert torch.equal(net(x), first)
        expected = net.eval()(x)
        with torch.inference_mode():
            assert torch.equal(net(x), expected)
    again = net.train()(x)
    assert torch.equal(again, first)
    assert not torch.equal(expected, first)
    again.sum().backward()
    assert int(local_weights(net).num_draws) == 1
    assert not torch.equal(net(x), first)


def test_accumulated_gradients_are_those_of_two_draws() -> None:
    net, x = small(), inputs(4, 6)
    scores = local_weights(net).scores
    parts = []
    for _ in range(2):
        net(x).square().sum().backward()
        parts.append(scores.grad.clone())
    alone = small()
    alone(x).square().sum().backward()
    alone.zero_grad()
    alone(x).square().sum().backward()
    torch.testing.assert_close(parts[1], parts[0] + local_weights(alone).scores.grad)
    assert not torch.allclose(parts[1], 2 * parts[0])


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_segments_are_computed_again_with_the_same_draw(reentrant: bool) -> None:
    x = inputs(4, 6).requires_grad_()
    gradients = []
    for recompute in (False, True):
        net = small(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)))
        for _ in range(2):
            halves = [net[:2], net[2:4]]
            out = x
            for half in halves:
                out = checkpoint(half, out, use_reentrant=reentrant) if recompute else half(out)
            net[4](out).square().sum().backward()
        gradients.append(local_weights(net).scores.grad)
    torch.testing.assert_close(gradients[0], gradients[1])


def test_weights_follow_scores_that_were_changed_or_replaced() -> None:
    net, x = small().eval(), inputs(4, 6)
    with torch.no_grad():
        before = net(x)
        local_weights(net).set_probs(torch.ones_like(local_weights(net).scores))
        after = net(x)
        zeros = torch.zeros_like(local_weights(net).scores)
        while zeros._version < local_weights(net).scores._version:
            zeros.add_(0)
        swapped = torch.func.functional_call(net, {"_zampling.scores": zeros}, (x,))
        assert torch.equal(net(x), after)
    assert not torch.equal(before, after)
    assert torch.equal(swapped, torch.zeros_like(swapped))


def test_weights_made_in_inference_mode_serve_outside_of_it() -> None:
    net, x = small().eval().requires_grad_(False), inputs(4, 6)
    with torch.inference_mode():
        net(x)
    net(x.requires_grad_()).sum().backward()
    assert x.grad is not None


@pytest.mark.parametrize("other", [{"seed": 1}, {"degree": 5}, {"values": "sign"}, {"init": "paper"}])
def test_scores_of_another_matrix_are_not_loaded(other: dict[str, Any]) -> None:
    with pytest.raises(RuntimeError, match="belong to another matrix Q"):
        small().load_state_dict(small(**other).state_dict())


@pytest.mark.parametrize("used", [False, True])
def test_copies_and_pickles_are_modules_of_their_own(used: bool) -> None:
    net, x = small(), inputs(4, 6)
    if used:
        net(x).sum().backward()
    buffer = io.BytesIO()
    torch.save(net, buffer)
    buffer.seek(0)
    copies = [copy.deepcopy(net), pickle.loads(pickle.dumps(net)), torch.load(buffer, weights_only=False)]
    expected = net(x)
    for other in copies:
        assert torch.equal(other(x), expected)
        other(x).sum().backward()
        torch.optim.SGD(other.parameters(), lr=1.0).step()
        assert not torch.equal(other(x), expected)
        assert not any(part._forward_pre_hooks for part in ls.nn.unzample(other).modules())
    assert torch.equal(net(x), expected)
    assert int(local_weights(net).num_draws) == used


def test_a_pickle_between_forward_and_backward_pass_makes_its_own_weights() -> None:
    net, x = small(), inputs(4, 6)
    out = net(x)
    other = pickle.loads(pickle.dumps(net))
    other(x).sum().backward()
    assert local_weights(other).scores.grad is not None
    out.sum().backward()
    torch.testing.assert_close(local_weights(other).scores.grad, local_weights(net).scores.grad)


def test_resumed_run_equals_the_uninterrupted_one(tmp_path: Path) -> None:
    data = DataLoader(toy_data(), batch_size=24)
    whole, first, second = (ls.nn.zample(Classifier(), 2, degree=4) for _ in range(3))
    trainer(4).fit(whole, data, data)
    begun = trainer(2)
    begun.fit(first, data, data)
    begun.save_checkpoint(tmp_path / "half.ckpt")
    ended = trainer(4)
    ended.fit(second, data, data, ckpt_path=tmp_path / "half.ckpt", **tensors_only(ended))
    assert first.losses + second.losses == whole.losses
    states = [model.state_dict() for model in (whole, second)]
    assert list(states[0]) == list(states[1]) == [f"_zampling.{name}" for name in ("scores", "num_draws", "matrix_id")]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    assert int(states[0]["_zampling.num_draws"]) == 40


def test_validation_within_an_epoch_and_global_draws_do_not_disturb_training() -> None:
    alone, validated = ls.nn.zample(Classifier(), 2, degree=4), ls.nn.zample(Classifier(), 2, degree=4)
    fit(alone, epochs=2, limit_val_batches=0)
    torch.rand(3)
    fit(validated, epochs=2)
    assert alone.losses == validated.losses


def test_a_sampled_network_becomes_a_plain_one() -> None:
    net = small()
    bits = draw_bits(local_weights(net).probs, torch.Generator().manual_seed(3))
    expected = weights_by_hand(net, bits.float())
    plain = ls.nn.unzample(net, torch.Generator().manual_seed(3))
    torch.testing.assert_close(list(plain.parameters()), [nn.Parameter(part) for part in expected])
    assert type(plain) is nn.Sequential
    assert len(plain) == 3


def test_parameters_get_their_order_back_though_some_stayed_dense() -> None:
    net = mlp()
    names = [name for name, _ in net.named_parameters()]
    small(net, exclude=["*.bias"])
    assert {name for name, _ in net.named_parameters()} == {"0.bias", "2.bias", "_zampling.scores"}
    assert [name for name, _ in ls.nn.unzample(net).named_parameters()] == names


def test_sampled_networks_are_different_and_everything_is_restored() -> None:
    net, x = small(nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))), inputs(4, 6)
    net[1].eval()
    before = net(x)
    outputs = []
    with torch.no_grad():
        for sampled in sampled_networks(net, 3, torch.Generator().manual_seed(0)):
            assert sampled is net
            assert not net.training
            outputs.append(net(x))
            assert torch.equal(net(x), outputs[-1])
    assert not torch.equal(outputs[0], outputs[1])
    assert net.training
    assert not net[1].training
    assert torch.equal(net(x), before)
    for _ in sampled_networks(net, 3, torch.Generator().manual_seed(0)):
        break  # leaving the loop early
    assert torch.equal(net(x), before)
    plain = ls.nn.unzample(copy.deepcopy(net.eval()), torch.Generator().manual_seed(0))
    assert torch.equal(plain(x), outputs[0])


def test_the_mean_of_sampled_weights_is_the_expected_weight() -> None:
    net = small(compression=1)
    probs = local_weights(net).probs
    columns, values = local_weights(net).matrix.entries()
    spread = (values.square() * (probs * (1 - probs))[columns]).sum(1).sqrt()
    samples = [net[0].weight.flatten() for _ in sampled_networks(net, 400, torch.Generator().manual_seed(0))]
    expected = ls.nn.unzample(net)[0].weight.flatten()
    error = (torch.stack(samples).mean(0) - expected).abs()
    assert (error <= 5 * spread[: len(error)] / 20 + 1e-6).all()


def test_bad_input_is_explained() -> None:
    net = small()
    with pytest.raises(ValueError, match="holds scores already; restore its weights with `unzample`"):
        small(net)
    with pytest.raises(ValueError, match="no trainable weight of an affine layer to compress"):
        ls.nn.zample(nn.BatchNorm1d(4))
    untouched = nn.Linear(4, 2)
    with pytest.raises(ValueError, match="between 1 and the number of columns, 5, got 10"):
        ls.nn.zample(untouched, compression=2)
    assert len(list(untouched.parameters())) == 2
    assert not untouched._forward_pre_hooks
    with pytest.raises(ValueError, match="holds no scores; `zample` it first"):
        ls.nn.unzample(untouched)
    assert isinstance(local_weights(small(ls.nn.unzample(net))), LocalWeights)
