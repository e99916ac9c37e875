import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter
from torch.nn.utils import parametrizations
from toy_models import Detour

from lightning_spectral.nn import (
    LayerChoices,
    SpectralShardedConv2d,
    SpectralShardedLinear,
    plan_layers,
    plan_of,
    replace_layers,
    sharded_layers,
    validate,
)


def net() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 6, 3), nn.Flatten(), nn.Linear(24, 10), nn.Linear(10, 3)
    )


def reasons(module: nn.Module, **choices: Any) -> dict[str, str]:
    return {layer.name: layer.reason for layer in plan_layers(module, choices=LayerChoices(**choices)).layers}


def test_every_layer_is_sharded_or_dense_for_a_reason() -> None:
    why = {"0": "first layer", "1": "not an affine layer", "2": "affine", "4": "affine", "5": "last layer"}
    assert reasons(net()) == why


def test_printing_a_plan_shows_it_once_and_changes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    module = net()
    before = copy.deepcopy(module.state_dict())
    print(plan := validate(module, layers=LayerChoices(exclude=["4"])))
    printed = capsys.readouterr().out
    assert printed.count("in forward") == 1
    assert list(plan.sharded) == ["2"]
    assert "2      Conv2d       6x4x3x3  6   ?           sharded  affine" in printed
    assert "excluded by name" in printed
    assert all(torch.equal(before[name], value) for name, value in module.state_dict().items())


def test_replaced_copy_holds_the_largest_terms_and_the_original_is_untouched() -> None:
    module = net().eval()
    module[2].train()
    sharded = replace_layers(module, keep_ratio=0.5)
    assert (sharded[2].training, sharded[4].training) == (True, False)  # as before
    assert isinstance(sharded[2], SpectralShardedConv2d)
    assert isinstance(sharded[4], SpectralShardedLinear)
    assert (sharded[2].num_terms, sharded[4].num_terms) == (3, 5)
    assert type(module[2]) is nn.Conv2d
    x = torch.randn(2, 1, 6, 6, generator=torch.Generator().manual_seed(0))
    everything = replace_layers(module, 1.0, layers=LayerChoices(keep_first_and_last_dense=False))
    assert len(sharded_layers(everything)) == 4
    torch.testing.assert_close(everything.eval()(x), module.eval()(x), rtol=1e-4, atol=1e-5)


def test_a_module_registered_twice_is_replaced_in_both_places() -> None:
    shared = nn.Linear(4, 4)
    sharded = replace_layers(nn.Sequential(nn.Linear(4, 4), shared, nn.ReLU(), shared, nn.Linear(4, 2)), keep_ratio=0.5)
    assert isinstance(sharded[1], SpectralShardedLinear)
    assert sharded[1] is sharded[3]


def test_tied_weights_stay_dense_and_name_each_other() -> None:
    module = nn.ModuleDict(
        {"a": nn.Linear(4, 4), "embed": nn.Embedding(5, 4), "b": nn.Linear(4, 4), "head": nn.Linear(4, 5, bias=False)}
    )
    module["head"].weight = module["embed"].weight
    module["b"].weight = module["a"].weight
    why = reasons(module, keep_first_and_last_dense=False)
    assert why["head"] == "shares its weight with 'embed'"
    assert (why["a"], why["b"]) == ("shares its weight with 'b'", "shares its weight with 'a'")


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated:FutureWarning")
def test_what_cannot_be_sharded_says_why() -> None:
    class Special(nn.Linear):
        pass

    module = nn.ModuleDict(
        {
            "first": nn.Linear(4, 4),
            "depthwise": nn.Conv2d(4, 4, 3, groups=4),
            "special": Special(4, 4),
            "up": nn.ConvTranspose1d(4, 4, 3),
            "cell": nn.LSTMCell(4, 4),
            "frozen": nn.Linear(4, 4).requires_grad_(False),
            "single": nn.Linear(4, 1),
            "computed": parametrizations.weight_norm(nn.Linear(4, 4)),
            "hooked": nn.utils.weight_norm(nn.Linear(4, 4)),
            "attention": nn.MultiheadAttention(4, 2, add_bias_kv=True),
            "plain": nn.Linear(4, 4),
            "last": nn.Linear(4, 4),
        }
    )
    assert (
        reasons(module).items()
        >= {
            "depthwise": "depthwise: a single term in each group",
            "special": "Special is not supported",
            "up": "ConvTranspose1d is not supported",
            "cell": "LSTMCell is not supported",
            "frozen": "frozen",
            "single": "a single term",
            "computed": "its weight is parametrised",
            "hooked": "its weight is computed, not a plain parameter",
            "attention": "`add_bias_kv` and `add_zero_attn` are not supported",
            "attention.out_proj": "affine",
            "plain": "affine",
        }.items()
    )


def problems(module: nn.Module, **choices: Any) -> str:
    with pytest.raises(ValueError, match="cannot be sharded as asked") as caught:
        plan_layers(module, choices=LayerChoices(**choices)).check()
    return str(caught.value)


def test_nothing_to_shard_is_an_error_with_every_reason() -> None:
    message = problems(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)))
    assert all(text in message for text in ("No layer of this module can be sharded", "first layer", "last layer"))


def test_all_problems_come_in_one_error() -> None:
    module = nn.Sequential(nn.Linear(4, 6), nn.LazyLinear(4), nn.Linear(4, 6), nn.Linear(6, 5), nn.Linear(5, 2))
    choices: dict[str, Any] = {"exclude": ["fc"], "split": {"3": 2, "qkv": 3}}
    for text in (problems(module, **choices), str(validate(module, layers=LayerChoices(**choices)))):
        assert "Lazy layers have no weight yet: 1; run one forward pass" in text
        assert "`exclude` pattern 'fc' matches no layer; known names: 0, 1, 2, 3, 4" in text
        assert "`split` pattern 'qkv' matches no layer" in text
        assert "`split` of '3': A weight of 5 rows cannot be split into 2 equal parts" in text


def test_only_linear_layers_are_split() -> None:
    assert "`split` is for linear layers; '2' is a Conv2d" in problems(net(), split={"2": 2})


def test_the_first_and_the_last_layer_are_those_that_run_first_and_last() -> None:
    module = Detour()
    state, mode = torch.get_rng_state(), copy.deepcopy(module.state_dict())
    plan = plan_layers(module, torch.zeros(1, 3))
    assert [layer.name for layer in plan.layers] == ["stem", "mid.0", "mid.1", "head", "unused"]
    why = {layer.name: (layer.reason, layer.in_forward) for layer in plan.layers}
    assert why["stem"] == ("first layer", True)
    assert why["head"] == ("last layer", True)
    assert why["unused"] == ("not in the forward pass", False)
    assert list(plan.sharded) == ["mid.0"]
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(mode[name], value) for name, value in module.state_dict().items())
    assert module.training
    assert reasons(module)["head"] == "first layer"  # nothing traced: as registered


def test_example_inputs_come_as_a_tensor_a_tuple_a_dictionary_or_with_the_module() -> None:
    module, x = Detour(), torch.zeros(1, 3)
    expected = plan_layers(module, x)
    assert plan_layers(module, (x, True)) == expected
    assert plan_layers(module, {"x": x, "twice": True}) == expected
    module.example_input_array = x  # type: ignore[assignment]
    assert plan_layers(module) == expected


def test_an_embedding_before_the_first_affine_layer_is_the_first_layer() -> None:
    module = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 5))
    for example in (None, torch.zeros(1, 2, dtype=torch.long)):
        why = {layer.name: layer.reason for layer in plan_layers(module, example).layers}
        assert why == {"0": "not an affine layer", "1": "affine", "2": "affine", "3": "last layer"}


def test_an_attentions_output_projection_runs_with_it() -> None:
    plan = plan_layers(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), torch.zeros(1, 3, 8))
    assert list(plan.sharded) == ["self_attn.out_proj", "linear1"]
    assert all(layer.in_forward for layer in plan.layers)


def test_buffers_and_their_policies_are_in_the_plan() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4), nn.Linear(4, 4))
    module.register_buffer("mask", torch.tensor([0.0, float("-inf")]))
    module.register_buffer("cache", torch.zeros(1), persistent=False)
    assert {buffer.name: buffer.policy for buffer in plan_layers(module, buffers={"*_var": "server"}).buffers} == {
        "mask": "largest where -inf, else averaged",
        "cache": "the server's: no checkpoint holds it",
        "1.running_mean": "averaged",
        "1.running_var": "the server's: as asked",
        "1.num_batches_tracked": "the server's: not a floating-point number",
    }


@pytest.mark.parametrize("granularity", [1, 4])
def test_packed_layers_recurrent_layers_and_groups_hold_terms_for_each_part(granularity: int) -> None:
    module = nn.ModuleDict(
        {
            "embed": nn.Embedding(5, 8),
            "qkv": nn.Linear(8, 24),
            "conv": nn.Conv1d(8, 16, 3, groups=2),
            "lstm": nn.LSTM(8, 6),
            "head": nn.Linear(8, 5),
        }
    )
    sharded = replace_layers(module, 0.25, layers=LayerChoices(split={"qkv": 3}, term_granularity=granularity))
    held = {name: block.num_terms for name, block in sharded_layers(sharded).items()}
    gates = {f"lstm.blocks.weight_{source}_l0_{gate}": 2 for source in ("ih", "hh") for gate in "ifgo"}
    parts = {f"qkv.blocks.{i}": 2 for i in range(3)} | {f"conv.blocks.{i}": 2 for i in range(2)}
    assert held == {name: n if granularity == 1 else 4 for name, n in (parts | gates).items()}


def test_a_layer_whose_forward_was_replaced_stays_dense_and_keeps_it() -> None:
    """As accelerate's hooks do."""
    module = nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)])
    module[1].forward = partial(lambda layer, x: 2 * nn.functional.linear(x, layer.weight), module[1])
    assert reasons(module)["1"] == "its `forward` was replaced on the instance"
    copied = replace_layers(module, 0.5)
    assert isinstance(copied[2], SpectralShardedLinear)
    nn.init.zeros_(copied[1].weight)
    assert not copied[1](torch.ones(1, 4)).any()


class Linear(nn.Module):
    """A linear layer as in graph libraries: not a subclass of torch's, and perhaps without a shape yet."""

    __module__ = "graphs.nn.dense"

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        is_known = in_channels > 0
        self.weight = nn.Parameter(torch.ones(out_channels, in_channels)) if is_known else UninitializedParameter()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight.T


def test_a_layer_named_as_torchs_stays_dense_under_its_packages_name() -> None:
    plan = validate(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), Linear(8, 8), nn.Linear(8, 8)), torch.zeros(2, 8))
    assert plan.sharded_weights == ("1.weight",)
    assert (plan.layers[2].type_name, plan.layers[2].reason) == ("graphs.Linear", "graphs.Linear is not supported")
    assert "graphs.Linear" in str(plan)


def test_a_weight_without_a_shape_is_named() -> None:
    module = nn.Sequential(nn.Linear(8, 8), Linear(-1, 8), nn.Linear(8, 8))
    with pytest.raises(ValueError, match="Lazy layers have no weight yet: 1; run one forward pass first"):
        plan_of(module)
