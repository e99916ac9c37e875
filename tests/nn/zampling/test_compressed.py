"""Which parameters are compressed, with which fan-in, and the variance of the weights that Q then makes."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from lightning_spectral.nn.zampling import CompressedWeight, Compression


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 5), nn.ReLU(), nn.Linear(5, 3, bias=False))


def conv_net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 4, 5), nn.BatchNorm2d(4), nn.Conv2d(4, 6, 3, groups=2), nn.GroupNorm(2, 6), nn.PReLU()
    )


def tied(**options: Any) -> nn.Module:
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


CASES: dict[str, tuple[Callable[[], nn.Module], dict[str, int]]] = {
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
    "padding, tied": (lambda: tied(padding_idx=0), {"1.weight": 4, "1.bias": 4}),
    "computed": (with_computed_weights, {"3.weight": 4, "3.bias": 4}),
    "own layer": (Own, {"inner.weight": 2, "inner.bias": 2}),
    "subclass": (Scaled, {"weight": 3, "bias": 3}),
    # stored (in, out / groups, k): an output adds up k / s inputs of each of its group's channels
    "transposed": (lambda: nn.ConvTranspose2d(8, 3, 4, stride=2), {"weight": 8 * 2 * 2, "bias": 8 * 2 * 2}),
    "transposed in groups": (lambda: nn.ConvTranspose1d(8, 4, 3, groups=2), {"weight": 12, "bias": 12}),
    "transposed with gaps": (lambda: nn.ConvTranspose1d(8, 4, 1, stride=3, bias=False), {"weight": 8}),
}


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated:FutureWarning")
@pytest.mark.parametrize("case", list(CASES))
def test_weights_and_biases_of_affine_layers_are_compressed_with_their_fan_in(case: str) -> None:
    make, expected = CASES[case]
    module = make()
    assert fan_ins(module) == expected
    for weight in Compression(2).weights_of(module):
        assert weight.shape == module.get_parameter(weight.name).shape
        assert weight.num_values == module.get_parameter(weight.name).numel()


def test_a_transposed_linear_layer_of_transformers_has_its_inputs_first() -> None:
    utils = pytest.importorskip("transformers.pytorch_utils", reason="transformers comes with the `test` extra")
    assert fan_ins(utils.Conv1D(12, 5)) == {"weight": 5, "bias": 5}


def test_a_tied_weight_is_compressed_once_by_its_first_name() -> None:
    assert list(fan_ins(tied())) == ["0.weight", "1.weight", "1.bias", "2.bias"]
    shared = nn.Linear(3, 3)
    assert list(fan_ins(nn.Sequential(shared, nn.ReLU(), shared))) == ["0.weight", "0.bias"]


def test_a_tied_weight_is_excluded_by_any_of_its_names() -> None:
    for pattern in ("0.*", "2.weight"):
        assert "0.weight" not in fan_ins(tied(), exclude=(pattern,))
    assert "0.weight" in fan_ins(tied(), exclude=("2.bias",))


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
