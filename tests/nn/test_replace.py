import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from lightning_spectral.nn import SpectralShardedConv2d, SpectralShardedLinear, replace_layers, sharded_layers, validate
from lightning_spectral.nn.treatment import plan_layers


def net() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 6, 3), nn.Flatten(), nn.Linear(24, 10), nn.Linear(10, 3)
    )


def reasons(module: nn.Module, **options: object) -> dict[str, str]:
    return {layer.name: layer.reason for layer in plan_layers(module, **options).layers}  # type: ignore[arg-type]


def test_every_layer_has_a_treatment_and_a_reason() -> None:
    assert reasons(net()) == {
        "0": "first affine layer",
        "1": "not a linear layer or convolution",
        "2": "affine",
        "4": "affine",
        "5": "last affine layer",
    }


def test_validate_prints_the_table_and_changes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    module = net()
    before = copy.deepcopy(module.state_dict())
    report = validate(module, exclude=["4"])
    printed = capsys.readouterr().out
    assert report.sharded_names == ("2",)
    assert "2      Conv2d       6x4x3x3  6   sharded    affine" in printed
    assert "excluded by name" in printed
    assert all(torch.equal(before[name], value) for name, value in module.state_dict().items())


def test_replaced_copy_holds_the_largest_terms_and_the_original_is_untouched() -> None:
    module = net()
    sharded = replace_layers(module, keep_ratio=0.5)
    assert isinstance(sharded[2], SpectralShardedConv2d)
    assert isinstance(sharded[4], SpectralShardedLinear)
    assert (sharded[2].num_terms, sharded[4].num_terms) == (3, 5)
    assert type(module[2]) is nn.Conv2d
    x = torch.randn(2, 1, 6, 6, generator=torch.Generator().manual_seed(0))
    everything = replace_layers(module, keep_ratio=1.0, keep_first_and_last_dense=False)
    assert len(sharded_layers(everything)) == 4
    torch.testing.assert_close(everything.eval()(x), module.eval()(x), rtol=1e-4, atol=1e-5)


def test_replaced_layers_keep_the_mode_they_were_in() -> None:
    module = net().eval()
    module[2].train()
    sharded = replace_layers(module, keep_ratio=0.5)
    assert (sharded[2].training, sharded[4].training) == (True, False)


def test_a_module_registered_twice_is_replaced_in_both_places() -> None:
    shared = nn.Linear(4, 4)
    module = nn.Sequential(nn.Linear(4, 4), shared, nn.ReLU(), shared, nn.Linear(4, 2))
    sharded = replace_layers(module, keep_ratio=0.5)
    assert isinstance(sharded[1], SpectralShardedLinear)
    assert sharded[1] is sharded[3]


def test_weight_shared_by_two_layers_is_refused_with_both_names() -> None:
    module = nn.ModuleDict({"embed": nn.Embedding(5, 4), "mid": nn.Linear(4, 4), "head": nn.Linear(4, 5, bias=False)})
    module["head"].weight = module["embed"].weight
    with pytest.raises(ValueError, match=r"'embed' and 'head'.*Exclude"):
        plan_layers(module, keep_first_and_last_dense=False)
    assert plan_layers(module, keep_first_and_last_dense=False, exclude=["head"]).sharded_names == ("mid",)


def test_what_cannot_be_sharded_says_why() -> None:
    class Special(nn.Linear):
        pass

    module = nn.ModuleDict(
        {
            "first": nn.Linear(4, 4),
            "grouped": nn.Conv2d(4, 4, 3, groups=2),
            "special": Special(4, 4),
            "one_d": nn.Conv1d(4, 4, 3),
            "frozen": nn.Linear(4, 4).requires_grad_(False),
            "single": nn.Linear(4, 1),
            "computed": parametrizations.weight_norm(nn.Linear(4, 4)),
            "plain": nn.Linear(4, 4),
            "last": nn.Linear(4, 4),
        }
    )
    why = reasons(module)
    assert why["grouped"] == "more than one group"
    assert why["special"] == "Special is not supported"
    assert why["one_d"] == "Conv1d is not supported"
    assert why["frozen"] == "frozen"
    assert why["single"] == "a single term"
    assert "not supported" in why["computed"]
    assert why["plain"] == "affine"


def test_nothing_to_shard_is_an_error_with_every_reason() -> None:
    with pytest.raises(ValueError, match=r"(?s)No layer of this module can be sharded.*first affine.*last affine"):
        plan_layers(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)))


@pytest.mark.parametrize(
    ("exclude", "message"),
    [(["fc"], "pattern 'fc' matches no layer; the layers are: 0, 1, 2, 4, 5"), ("4", "is a sequence of patterns")],
)
def test_a_pattern_that_cannot_be_meant_is_refused(exclude: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan_layers(net(), exclude=exclude)  # type: ignore[arg-type]


def test_lazy_layers_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="no weight yet: 1; run one forward pass"):
        plan_layers(nn.Sequential(nn.Linear(2, 2), nn.LazyLinear(3), nn.Linear(3, 2)))


@pytest.mark.parametrize("keep_ratio", [0.0, -0.1, 1.5, float("nan")])
def test_keep_ratio_out_of_range_is_refused(keep_ratio: float) -> None:
    with pytest.raises(ValueError, match=r"`keep_ratio` must be in \(0, 1\]"):
        replace_layers(net(), keep_ratio)
