"""Which parameters are compressed; modules whose weights are drawn, in federations and with any trainer."""

import copy
import io
import math
import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from federation import tensors_only
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset
from toy_models import LitNet

import lightning_spectral as ls
from lightning_spectral.functional.zampling import Clip, Link, Sigmoid, draw_bits
from lightning_spectral.nn.zampling import (
    NAME,
    CompressedWeight,
    Compression,
    LocalWeights,
    SampledWeights,
    local_weights,
    sampled_networks,
)
from lightning_spectral.protocol.rng import derived_generator


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 5), nn.ReLU(), nn.Linear(5, 3, bias=False))


def conv_net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 4, 5), nn.BatchNorm2d(4), nn.Conv2d(4, 6, 3, groups=2), nn.GroupNorm(2, 6), nn.PReLU()
    )


def tied_embedding(**options: Any) -> nn.Module:
    model = nn.Sequential(nn.Embedding(11, 4, **options), nn.Linear(4, 4), nn.Linear(4, 11))
    model[2].weight = model[0].weight
    return model


class Scaled(nn.Linear):
    """A linear layer with a learned scale, which is no bias."""

    def __init__(self) -> None:
        super().__init__(3, 4)
        self.gain = nn.Parameter(torch.ones(4))


def with_computed_weights() -> nn.Module:
    plain = nn.Linear(4, 2)
    plain.register_forward_pre_hook(lambda *_: None)
    computed = (
        nn.utils.weight_norm(nn.Linear(4, 3)),
        nn.utils.prune.identity(nn.Linear(4, 3), "weight"),
        nn.utils.parametrizations.weight_norm(nn.Linear(4, 3)),
    )
    return nn.ModuleList([*computed, plain])


class Own(nn.Module):
    """A layer that this package does not know."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 3)
        self.table = nn.Parameter(torch.zeros(7, 5))
        self.scale = nn.Parameter(torch.ones(7))


def fan_ins(module: nn.Module, **options: Any) -> dict[str, int]:
    return {weight.name: weight.fan_in for weight in Compression(2, **options).weights_of(module)}


FAN_INS: dict[str, tuple[Callable[[], nn.Module], dict[str, int]]] = {
    "MLP": (mlp, {"0.weight": 8, "0.bias": 8, "2.weight": 5}),
    "conv net": (conv_net, {"0.weight": 75, "0.bias": 75, "2.weight": 18, "2.bias": 18}),
    "one dimension": (lambda: nn.Conv1d(3, 4, 2), {"weight": 6, "bias": 6}),
    "attention": (
        lambda: nn.MultiheadAttention(6, 2),
        {"in_proj_weight": 6, "in_proj_bias": 6, "out_proj.weight": 6, "out_proj.bias": 6},
    ),
    "attention of other widths": (
        lambda: nn.MultiheadAttention(6, 2, bias=False, kdim=4, vdim=5),
        {"q_proj_weight": 6, "k_proj_weight": 4, "v_proj_weight": 5, "out_proj.weight": 6},
    ),
    "LSTM": (lambda: nn.LSTM(3, 7), {"weight_ih_l0": 3, "weight_hh_l0": 7, "bias_ih_l0": 7, "bias_hh_l0": 7}),
    "GRU cell": (lambda: nn.GRUCell(3, 7), {"weight_ih": 3, "weight_hh": 7, "bias_ih": 7, "bias_hh": 7}),
    "embedding": (lambda: nn.Embedding(11, 4), {"weight": 2}),
    "padding and sparse gradients": (
        lambda: nn.ModuleList([nn.Embedding(9, 4, padding_idx=0), nn.Embedding(9, 4, sparse=True), nn.Linear(4, 2)]),
        {"2.weight": 4, "2.bias": 4},
    ),
    "padding, tied_embedding": (lambda: tied_embedding(padding_idx=0), {"1.weight": 4, "1.bias": 4}),
    "computed": (with_computed_weights, {"3.weight": 4, "3.bias": 4}),
    "own layer": (Own, {"inner.weight": 2, "inner.bias": 2}),
    "subclass": (Scaled, {"weight": 3, "bias": 3}),
    # stored (in, out / groups, k): an output adds up k / s inputs of each of its group's channels
    "transposed": (lambda: nn.ConvTranspose2d(8, 3, 4, stride=2), {"weight": 8 * 2 * 2, "bias": 8 * 2 * 2}),
    "transposed in groups": (lambda: nn.ConvTranspose1d(8, 4, 3, groups=2), {"weight": 12, "bias": 12}),
    "transposed with gaps": (lambda: nn.ConvTranspose1d(8, 4, 1, stride=3, bias=False), {"weight": 8}),
}


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated:FutureWarning")
@pytest.mark.parametrize("case", list(FAN_INS))
def test_weights_and_biases_of_affine_layers_are_compressed_with_their_fan_in(case: str) -> None:
    make, expected = FAN_INS[case]
    module = make()
    assert fan_ins(module) == expected
    for weight in Compression(2).weights_of(module):
        assert weight.shape == module.get_parameter(weight.name).shape
        assert weight.num_values == module.get_parameter(weight.name).numel()


def test_a_transposed_linear_layer_of_transformers_has_its_inputs_first() -> None:
    utils = pytest.importorskip("transformers.pytorch_utils", reason="transformers comes with the `test` extra")
    assert fan_ins(utils.Conv1D(12, 5)) == {"weight": 5, "bias": 5}


def test_a_tied_weight_is_compressed_once_by_its_first_name() -> None:
    assert list(fan_ins(tied_embedding())) == ["0.weight", "1.weight", "1.bias", "2.bias"]
    shared = nn.Linear(3, 3)
    assert list(fan_ins(nn.Sequential(shared, nn.ReLU(), shared))) == ["0.weight", "0.bias"]


def test_a_tied_weight_is_excluded_by_any_of_its_names() -> None:
    for pattern in ("0.*", "2.weight"):
        assert "0.weight" not in fan_ins(tied_embedding(), exclude=(pattern,))
    assert "0.weight" in fan_ins(tied_embedding(), exclude=("2.bias",))


def test_frozen_excluded_and_unknown_parameters_stay() -> None:
    module = mlp()
    module[0].weight.requires_grad_(False)
    assert fan_ins(module) == {"2.weight": 5}  # a bias goes with its weight
    module[0].weight.requires_grad_(True)
    module[0].bias.requires_grad_(False)
    assert fan_ins(module) == {"0.weight": 8, "2.weight": 5}
    assert fan_ins(mlp(), exclude=("2.*", "*.bias")) == {"0.weight": 8}
    assert fan_ins(mlp(), exclude=("0.weight",)) == {"2.weight": 5}
    assert fan_ins(Own()) == {"inner.weight": 2, "inner.bias": 2}


def test_a_complex_weight_is_refused_by_name_unless_it_stays() -> None:
    module = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2, dtype=torch.complex64))
    with pytest.raises(ValueError, match=r"'1\.weight' is of type torch\.complex64; only floating-point weights can"):
        fan_ins(module)
    assert list(fan_ins(module, exclude=("1.*",))) == ["0.weight", "0.bias"]


def test_a_module_without_anything_to_compress_is_refused_with_the_remedy() -> None:
    for module in (nn.BatchNorm1d(3), nn.Linear(3, 2).requires_grad_(False), nn.Embedding(3, 2, padding_idx=0)):
        with pytest.raises(ValueError, match="has no trainable weight of an affine layer to compress; unfreeze some"):
            fan_ins(module)


REPEATS = 100


@pytest.mark.sampled(3)
@pytest.mark.parametrize("values", ["normal", "sign"])
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"init": "he", "sampled": True}, 2.0),
        ({"init": "he", "sampled": False}, 2.0),
        ({"init": "paper", "sampled": True}, 3.0),
        ({"init": "paper", "sampled": False}, 2.0),
        ({"init": "he", "sampled": True, "degree": None}, 2.0),
    ],
    ids=str,
)
def test_weights_of_a_forward_pass_have_the_stated_variance(options: Any, expected: float, values: Any) -> None:
    """Weights of one matrix share bits, so one mean square of each of many matrices is a sample."""
    weights = [CompressedWeight("weight", (12, 20), fan_in=20), CompressedWeight("other", (20,), fan_in=50)]
    how = Compression(1 if "degree" in options else 4, values=values, **{"degree": 6, **options})
    generator = torch.Generator().manual_seed(0)
    samples = []
    for seed in range(REPEATS):
        z = torch.rand(how.num_probs(weights), generator=generator)
        if how.sampled:
            z = (torch.rand(len(z), generator=generator) < z).float()
        parts = how.matrix(weights, seed).expand(z).split([240, 20])
        samples.append([float(part.square().mean()) * w.fan_in for part, w in zip(parts, weights, strict=True)])
    sample = torch.tensor(samples).double()
    error = sample.std(0) / math.sqrt(REPEATS)
    assert ((sample.mean(0) - expected).abs() <= 5 * error).all()
    assert ((sample.mean(0) - expected * 1.5).abs() > 5 * error)[0]  # negative control: 3 for 2 would be noticed


def test_probabilities_are_the_ceiling_of_weights_over_the_factor() -> None:
    weights = Compression(1).weights_of(mlp())
    assert sum(weight.num_values for weight in weights) == 60
    for factor, expected in [(1, 60), (2, 30), (7, 9), (59.5, 2), (60, 1), (61, 1), (1e9, 1)]:
        how = Compression(factor, degree=1)
        assert how.num_probs(weights) == expected
        assert how.matrix(weights, seed=0).num_columns == expected


def test_rows_of_a_weight_follow_from_its_name_and_the_seed() -> None:
    how = Compression(2, degree=3)
    weights = how.weights_of(mlp())
    matrix = how.matrix(weights, seed=1)
    by_name = {weight.name: layer for weight, layer in zip(weights, matrix.layers, strict=True)}
    backwards = how.matrix(weights[::-1], seed=1)
    assert {w.name: layer for w, layer in zip(weights[::-1], backwards.layers, strict=True)} == by_name
    assert len({layer.seed for layer in matrix.layers}) == len(weights)
    other = how.matrix(weights, seed=2)
    assert {layer.seed for layer in other.layers}.isdisjoint(layer.seed for layer in matrix.layers)
    assert how.matrix(weights, seed=1) == matrix
    assert by_name["0.weight"].scale == pytest.approx(math.sqrt(4 / (3 * 8)))


def test_the_gain_scales_every_entry_of_the_matrix() -> None:
    module = nn.Linear(8, 5)
    plain, doubled = (how.matrix(how.weights_of(module), seed=0) for how in (Compression(2), Compression(2, gain=2.0)))
    for one, two in zip(plain.entries(), doubled.entries(), strict=True):
        assert torch.equal(one if one.dtype == torch.int64 else 2 * one, two)


def test_a_weight_that_only_a_property_reads_is_refused_by_name() -> None:
    class ReadOnly(nn.Linear):
        @property
        def weight(self) -> Any:
            return nn.Module.__getattr__(self, "weight")

    net = nn.Sequential(nn.Linear(4, 4), ReadOnly(4, 4))
    with pytest.raises(ValueError, match=r"'1\.weight' is read through a property of ReadOnly without a s.*exclude="):
        fan_ins(net)
    assert fan_ins(net, exclude=("1.*",)) == {"0.weight": 4, "0.bias": 4}


class Output(nn.Module):
    """First output of a layer; attention takes a sequence three times, as queries, keys and values."""

    def __init__(self, layer: nn.Module, num_inputs: int) -> None:
        super().__init__()
        self.layer, self.num_inputs = layer, num_inputs

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(*[x] * self.num_inputs)[0]
        return out


def tied() -> nn.Module:
    model = nn.Sequential(nn.Embedding(11, 6), nn.Tanh(), nn.Linear(6, 11))
    model[2].weight = model[0].weight
    return model


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "MLP": (lambda: nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)), lambda: randn(7, 6)),
    "one layer": (lambda: nn.Linear(6, 5), lambda: randn(7, 6)),
    "conv": (
        lambda: nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.Tanh(), nn.ConvTranspose2d(4, 2, 2)),
        lambda: randn(3, 2, 5, 5),
    ),
    "attention": (lambda: Output(nn.MultiheadAttention(8, 2), 3), lambda: randn(3, 4, 8)),
    "transformer": (
        lambda: nn.TransformerEncoder(
            nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True), 2, enable_nested_tensor=False
        ),
        lambda: randn(3, 4, 8),
    ),
    "LSTM": (lambda: Output(nn.LSTM(5, 4, num_layers=2, bidirectional=True), 1), lambda: randn(4, 3, 5)),
    "tied": (tied, lambda: torch.arange(11)),
    "shared layer": (lambda: nn.Sequential(*[nn.Linear(6, 6)] * 2), lambda: randn(7, 6)),
}
every_case = pytest.mark.parametrize("case", list(CASES))


def compress(module: nn.Module, link: Link | None = None, **options: Any) -> SampledWeights:
    """Compress in place, with probabilities of which some are 0 or 1."""
    how = Compression(4, **{"degree": 3, **options})
    weights = how.weights_of(module)
    made = SampledWeights(module, weights, how.matrix(weights, seed=1), link or Clip(), how.sampled)
    made.set_probs(1.2 * torch.rand(len(made.scores), generator=torch.Generator().manual_seed(2)) - 0.1)
    return made


def generator(seed: int = 3) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def with_dense_weights(case: str, z: Tensor, made: SampledWeights) -> Tensor:
    """Output of the dense module, with the rows of Q z in the places of its parameters."""
    module = CASES[case][0]().double()
    columns, values = made.matrix.entries()
    Q = torch.zeros(made.matrix.num_rows, len(z)).double().scatter_(1, columns, values.double())
    weights = Compression(4, degree=3).weights_of(module)
    rows = (Q @ z).split([weight.num_values for weight in weights])
    named = {w.name: part.view(w.shape) for w, part in zip(weights, rows, strict=True)}
    out: Tensor = functional_call(module, named, (CASES[case][1](),))
    return out


@every_case
@pytest.mark.sampled(20)
@pytest.mark.parametrize("sampled", [True, False])
@pytest.mark.parametrize("link", [Clip(), Clip(absorbing=False), Sigmoid(), Sigmoid(False)], ids=str)
def test_outputs_and_gradients_are_those_of_the_dense_expression(case: str, sampled: bool, link: Link) -> None:
    module = CASES[case][0]().double()
    made = compress(module, link, sampled=sampled)
    if link == Clip():  # beyond the edges too
        with torch.no_grad():
            made.scores.add_(0.3 * torch.randn(len(made.scores), generator=generator(4)))
    made.draw(generator())
    out = module(CASES[case][1]())
    weigh = randn(*out.shape)
    (out * weigh).sum().backward()
    z = (draw_bits(made.probs, generator()).double() if sampled else made.probs).requires_grad_()
    expected = with_dense_weights(case, z, made)
    # float64 on both sides, and sums of less than 2^10 products of numbers around 1
    close = {"rtol": 2.0**-42, "atol": 2.0**-42}
    torch.testing.assert_close(out, expected, **close)
    (of_bits,) = torch.autograd.grad((expected * weigh).sum(), z)
    assert made.scores.grad is not None
    torch.testing.assert_close(made.scores.grad, link.gradient(made.scores.detach(), of_bits), **close)
    assert made.scores.grad.count_nonzero() > 0


@every_case
def test_only_scores_and_what_is_dense_are_parameters(case: str) -> None:
    module = CASES[case][0]()
    compressed = {weight.name for weight in Compression(4, degree=3).weights_of(module)}
    dense = {name for name, _ in module.named_parameters()} - compressed
    made = compress(module)
    assert {name for name, _ in module.named_parameters()} == dense | {f"{NAME}.scores"}
    assert getattr(module, NAME) is made
    if case == "conv":
        assert dense == {"1.weight", "1.bias"}


def test_a_draw_repeats_with_its_generator_and_the_next_one_differs_also_after_a_backward() -> None:
    module, x = CASES["MLP"][0]().double(), CASES["MLP"][1]()
    made, one = compress(module), generator()
    outputs = []
    for _ in range(3):
        made.draw(one)
        outputs.append(module(x).sum())
        outputs[-1].backward()
    assert len({out.item() for out in outputs}) == 3
    again = generator()
    for out in outputs:
        made.draw(again)
        assert torch.equal(module(x).sum(), out)


def test_each_bit_is_1_with_its_probability() -> None:
    made = compress(nn.Linear(20, 20), Clip())
    probs, one, repeats = made.probs.double(), generator(), 2000
    assert probs.min() == 0.0
    assert probs.max() == 1.0
    share = sum(draw_bits(made.probs, one).double() for _ in range(repeats)) / repeats
    # the standard error of a share; bits of probability 0 and 1 have none
    assert ((share - probs).abs() <= 5 * (probs * (1 - probs) / repeats).sqrt()).all()


def test_bits_do_not_depend_on_the_default_type() -> None:
    """A uniform number in half precision is a multiple of 1/256, so rare bits would come far too often or never."""
    made = compress(nn.Linear(20, 20))
    expected = draw_bits(made.probs, generator())
    before = torch.get_default_dtype()
    for dtype in (torch.bfloat16, torch.float64):
        torch.set_default_dtype(dtype)
        try:
            assert torch.equal(draw_bits(made.probs, generator()), expected)
        finally:
            torch.set_default_dtype(before)


@every_case
def test_at_rest_a_module_can_be_copied_and_pickled_and_the_copy_is_its_own(case: str) -> None:
    module, x = CASES[case][0]().double(), CASES[case][1]()
    made = compress(module)
    made.draw(generator())
    module(x)
    with pytest.raises(RuntimeError, match="deepcopy"):  # negative control: before it rests
        copy.deepcopy(module)
    made.rest()
    expected = module(x)
    for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert torch.equal(twin(x), expected)
        own = getattr(twin, NAME)
        assert own is not made
        own.set_probs(torch.zeros(len(own.scores)))
        own.draw(generator())
        out = twin(x)
        assert not torch.equal(out, expected)
        out.sum().backward()
        assert made.scores.grad is None
        assert torch.equal(module(x), expected)


@every_case
def test_evaluation_without_gradients_uses_the_weights_drawn_last(case: str) -> None:
    module, x = CASES[case][0]().double(), CASES[case][1]()
    compress(module).draw(generator())
    module(x)
    module.eval()
    with_graph = module(x)
    with torch.no_grad():
        torch.testing.assert_close(module(x), with_graph.detach(), rtol=2.0**-42, atol=2.0**-42)


def test_under_autocast_weights_and_gradients_of_scores_stay_in_full_precision() -> None:
    module = nn.Linear(6, 5)
    made = compress(module)
    with torch.autocast("cpu", torch.bfloat16):
        made.draw(generator())
        out = module(torch.ones(2, 6))
        out.sum().backward()
    assert out.dtype == torch.bfloat16
    assert made.scores.grad is not None
    assert module.weight.dtype == made.scores.grad.dtype == torch.float32
    assert torch.equal(module.weight.ravel(), made.matrix.expand(draw_bits(made.probs, generator()).float())[:30])


def test_compressing_twice_is_refused() -> None:
    module = nn.Sequential(nn.Linear(6, 5))
    how = Compression(4, degree=3)
    weights = how.weights_of(module)
    SampledWeights(module, weights, how.matrix(weights, seed=1), Clip())
    with pytest.raises(ValueError, match="Sequential already has an attribute '_zampling': it was compressed before"):
        SampledWeights(module, weights, how.matrix(weights, seed=1), Clip())


def wide_mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 3))


def small(module: nn.Module | None = None, **options: Any) -> nn.Module:
    return ls.nn.zample(module or wide_mlp(), **{"compression": 2, "degree": 4, **options})


def inputs(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def toy_data() -> TensorDataset:
    x = inputs(240, 6)
    return TensorDataset(x, x[:, :3].argmax(1))


class Classifier(LitNet):
    """A stock module with its own optimizer, which notes its losses."""

    def __init__(self, net: nn.Module | None = None) -> None:
        super().__init__(net or wide_mlp(), optimizer=partial(torch.optim.Adam, lr=0.02))
        self.losses: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = super().training_step(batch, batch_idx)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("accuracy", (self(batch[0]).argmax(1) == batch[1]).float().mean())


def trainer(epochs: int, **options: Any) -> pl.Trainer:
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    return pl.Trainer(
        max_epochs=epochs, accelerator="cpu", logger=False, **{"num_sanity_val_steps": 0, **quiet, **options}
    )


def fit(model: Classifier, epochs: int, **options: Any) -> None:
    data = DataLoader(toy_data(), batch_size=24)
    trainer(epochs, val_check_interval=0.3, **options).fit(model, data, data)


@pytest.mark.slow
def test_a_stock_trainer_trains_the_scores() -> None:
    x, y = toy_data().tensors

    @torch.no_grad()
    def accuracy(model: Classifier) -> float:  # of the expected network
        return float((model.eval().net(x).argmax(1) == y).float().mean())

    model = ls.nn.zample(Classifier(), 2, degree=4)
    untrained = accuracy(model)
    model.train()
    fit(model, epochs=40, limit_val_batches=0)
    assert untrained < 0.6
    assert accuracy(model) > 0.85


def test_frozen_scores_learn_nothing() -> None:
    model = ls.nn.zample(Classifier(nn.Sequential(*wide_mlp(), nn.BatchNorm1d(3, affine=True))), 2, degree=4)
    scores = local_weights(model).scores.requires_grad_(False)
    before, dense = scores.clone(), model.net[3].weight.clone()
    fit(model, epochs=1)  # of the two parameters of the normalisation
    assert torch.equal(scores, before)
    assert not torch.equal(model.net[3].weight, dense)


@pytest.mark.parametrize("name", CASES)
def test_modules_of_many_kinds_train_and_their_plain_twins_compute_the_same(name: str) -> None:
    build, example = CASES[name]
    plain, x = build().double(), example()
    keys = list(plain.state_dict())
    net = small(plain, compression=3)
    first = net(x)
    assert torch.equal(net(x), first)
    first.square().sum().backward()
    gradient = local_weights(net).scores.grad
    assert gradient is not None
    assert (gradient != 0).float().mean() > 0.2
    assert not torch.equal(net(x), first)
    torch.optim.SGD(net.parameters(), lr=0.01).step()
    expected = net.eval()(x)
    restored = ls.nn.unzample(net)
    assert torch.equal(restored(x), expected)
    assert list(restored.state_dict()) == keys
    twin = build().double().eval()
    twin.load_state_dict(restored.state_dict())
    assert torch.equal(twin(x), expected)
    assert all(parameter.requires_grad for parameter in restored.parameters())
    assert not any(part._forward_pre_hooks for part in restored.modules())
    if name == "tied":
        assert restored[0].weight is restored[2].weight


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
    expected = weights_by_hand(net, draw_bits(local_weights(net).probs, torch.Generator().manual_seed(3)).float())
    plain = ls.nn.unzample(net, torch.Generator().manual_seed(3))
    torch.testing.assert_close(list(plain.parameters()), [nn.Parameter(part) for part in expected])
    assert type(plain) is nn.Sequential
    assert len(plain) == 3


def test_parameters_get_their_order_back_though_some_stayed_dense() -> None:
    net = wide_mlp()
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
    assert torch.equal(ls.nn.unzample(copy.deepcopy(net.eval()), torch.Generator().manual_seed(0))(x), outputs[0])


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
