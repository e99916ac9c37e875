"""A compiled part of the user's module stays compiled: clients are new values in the same parameters."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch._dynamo
from federation import Fit, seeded
from observed_runs import acting
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.utils.data import TensorDataset
from toy_models import LitNet, Net

import lightning_spectral as ls


def three_layers(compiled: bool = True) -> LitNet:
    net: Any = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 12), nn.ReLU(), nn.Linear(12, 3))
    return LitNet(torch.compile(net, backend="aot_eager") if compiled else net, momentum=0.9)


class CountGraphs(ls.RoundCallback):
    """Number of compiled graphs after each client, and the keep ratios so far."""

    def __init__(self) -> None:
        self.graphs: list[int] = []
        self.ratios: list[float] = []

    def on_client_end(self, trainer: Any, pl_module: Any, turn: Any) -> None:
        self.graphs.append(counters["stats"]["unique_graphs"])
        self.ratios.append(turn.download.capacity)


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()
    counters.clear()


@pytest.fixture
def fit(fit: Fit) -> Fit:
    """Fits of three rounds, each with two local epochs and clipped gradients."""
    return partial(fit, max_epochs=3, local_epochs=2, local_hooks=[ls.GradientClip(1.0)])


def clients(toy: TensorDataset, batch_size: int) -> ls.FederatedDataModule:
    """Ten examples for each of twelve clients."""
    return ls.FederatedDataModule(toy, ls.IIDPartitioner(num_clients=12), batch_size=batch_size)


def spectral(keep_ratio: Any) -> ls.SpectralSharding:
    return ls.SpectralSharding(keep_ratio=keep_ratio)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("algorithm", [ls.FedAvg(), spectral(0.3)], ids=["dense", "spectral"])
def test_later_clients_and_rounds_recompile_nothing(algorithm: Any, toy: TensorDataset, fit: Fit) -> None:
    with torch._dynamo.config.patch(error_on_recompile=True):
        fit(seeded(three_layers), clients(toy, 5), algorithm=algorithm, callbacks=[count := CountGraphs()])
    assert count.graphs == [1] * 12


def test_every_keep_ratio_has_one_graph(toy: TensorDataset, fit: Fit) -> None:
    mixed = replace(spectral({0.3: 0.5, 0.6: 0.5}), strategy=ls.TopN())  # multipliers, if any, are another graph
    fit(seeded(three_layers), clients(toy, 5), algorithm=mixed, callbacks=[count := CountGraphs()])
    assert count.graphs == [len(set(count.ratios[: i + 1])) for i in range(12)]
    assert count.graphs[-1] == 2


def test_a_keep_ratio_has_another_graph_where_terms_are_multiplied(toy: TensorDataset, fit: Fit) -> None:
    mixed = spectral({0.3: 0.5, 0.6: 0.5})
    fit(seeded(three_layers), clients(toy, 5), algorithm=mixed, callbacks=[count := CountGraphs()])
    assert 2 < count.graphs[-1] <= 4


@pytest.mark.slow
def test_a_smaller_last_batch_recompiles_once_in_the_first_client(toy: TensorDataset, fit: Fit) -> None:
    fit(seeded(three_layers), clients(toy, 4), callbacks=[count := CountGraphs()])  # batches of 4, 4 and 2
    assert count.graphs == [2] * 12


# all terms, since the draw depends on the names of layers, which `torch.compile` changes
@pytest.mark.sampled(1)
@pytest.mark.parametrize("algorithm", [ls.FedAvg(), spectral(1.0)], ids=["dense", "spectral"])
def test_a_compiled_run_has_the_weights_of_a_plain_one(algorithm: Any, toy: TensorDataset, fit: Fit) -> None:
    compiled = fit(seeded(three_layers), clients(toy, 5), algorithm=algorithm).module
    plain = fit(seeded(three_layers, compiled=False), clients(toy, 5), algorithm=algorithm).module
    for ours, theirs in zip(compiled.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)  # float32: same operations, maybe reordered


class Block(nn.Module):
    """A class of the user's own: torch compiles its own classes in place without an effect."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).tanh()


def in_place(compiled: list[Any], parts: Sequence[str] = ("net",)) -> LitNet:
    """Some parts are compiled in place, by a backend that notes what it compiles."""

    def backend(graph: Any, inputs: Any) -> Any:
        compiled.append(graph)
        return graph

    layers = {"first": Block(6, 12), "second": Block(12, 12), "head": nn.Linear(12, 3)}
    lit = LitNet(Net(lambda net, x: net.head(net.second(net.first(x))), **layers), momentum=0.9)
    for part in parts:
        lit.get_submodule(part).compile(backend=backend)
    return lit


# Dynamo itself looks at `.grad` of an inner tensor when it traces what has a gradient already
dynamo_warns = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")


@pytest.mark.sampled(1)
@dynamo_warns
@pytest.mark.parametrize("parts", [["net"], ["net.first", "net.second"]], ids=["a network", "its blocks"])
@pytest.mark.parametrize("algorithm", [ls.FedAvg(), spectral(0.3)], ids=["dense", "spectral"])
def test_parts_that_are_compiled_in_place_train_compiled(algorithm, parts, toy, fit):
    """With the weights of a plain run; the parts are still compiled when it ends."""
    made: list[Any] = []
    lit = seeded(in_place, made, parts)
    calls = [lit.get_submodule(part)._compiled_call_impl for part in parts]
    compiled = fit(lit, clients(toy, 5), algorithm=algorithm).weights
    assert len(made) == len(parts)
    assert [lit.get_submodule(part)._compiled_call_impl for part in parts] == calls
    plain = fit(seeded(in_place, made, []), clients(toy, 5), algorithm=algorithm).weights
    assert len(made) == len(parts)
    torch.testing.assert_close(compiled, plain, rtol=1e-5, atol=1e-6)  # float32: same operations, maybe reordered


@dynamo_warns
def test_parts_compiled_in_place_compile_in_the_first_round_once_for_each_keep_ratio(toy, fit):
    made: list[Any] = []
    after: list[int] = []
    fit(
        seeded(in_place, made),
        clients(toy, 5),
        algorithm=spectral([0.3, 0.6] * 6),
        clients_per_round=12,
        max_epochs=4,
        callbacks=[acting(on_round_end=lambda trainer, model, summary: after.append(len(made)))],
    )
    assert after == [2] * 4


def test_a_lightning_module_that_is_compiled_in_place_trains(toy: TensorDataset, fit: Fit) -> None:
    module = seeded(three_layers, compiled=False)
    module.compile(backend="aot_eager")
    compiled = fit(module, clients(toy, 5)).weights
    assert torch.equal(compiled, fit(seeded(three_layers, compiled=False), clients(toy, 5)).weights)


def test_a_compiled_lightning_module_is_refused_with_the_remedy() -> None:
    compiled: Any = torch.compile(three_layers(compiled=False), backend="aot_eager")
    with pytest.raises(TypeError, match=r"self\.net = torch\.compile\(net\)"):
        ls.FederatedModule(compiled, clients_per_round=2)
