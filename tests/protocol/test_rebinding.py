"""Functions that a user's module keeps work on the client's copy, not on the server's module."""

import copy
from collections.abc import Callable
from functools import partial
from types import MethodType
from typing import Any

import pytest
import torch
from federation import Fit, seeded
from torch import Tensor, nn

import lightning_spectral as ls
from lightning_spectral.protocol.exchange import copy_module

SPECTRAL = ls.SpectralSharding(keep_ratio=0.5)


class Keeper(nn.Module):
    """Keeps a function that reads its weight, in one of many ways."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.line = nn.Linear(2, 2)
        layers = [self.line]
        inner = lambda: self.line  # noqa: E731
        kept: dict[str, Any] = {
            "closure": lambda: self.line,
            "default": lambda line=self.line: line,
            "keyword default": lambda *, line=self.line: line,
            "nested": lambda: inner(),
            "list in a closure": lambda: layers[0],
            "partial": partial(lambda line: line, self.line),
            "partial of a closure": partial(lambda unused: self.line, 0),
            "method": self.own,
            "method of a closure": MethodType(lambda _: self.line, self),
            "recursive": self.recursive(),
        }
        self.read = kept[how]
        self.held = {"list": [self.read], "tuple": (0, self.read)}

    def own(self) -> nn.Module:
        return self.line

    def recursive(self) -> Callable[..., nn.Module]:
        def read(depth: int = 2) -> nn.Module:
            return read(depth - 1) if depth else self.line

        return read


WAYS = [
    *("closure", "default", "keyword default", "nested", "list in a closure", "partial", "partial of a closure"),
    *("method", "method of a closure", "recursive"),
]


@pytest.mark.parametrize("how", WAYS)
def test_a_function_of_a_copy_refers_to_the_copy(how: str) -> None:
    original = Keeper(how)
    for module in (original, copy_module(original), copy_module(copy_module(original))):
        for read in (module.read, module.held["list"][0], module.held["tuple"][1]):
            assert read() is module.line


def test_what_lies_outside_of_the_module_stays_shared() -> None:
    module, features = nn.Linear(2, 2), {}
    module.register_forward_hook(lambda layer, args, output: features.update(layer=module, output=output))
    copied = copy_module(module)
    output = copied(torch.zeros(1, 2))
    assert features == {"layer": copied, "output": output}


def test_functions_that_share_a_variable_share_it_in_the_copy() -> None:
    def counter(module: Any) -> None:
        seen = [module]
        module.note, module.noted = lambda: seen.append(0), lambda: len(seen)

    original = nn.Linear(2, 2)
    counter(original)
    copied = copy_module(original)
    copied.note()
    assert (copied.noted(), original.noted()) == (2, 1)


@pytest.mark.parametrize(
    "register",
    [
        *("register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook"),
        *("register_full_backward_pre_hook", "register_state_dict_post_hook", "register_state_dict_pre_hook"),
        *("register_load_state_dict_pre_hook", "register_load_state_dict_post_hook"),
    ],
)
def test_every_kind_of_hook_refers_to_the_copy(register: str) -> None:
    if not hasattr(nn.Module, register):
        pytest.skip("this version of torch has no such hook")
    original = nn.Sequential(nn.Linear(2, 2))
    called: list[nn.Module] = []
    getattr(original[0], register)(lambda *args: called.append(original))
    copied = copy_module(original)
    copied(torch.ones(1, 2, requires_grad=True)).sum().backward()
    copied.load_state_dict(copied.state_dict())
    assert called
    assert set(called) == {copied}


def test_a_function_that_holds_a_parameter_which_clients_do_not_have_is_refused(lit: Any, data: Any, fit: Fit) -> None:
    weight = lit.net[2].weight
    lit.net[2].register_forward_hook(lambda layer, args, output: output + 0 * weight.sum())
    assert fit(copy.deepcopy(lit), data).history.rows
    with pytest.raises(ls.ClientError, match=r"refers to a parameter of shape \(12, 12\).*`exclude=`"):
        fit(lit, data, algorithm=SPECTRAL)


@pytest.mark.parametrize("add", ["forward hook", "attribute"])
def test_a_function_that_knows_the_server_by_a_global_name_is_refused(add: str, lit: Any, data: Any, fit: Fit) -> None:
    names = {"model": lit}
    exec("function = lambda *args: model.net[2].weight.detach().sum()", names)
    if add == "attribute":
        lit.penalty = names["function"]
    else:
        lit.net[2].register_forward_hook(names["function"])
    with pytest.raises(ValueError, match=r"uses the global variable 'model', which is the server's.*use `self`"):
        fit(lit, data)


def test_an_attribute_with_the_name_of_a_global_variable_is_no_global_variable(lit: Any, data: Any, fit: Fit) -> None:
    names = {"net": lit.net}
    exec("function = lambda layer, args, output: layer.net", names)
    lit.net[2].net = None
    lit.net[2].register_forward_hook(names["function"])
    assert fit(lit, data).history.rows


@pytest.mark.parametrize("engine", ["loop", "trainer"])
@pytest.mark.parametrize("algorithm", [ls.FedAvg(), SPECTRAL, ls.WidthSharding(keep_ratio=0.5), ls.Zampling(2)])
def test_clients_read_their_own_features_and_weights(
    algorithm: Any, engine: Any, lit_mlp: Any, data: Any, fit: Fit
) -> None:
    differ: list[float] = []

    class Lit(lit_mlp):  # type: ignore[misc]
        example_input_array = torch.zeros(2, 6)

        def __init__(self) -> None:
            super().__init__()
            self.features: dict[str, Tensor] = {}
            self.layers = [self.net[2]]
            self.net[2].register_forward_hook(lambda *args: self.features.__setitem__("x", args[-1]))
            self.size = lambda: self.net[2].weight.detach().norm()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            assert len(self.features["x"]) == len(batch[0])
            own = self.net[2].weight.detach().norm()
            differ.extend([float(own - self.size()), float(own - self.layers[0].weight.detach().norm())])
            return loss + 0.01 * self.features["x"].square().mean()

    fit(seeded(Lit), data, algorithm=algorithm, client_engine=engine, max_epochs=2)
    assert set(differ) == {0.0}


def test_a_layer_in_a_plain_list_is_trained_as_a_sharded_one(lit_mlp: Any, data: Any, fit: Fit) -> None:
    class Lit(lit_mlp):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.layers = [self.net[0], nn.ReLU(), self.net[2], nn.ReLU(), self.net[5]]

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x)
            return x

    listed, plain = seeded(Lit), seeded(lit_mlp, dropout=0.0)
    runs = [fit(module, data, algorithm=SPECTRAL, max_epochs=2) for module in (listed, plain)]
    assert torch.equal(runs[0].weights, runs[1].weights)
