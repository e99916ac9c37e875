"""Which parameters are compressed, and modules whose weights are drawn, against the dense expression Q z."""

import copy
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from lightning_spectral.functional.zampling import Clip, Link, Sigmoid, draw_bits
from lightning_spectral.nn.zampling import NAME, CompressedWeight, Compression, SampledWeights


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
def test_weights_of_a_forward_pass_have_the_stated_variance(
    options: dict[str, Any], expected: float, values: Any
) -> None:
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


def test_options_out_of_range_are_refused() -> None:
    for factor in (0.5, 0.0, -1.0, math.inf, math.nan):
        with pytest.raises(ValueError, match=r"`compression` must be at least 1 and finite, got .*; it is the n"):
            Compression(factor)
    with pytest.raises(ValueError, match=r"With `degree=None` each weight has a probability of its own, .* give a"):
        Compression(2, degree=None)
    with pytest.raises(ValueError, match=r"`exclude` must be a sequence of patterns, got '2\.\*'; write exclude="):
        Compression(2, exclude="2.*")
    with pytest.raises(ValueError, match="`degree` must be at least 1, or None, got 0"):
        Compression(2, degree=0)
    with pytest.raises(ValueError, match="`gain` must be positive and finite, got 0"):
        Compression(2, gain=0)
    for name in ("init", "values"):
        with pytest.raises(ValueError, match=f"`{name}` must be '.*' or '.*', got 'other'"):
            Compression(2, **{name: "other"})  # type: ignore[arg-type]
    how = Compression(20, degree=4)
    with pytest.raises(ValueError, match=r"between 1 and the number of columns, 3, got 4: .* or the compression"):
        how.matrix(how.weights_of(mlp()), seed=0)


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
    made = compress(module)
    made.draw(generator())
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
