"""Every sharded layer stands for its dense one: the shipped contract, over every type of layer and its options."""

import copy
import itertools
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from small_convs import CONV, rand
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.flop_counter import FlopCounterMode
from toy_models import variant

import lightning_spectral as ls
import lightning_spectral.nn as snn
from lightning_spectral.nn import (
    LayerPlan,
    ModulePlan,
    SpectralShardedConv2d,
    SpectralShardedLayer,
    SpectralShardedLinear,
    replace_layers,
)
from lightning_spectral.nn.layers.conv import pointwise, products_are_faster
from lightning_spectral.nn.plan.layer_types import sharded_type
from lightning_spectral.testing import check_sharded_layer


def with_all_terms(dense: nn.Module) -> Any:
    layer_type = sharded_type(dense)
    assert layer_type is not None
    return layer_type.from_dense(copy.deepcopy(dense), [block.num_singular for block in layer_type.blocks_of(dense)])


def check(dense: nn.Module, *inputs: Any, num_parts: int = 1) -> None:
    layer_type = sharded_type(dense, num_parts)
    assert layer_type is not None
    check_sharded_layer(layer_type, dense.double(), *inputs, num_parts=num_parts)


@pytest.mark.parametrize("bias", [True, False])
def test_linear_that_packs_several(bias: bool) -> None:
    check(nn.Linear(4, 9, bias), rand(2, 5, 4), num_parts=3)


ALL_CONV = [*CONV, {"kernel_size": 1, "bias": False}]
SIZES = {nn.Conv1d: (9,), nn.Conv2d: (7, 8), nn.Conv3d: (5, 6, 5)}


@pytest.mark.sampled(27)
@pytest.mark.parametrize("options", ALL_CONV, ids=str)
@pytest.mark.parametrize("layer_type", SIZES)
@pytest.mark.parametrize(("channels", "groups"), [((3, 4), 1), ((2, 20), 1), ((4, 6), 2)], ids=["wide", "tall", "2"])
def test_convolutions(layer_type: Any, options: dict[str, Any], channels: tuple[int, int], groups: int) -> None:
    check(layer_type(*channels, **options, groups=groups), rand(2, channels[0], *SIZES[layer_type]))


@pytest.mark.parametrize("options", [*ALL_CONV, {"kernel_size": (3, 2), "stride": (2, 1), "padding": (1, 0)}], ids=str)
@pytest.mark.parametrize("channels", [(3, 4), (2, 20)], ids=["wide", "tall"])
def test_spatial_convolutions(options: dict[str, Any], channels: tuple[int, int]) -> None:
    dense = nn.Conv2d(*channels, **options).double()
    check_sharded_layer(snn.SpectralShardedSpatialConv2d, dense, rand(2, channels[0], 7, 8))
    check_sharded_layer(snn.SpectralShardedSpatialConv2d, dense, rand(channels[0], 7, 8))


def test_a_spatial_matrix_is_that_of_fed_hm() -> None:
    """Entry by entry, and kernels that can be separated have a single term for each pair of channels."""
    dense = nn.Conv2d(3, 4, (3, 2)).double()
    (block,) = snn.SpectralShardedSpatialConv2d.blocks_of(dense)
    matrix = block.matrix(dense.weight.detach())
    assert matrix.shape == block.shape == (4 * 3, 3 * 2)
    for o, i, y, x in itertools.product(range(4), range(3), range(3), range(2)):
        assert matrix[3 * o + y, 2 * i + x] == dense.weight[o, i, y, x]
    one = nn.Conv2d(1, 1, 3, bias=False).double()
    one.weight.data = torch.outer(rand(3), rand(3) + 1)[None, None]
    separated, image = snn.SpectralShardedSpatialConv2d.from_dense(one, 1), rand(1, 1, 6, 6)
    assert torch.allclose(separated(image), one(image))


@settings(max_examples=25, deadline=None)
@given(
    groups=st.integers(1, 3),
    in_channels=st.integers(1, 3),
    out_channels=st.integers(1, 4),
    kernel=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    stride=st.integers(1, 2),
    padding=st.integers(0, 2),
)
def test_convolutions_of_any_shape(
    groups: int, in_channels: int, out_channels: int, kernel: tuple[int, int], stride: int, padding: int
) -> None:
    dense = nn.Conv2d(groups * in_channels, groups * out_channels, kernel, stride, padding, groups=groups)
    check(dense, rand(1, groups * in_channels, 5, 6))


@settings(max_examples=25, deadline=None)
@given(rows=st.integers(1, 9), columns=st.integers(1, 9), positions=st.integers(1, 20), bias=st.booleans())
def test_linear_layers_of_any_shape(rows: int, columns: int, positions: int, bias: bool) -> None:
    check(nn.Linear(columns, rows, bias), rand(2, positions, columns))


class TestAttention:
    @pytest.mark.parametrize("batch_first", [True, False])
    @pytest.mark.parametrize("bias", [True, False])
    def test_self_attention(self, batch_first: bool, bias: bool) -> None:
        x, attention = rand(3, 5, 8), nn.MultiheadAttention(8, 2, bias=bias, batch_first=batch_first)
        check(attention, x, x, x)
        check(attention, rand(5, 8), rand(6, 8), rand(6, 8))  # without a batch

    def test_keys_and_values_of_other_sizes(self) -> None:
        inputs = rand(3, 4, 8), rand(3, 7, 5), rand(3, 7, 6)
        check(nn.MultiheadAttention(8, 4, kdim=5, vdim=6, batch_first=True), *inputs)
        check(nn.MultiheadAttention(8, 4, kdim=5, vdim=6), *[x.transpose(0, 1).contiguous() for x in inputs])

    @pytest.mark.parametrize("need_weights", [True, False])
    @pytest.mark.parametrize("average", [True, False])
    @pytest.mark.parametrize("per_head", [True, False])
    @pytest.mark.parametrize("as_numbers", [True, False])
    def test_masks(self, need_weights: bool, average: bool, per_head: bool, as_numbers: bool) -> None:
        x = rand(3, 5, 8)
        mask = torch.triu(torch.ones(5, 5, dtype=torch.bool), diagonal=1)
        mask = mask.expand(6, 5, 5).clone() if per_head else mask
        padding = torch.zeros(3, 5, dtype=torch.bool)
        padding[1, 3:] = True
        if as_numbers:
            mask, padding = (torch.zeros(m.shape).double().masked_fill(m, -3.0) for m in (mask, padding))
        arguments = (x, x, x, padding, need_weights, mask, average)
        attention = nn.MultiheadAttention(8, 2, batch_first=True).double()
        for ours, theirs in zip(with_all_terms(attention)(*arguments), attention(*arguments), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)

    def test_a_causal_hint_without_its_mask_is_refused(self) -> None:
        with pytest.raises(ValueError, match="give the mask too"):
            with_all_terms(nn.MultiheadAttention(8, 2))(*[torch.zeros(5, 8)] * 3, is_causal=True)

    def test_dropout_drops_in_training_alone(self) -> None:
        sharded, x = with_all_terms(nn.MultiheadAttention(8, 2, dropout=0.5)), torch.ones(5, 1, 8)
        for need_weights in (True, False):
            torch.manual_seed(0)
            assert not torch.equal(*[sharded(x, x, x, need_weights=need_weights)[0] for _ in range(2)])
        sharded.eval()
        assert torch.equal(sharded(x, x, x)[0], sharded(x, x, x)[0])

    @pytest.mark.sampled(3)
    @pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage:UserWarning")  # dense
    @pytest.mark.parametrize("grad", [True, False])
    @pytest.mark.parametrize("padded", [True, False])
    @pytest.mark.parametrize("training", [True, False])
    def test_the_encoders_fast_path_does_not_bypass_it(self, training: bool, padded: bool, grad: bool) -> None:
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, dtype=torch.float64)
        encoder = nn.TransformerEncoder(layer, 2).train(training)
        x = rand(3, 5, 8)
        padding = torch.zeros(3, 5, dtype=torch.bool)
        padding[1, 3:] = padded
        mask = padding if padded else None
        ends_too = snn.LayerChoices(keep_first_and_last_dense=False)
        full = snn.replace_layers(encoder, 1.0, layers=ends_too)
        halved = snn.replace_layers(encoder, 0.5, layers=ends_too)
        with torch.set_grad_enabled(grad):
            expected = encoder(x, src_key_padding_mask=mask)[~padding]
            torch.testing.assert_close(full(x, src_key_padding_mask=mask)[~padding], expected, rtol=1e-9, atol=1e-9)
            seen = []
            for block in snn.sharded_layers(halved).values():  # changed terms must change the output
                before = halved(x, src_key_padding_mask=mask)[~padding]
                with torch.no_grad():
                    block.omega.mul_(2)
                seen.append(not torch.equal(before, halved(x, src_key_padding_mask=mask)[~padding]))
            assert all(seen)


RECURRENT: list[dict[str, Any]] = [
    {},
    {"batch_first": True, "bias": False},
    {"num_layers": 2, "bidirectional": True},
    {"num_layers": 2, "batch_first": True},
]


class TestRecurrent:
    @pytest.mark.sampled(3)
    @pytest.mark.parametrize("options", RECURRENT, ids=str)
    @pytest.mark.parametrize("layer_type", [nn.LSTM, nn.GRU])
    def test_layers_and_directions(self, layer_type: Any, options: dict[str, Any]) -> None:
        check(layer_type(3, 4, **options), rand(5, 2, 3))

    def test_projection_and_initial_state(self) -> None:
        dense = nn.LSTM(3, 5, num_layers=2, proj_size=2).double()
        check(dense, rand(4, 2, 3))
        x, state = rand(4, 2, 3), (rand(2, 2, 2), rand(2, 2, 5))
        torch.testing.assert_close(with_all_terms(dense)(x, state), dense(x, state), rtol=1e-10, atol=1e-10)

    @pytest.mark.parametrize("layer_type", [nn.LSTM, nn.GRU])
    def test_packed_sequences(self, layer_type: Any) -> None:
        dense = layer_type(3, 4, bidirectional=True).double()
        packed = pack_padded_sequence(rand(5, 3, 3), torch.tensor([5, 3, 1]))
        ours, theirs = (pad_packed_sequence(layer(packed)[0])[0] for layer in (with_all_terms(dense), dense))
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)

    def test_copies_pickles_and_moves_keep_working(self, tmp_path: Any) -> None:
        sharded, x = with_all_terms(nn.LSTM(3, 4)), torch.ones(2, 1, 3)
        expected = sharded(x)[0]
        torch.save(sharded, tmp_path / "layer.pt")
        loaded = torch.load(tmp_path / "layer.pt", weights_only=False)
        for twin in (copy.deepcopy(sharded), loaded, copy.deepcopy(sharded).double().float()):
            torch.testing.assert_close(twin(x)[0], expected)
        assert set(sharded.state_dict()) == set(loaded.state_dict())


def test_making_a_layer_draws_no_random_number() -> None:
    for layer_type, dense in [(snn.SpectralShardedLSTM, nn.LSTM(2, 2)), (snn.SpectralShardedLinear, nn.Linear(2, 2))]:
        state = torch.get_rng_state()
        layer_type.like(dense, [2] * len(layer_type.blocks_of(dense)))
        assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("dense", [nn.Linear(4, 6), nn.Conv2d(4, 6, 1), nn.Conv2d(4, 6, 1, groups=2)], ids=str)
def test_the_input_has_the_name_that_torch_gives_it(dense: Any) -> None:
    sharded, x = with_all_terms(dense), torch.ones(2, 4, 4, 4)
    assert torch.equal(sharded(input=x), sharded(x))


@pytest.mark.parametrize(
    "dense", [nn.Linear(4, 6), nn.Conv1d(4, 6, 3), nn.Conv2d(4, 6, 3, groups=2), nn.Conv3d(4, 6, 2)], ids=str
)
def test_weight_has_the_dense_shape(dense: Any) -> None:
    torch.testing.assert_close(with_all_terms(dense).weight, dense.weight.detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "dense",
    [
        nn.Linear(4, 6),
        nn.Conv1d(4, 6, 3, stride=2, padding="valid"),
        nn.Conv2d(4, 6, 3, padding=1, padding_mode="reflect"),
        nn.Conv2d(4, 6, (3, 2), (2, 1), (1, 0), 2, bias=False),
        nn.Conv3d(4, 6, 2, dilation=2),
        nn.Conv2d(4, 6, 3, groups=2),
        nn.LSTM(4, 6, num_layers=2, batch_first=True, bidirectional=True),
        nn.GRU(4, 6, bias=False),
    ],
    ids=str,
)
@pytest.mark.parametrize("spatial", [False, True])
def test_user_code_finds_the_options_of_the_dense_layer(dense: Any, spatial: bool) -> None:
    layer_type: Any = sharded_type(dense, convolutions="spatial" if spatial else "matrix")
    blocks = layer_type.blocks_of(dense)
    sharded = layer_type.like(dense, [1] * len(blocks) if len(blocks) > 1 else 1)
    of_transposed = {"output_padding"}  # which torch gives all convolutions
    names = [name for name in {*type(dense).__constants__} - of_transposed if hasattr(dense, name)]
    assert len(names) > 1
    assert {name: getattr(sharded, name) for name in names} == {name: getattr(dense, name) for name in names}


def test_a_grouped_convolution_needs_the_grouped_type() -> None:
    with pytest.raises(ValueError, match="one group, got a convolution with groups=2"):
        snn.SpectralShardedConv2d.from_dense(nn.Conv2d(4, 4, 3, groups=2), num_terms=2)
    with pytest.raises(ValueError, match=r"the same number of terms, got \(1, 2\)"):
        snn.SpectralShardedGroupedConv2d.from_dense(nn.Conv2d(4, 4, 3, groups=2), num_terms=(1, 2))


def test_contract_check_finds_a_layer_that_forgets_its_multipliers() -> None:
    forgetful = variant(SpectralShardedLinear, matrix=lambda self: self.u @ self.v)
    with pytest.raises(AssertionError, match="the loaded terms are not the weight"):
        check_sharded_layer(forgetful, nn.Linear(4, 3).double(), rand(2, 4))


CONVS: list[Any] = [(F.conv1d, (9,), (2,)), (F.conv2d, (7, 8), (2, 1)), (F.conv3d, (5, 6, 5), (1, 2, 3))]


def refuse(*args: Any) -> Tensor:
    raise AssertionError("a convolution was called")


def dense(x: Tensor, matrix: Tensor, bias: Tensor | None, stride: tuple[int, ...]) -> Tensor:
    """The definition: skip positions, then the matrix at each of those that are left."""
    x = x[(..., *(slice(None, None, step) for step in stride))]
    out = torch.einsum("rc,bc...->br...", matrix, x)
    return out if bias is None else out + bias.view(-1, *(1,) * len(stride))


@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("strided", [True, False])
@pytest.mark.parametrize(("conv", "sizes", "stride"), CONVS)
def test_products_compute_the_convolution(
    conv: Any, sizes: tuple[int, ...], stride: tuple[int, ...], strided: bool, with_bias: bool
) -> None:
    stride = stride if strided else (1,) * len(sizes)
    x, matrix, bias = rand(2, 3, *sizes), rand(4, 3), rand(4) if with_bias else None
    expected = dense(x, matrix, bias, stride)
    torch.testing.assert_close(pointwise(x, matrix, bias, stride, refuse), expected)
    torch.testing.assert_close(
        pointwise(x.transpose(-1, 1).contiguous().transpose(-1, 1), matrix, bias, stride, conv), expected
    )
    torch.testing.assert_close(pointwise(x[0], matrix, bias, stride, conv), expected[0])


def test_large_matrices_at_few_positions_are_convolved() -> None:
    x, matrix = rand(2, 200, 4, 4), rand(200, 200)
    assert not products_are_faster(matrix.numel(), 16)
    with pytest.raises(AssertionError, match="a convolution was called"):
        pointwise(x, matrix, None, (1, 1), refuse)
    torch.testing.assert_close(pointwise(x, matrix, None, (2, 2), F.conv2d), dense(x, matrix, None, (2, 2)))


def test_channels_last_memory_stays_channels_last() -> None:
    out = pointwise(rand(2, 3, 8, 8).to(memory_format=torch.channels_last), rand(4, 3), None, (1, 1), F.conv2d)
    assert out.is_contiguous(memory_format=torch.channels_last)


def test_an_empty_batch_has_an_empty_result() -> None:
    assert pointwise(rand(2, 3, 4, 4)[:0], rand(5, 3), None, (2, 2), F.conv2d).shape == (0, 5, 2, 2)


@pytest.mark.parametrize("size", [2, 24])
@pytest.mark.parametrize("kernel_size", [1, 3])
def test_a_convolution_rebuilds_its_weight_where_that_is_less_work_and_computes_the_same(
    size: int, kernel_size: int
) -> None:
    """At 24 x 24 positions all terms cost more than the weight; at 2 x 2 they do not."""
    conv = nn.Conv2d(6, 6, kernel_size, padding=kernel_size // 2, dtype=torch.float64)
    x = rand(1, 6, size, size)
    assert ("MmBackward0" in graph(SpectralShardedConv2d.from_dense(conv, num_terms=6)(x))) == (size == 24)
    check_sharded_layer(SpectralShardedConv2d, conv, x)


def graph(output: Tensor) -> set[str]:
    """Names of the functions that made a tensor."""
    names, todo = set(), [output.grad_fn]
    while todo:
        if (node := todo.pop()) is not None:
            names.add(node.name())
            todo += [parent for parent, _ in node.next_functions]
    return names


class Mix(nn.Module):
    """Mixes vectors that are columns, the second argument, and gates the result."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 6, generator=torch.Generator().manual_seed(0)))

    def forward(self, gate: Tensor, x: Tensor) -> Tensor:
        return gate * (self.weight @ x)


class ShardedMix(SpectralShardedLayer):
    """Always applies the factors."""

    @classmethod
    def like(cls, dense: Any, num_terms: Any) -> Any:
        (n,) = num_terms
        return cls(tuple(dense.weight.shape), n, False, dense.weight.device, dense.weight.dtype)

    def forward(self, gate: Tensor, x: Tensor) -> Tensor:
        return gate * (self.scaled_u() @ (self.v @ x))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.mix, self.after = nn.Linear(5, 6), Mix(), nn.Linear(8, 2)
        self.gate = nn.Parameter(torch.ones(8, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.mix(self.gate, x=self.before(x).T).T)


EXAMPLE = torch.zeros(200, 5)  # so many positions that a linear layer would rebuild its weight at all terms


def test_the_layer_keeps_the_contract() -> None:
    gate, x = torch.ones(8, 1).double(), torch.randn(6, 9, generator=torch.Generator().manual_seed(0)).double()
    check_sharded_layer(ShardedMix, Mix().double(), gate, x)

    class Shifted(ShardedMix):
        def forward(self, gate: Tensor, x: Tensor) -> Tensor:
            return super().forward(gate, x) + 1.0

    with pytest.raises(AssertionError, match="differs"):
        check_sharded_layer(Shifted, Mix().double(), gate, x)


@pytest.mark.parametrize("keep_ratio", [0.1, 0.5, 1.0])
def test_its_costs_are_counted(keep_ratio: float) -> None:
    net = Net()
    blocks = tuple(block.within("mix") for block in ShardedMix.blocks_of(net.mix))
    plan = ModulePlan((LayerPlan("mix", "Mix", ((8, 6),), blocks, ShardedMix, "of another package"),))
    cost = ls.cost_table(net, ls.SpectralSharding(layers=plan), [keep_ratio], EXAMPLE).at[keep_ratio]
    client = replace_layers(net, keep_ratio, layers=plan)
    with FlopCounterMode(display=False) as counter:
        client(EXAMPLE)
    assert 2 * cost.macs == counter.get_total_flops()
    assert cost.macs == len(EXAMPLE) * (5 * 6 + math.ceil(keep_ratio * 6) * (6 + 8) + 8 * 2)
