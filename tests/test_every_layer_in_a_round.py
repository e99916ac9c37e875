"""Every kind of layer goes through whole rounds: without training nothing changes, and training changes every layer."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from federation import Fit, same_state
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from toy_models import LitNet, Net, variant

import lightning_spectral as ls
from lightning_spectral.algorithms.filter import Plan
from lightning_spectral.algorithms.spectral.algorithm import SpectralSide
from lightning_spectral.nn.plan.planner import plan_layers


def first_output(core: nn.Module) -> Net:
    return Net(lambda net, x: net.core(x)[0], core=core)


class Conv1D(nn.Module):
    """The layer of the transformers library, which the package recognises by its qualified name."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))
        self.bias = nn.Parameter(torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + self.bias


Conv1D.__module__, Conv1D.__qualname__ = "transformers.pytorch_utils", "Conv1D"


def image(core: nn.Module, *shape: int) -> nn.Module:
    return nn.Sequential(nn.Unflatten(1, shape), core, nn.Flatten(2), nn.AdaptiveAvgPool1d(1), nn.Flatten())


def sequence(core: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Unflatten(1, (4, 8)), core, nn.Flatten())


CORES: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: sequence(nn.Linear(8, 8)),
    "split": lambda: sequence(nn.Linear(8, 12)),
    "Conv1D": lambda: sequence(Conv1D()),
    "conv1d": lambda: image(nn.Conv1d(4, 6, 3, padding=1), 4, 8),
    "conv2d": lambda: image(nn.Conv2d(2, 6, 3, padding=1), 2, 4, 4),
    "spatial conv2d": lambda: image(nn.Conv2d(2, 6, 3, padding=1), 2, 4, 4),
    "conv3d": lambda: image(nn.Conv3d(1, 6, 2), 1, 2, 4, 4),
    "grouped": lambda: image(nn.Conv2d(2, 8, 3, groups=2), 2, 4, 4),
    "attention": lambda: sequence(
        Net(lambda net, x: net.core(x, x, x, need_weights=False)[0], core=nn.MultiheadAttention(8, 2, batch_first=True))
    ),
    "encoder": lambda: sequence(nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)),
    "lstm": lambda: sequence(first_output(nn.LSTM(8, 5, 2, batch_first=True, bidirectional=True))),
    "gru": lambda: sequence(first_output(nn.GRU(8, 5, batch_first=True))),
}


def lit_core(core: nn.Module) -> Any:
    lit = variant(LitNet, forward=lambda self, x: self.head(self.core(x)))(nn.Sequential())
    lit.core, lit.head = core, nn.LazyLinear(3)
    lit(torch.zeros(2, 32))
    return lit


@pytest.fixture
def flat() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(48, 32, generator=generator), torch.randint(3, (48,), generator=generator))


@pytest.fixture
def fit(fit: Fit) -> Fit:
    return partial(fit, clients_per_round=6)


def shared_out(dataset: TensorDataset, num_clients: int = 6) -> ls.FederatedDataModule:
    return ls.FederatedDataModule(dataset, ls.IIDPartitioner(num_clients), batch_size=8)


# half of the terms of tiny random matrices are a poor copy: here they only need to train
flat_spectra = pytest.mark.filterwarnings("ignore:Round 0. sub-models of keep ratio:lightning_spectral.SpectralWarning")


def options_for(name: str, keep_ratio: Any) -> ls.SpectralSharding:
    """Options with which any layer can be sharded, and weights change only by training."""
    choices = ls.LayerChoices(
        exclude=["head"],
        split={"core.1": 3} if name == "split" else {},
        keep_first_and_last_dense=False,
        convolutions="spatial" if name == "spatial conv2d" else "matrix",
    )
    return ls.SpectralSharding(keep_ratio=keep_ratio, frobenius_decay=0.0, layers=choices, spectral_start=None)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", CORES)
def test_one_client_with_all_terms_returns_the_weight_it_trained(name, flat, fit, monkeypatch):
    lit = lit_core(CORES[name]()).double()
    dataset = TensorDataset(flat.tensors[0].double(), flat.tensors[1])
    algorithm = options_for(name, 1.0)
    report = algorithm.plan(lit)
    kept: dict[str, Tensor] = {}
    collect = SpectralSide.collect

    def collect_and_keep(side: SpectralSide, client: Any, download: Any) -> Any:
        for holder in report.blocks:
            kept[holder] = client.get_submodule(holder).matrix().detach().clone()
        return collect(side, client, download)

    monkeypatch.setattr(SpectralSide, "collect", collect_and_keep)
    before = {key: value.clone() for key, value in lit.state_dict().items()}
    fit(lit, shared_out(dataset, num_clients=1), algorithm=algorithm, clients_per_round=1)
    assert kept
    for holder, block in report.blocks.items():
        weight = lit.get_parameter(block.parameter).detach()
        torch.testing.assert_close(block.matrix(weight), kept[holder], rtol=1e-9, atol=1e-9)
        assert not torch.equal(weight, before[block.parameter])


@pytest.mark.sampled(1)
@flat_spectra
@pytest.mark.parametrize("name", CORES)
def test_training_changes_every_layer_and_a_round_without_it_no_bit(name: str, flat: TensorDataset, fit: Fit) -> None:
    lit = lit_core(CORES[name]())
    algorithm = options_for(name, {0.3: 0.5, 0.7: 0.5})
    before = {key: value.clone() for key, value in lit.state_dict().items()}
    assert same_state(fit(lit, shared_out(flat), algorithm=options_for(name, 0.5), local_epochs=0).state, before)
    fit(lit, shared_out(flat), algorithm=algorithm)
    after = lit.state_dict()
    names = algorithm.plan(lit).sharded_weights
    assert names
    assert not [name for name in names if torch.equal(before[name], after[name])]
    assert all(bool(torch.isfinite(value).all()) for value in after.values())


def lit_of(forward: Callable[[Any, Tensor], Tensor], traced: bool, **layers: nn.Module) -> Any:
    """Layers under given names, with a `forward` that the test passes."""
    kind = variant(LitNet, forward=lambda self, x: self.head(forward(self, self.stem(x))))
    lit = kind(nn.Sequential(), example=torch.zeros(1, 32) if traced else None)
    for name, layer in {"stem": nn.Linear(32, 8), "head": nn.Linear(8, 3), **layers}.items():
        setattr(lit, name, layer)
    return lit


@flat_spectra
@pytest.mark.parametrize("traced", [True, False])
def test_a_layer_used_twice_trains(traced: bool, flat: TensorDataset, fit: Fit) -> None:
    lit = lit_of(lambda self, x: self.mid(self.mid(x).relu()), traced, mid=nn.Linear(8, 8))
    before = lit.mid.weight.detach().clone()
    fit(lit, shared_out(flat), algorithm=ls.SpectralSharding(keep_ratio=0.5, spectral_start=None))
    assert not torch.equal(lit.mid.weight, before)


def test_a_layer_never_used_stays_dense_if_seen_and_is_named_if_not(flat: TensorDataset, fit: Fit) -> None:
    lit = lit_of(lambda self, x: self.mid(x), True, mid=nn.Linear(8, 8), spare=nn.Linear(8, 8))
    fit(lit, shared_out(flat), algorithm=(algorithm := ls.SpectralSharding(keep_ratio=0.5)))
    assert list(algorithm.plan(lit).sharded) == ["mid"]
    # registered last, so that only `exclude` could save it: the head is registered before
    with pytest.warns(ls.SpectralWarning, match=r"no client has given a gradient to these sharded layers: mid2\."):
        fit(
            lit_of(lambda self, x: self.mid(x), False, mid=nn.Linear(8, 8), mid2=nn.Linear(8, 8), last=nn.Linear(8, 8)),
            shared_out(flat),
            algorithm=ls.SpectralSharding(keep_ratio=0.5),
        )


def test_a_tied_head_stays_tied_and_dense(fit: Fit) -> None:
    layers = {"embed": nn.Embedding(5, 8), "mid": nn.Linear(8, 8), "head": nn.Linear(8, 5, bias=False)}
    lit = LitNet(Net(lambda net, tokens: net.head(net.mid(net.embed(tokens)).mean(1)), **layers))
    lit.net.head.weight, generator = lit.net.embed.weight, torch.Generator().manual_seed(0)
    before = lit.net.embed.weight.detach().clone()
    tokens = TensorDataset(torch.randint(5, (48, 4), generator=generator), torch.randint(5, (48,), generator=generator))
    fit(lit, shared_out(tokens), algorithm=ls.SpectralSharding(keep_ratio=0.5))
    assert lit.net.head.weight is lit.net.embed.weight
    assert not torch.equal(lit.net.embed.weight, before)


def test_a_frozen_layer_stays_dense_and_unchanged(flat: TensorDataset, fit: Fit) -> None:
    lit = lit_of(
        lambda self, x: self.mid(self.base(x)), True, base=nn.Linear(8, 8).requires_grad_(False), mid=nn.Linear(8, 8)
    )
    before = lit.base.weight.detach().clone()
    fit(lit, shared_out(flat), algorithm=ls.SpectralSharding(keep_ratio=0.5))
    assert torch.equal(lit.base.weight, before)


# Dynamo itself looks at `.grad` of an inner tensor when it traces a second batch size
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@flat_spectra
@pytest.mark.parametrize("in_place", [True, False])
def test_a_compiled_part_trains_its_sharded_layers(in_place: bool, flat: TensorDataset, fit: Fit) -> None:
    net: Any = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    if in_place:
        net.compile(backend="eager")
    else:
        net = torch.compile(net, backend="eager")
    lit = lit_of(lambda self, x: self.net(x), False, net=net)
    names = [name for name in lit.state_dict() if name.startswith("net") and name.endswith("weight")]
    before = {name: lit.state_dict()[name].clone() for name in names}
    fit(lit, shared_out(flat), algorithm=options_for("", 0.5))
    assert all(not torch.equal(before[name], lit.state_dict()[name]) for name in names)


def test_a_low_rank_update_of_a_frozen_layer_stays_whole_and_of_a_trained_one_the_factor_that_is_zero(flat, fit):
    layers = {"base": nn.Linear(8, 8), "down": nn.Linear(8, 2), "up": nn.Linear(2, 8)}
    lit = lit_of(lambda self, x: self.base(x) + self.up(self.down(x)), True, **layers)
    nn.init.zeros_(lit.up.weight)
    plan = ls.SpectralSharding().plan(lit)
    assert [*plan.missing_rank] == ["up"]
    assert {"base", "down"} <= {*plan.sharded}
    lit.base.requires_grad_(False)
    with pytest.warns(ls.SpectralWarning, match="shards no layer of Lit"):
        fit(lit, shared_out(flat), algorithm=ls.SpectralSharding(keep_ratio=0.5))
    assert bool(lit.up.weight.any())


def test_a_plan_fixes_what_is_sharded_and_knows_its_module(flat, fit, capsys):
    lit = lit_of(lambda self, x: self.b(self.a(x)), False, a=nn.Linear(8, 8), b=nn.Linear(8, 8))
    plan = ls.validate(lit, torch.zeros(1, 32), ls.LayerChoices(exclude=["a"]))
    algorithm = ls.SpectralSharding(keep_ratio=0.5, layers=plan)
    fit(lit, shared_out(flat), algorithm=algorithm)
    assert list(algorithm.plan(lit).sharded) == ["b"]
    wider = lit_of(lambda self, x: x, False, a=nn.Linear(8, 8), b=nn.Linear(9, 8))
    with pytest.raises(ValueError, match=r"another module: b.weight is \(8, 9\) as a matrix, not \(8, 8\)"):
        algorithm.check(Plan(wider, algorithm))
    with pytest.raises(ValueError, match=r"another module: this one has no weights b\.weight"):
        algorithm.check(Plan(lit_of(lambda self, x: x, False, a=nn.Linear(8, 8)), algorithm))
    with pytest.raises(ValueError, match="for a plan, pass them to `validate`"):
        ls.SpectralSharding(layers=plan, exclude=["b"])


@pytest.mark.filterwarnings("ignore:Round 0. the running averages:lightning_spectral.SpectralWarning")  # meant to stay
def test_buffers_can_keep_the_servers_value(flat: TensorDataset, fit: Fit) -> None:
    def make() -> Any:
        return lit_of(lambda self, x: self.mid(self.norm(x)), True, norm=nn.BatchNorm1d(8), mid=nn.Linear(8, 8))

    for algorithm in (ls.FedAvg(), ls.SpectralSharding(), ls.SpectralSharding(layers=plan_layers(make()))):
        lit = make()
        fit(lit, shared_out(flat), algorithm=algorithm, buffers={"*running_*": "server"})
        assert torch.equal(lit.norm.running_mean, torch.zeros(8))
        assert not torch.equal(lit.norm.weight, torch.ones(8))
