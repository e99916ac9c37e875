"""Clients train copies of a user's module: what cannot be copied is named before the first round."""

import threading
from collections import OrderedDict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from federation import Fit, seeded
from torch import nn
from torch.nn.utils import prune

import lightning_spectral as ls
from lightning_spectral.protocol.exchange import copy_module


def keep_a_lock(layer: nn.Module) -> None:
    layer.lock = threading.Lock()


def keep_a_lock_deep_inside(layer: nn.Module) -> None:
    layer.cache = {"locks": [1, SimpleNamespace(own=threading.Lock())]}


def keep_a_lock_in_an_object_that_refers_to_itself(layer: nn.Module) -> None:
    holder = SimpleNamespace(lock=threading.Lock(), layer=layer)
    holder.me = holder
    layer.holder = holder


def keep_a_computed_tensor(layer: nn.Module) -> None:
    layer.doubled = 2 * layer.weight  # type: ignore[operator]


@pytest.mark.parametrize(
    ("add", "message"),
    [
        (keep_a_lock, r"`net\.2\.lock` cannot be copied: cannot pickle"),
        (keep_a_lock_deep_inside, r"`net\.2\.cache\['locks'\]\[1\]\.own` cannot be copied: cannot pickle"),
        (keep_a_lock_in_an_object_that_refers_to_itself, r"`net\.2\.holder\.lock` cannot be copied: cannot pickle"),
        (
            keep_a_computed_tensor,
            r"`net\.2\.doubled` cannot be copied: it is a tensor with a gradient function\. Write",
        ),
    ],
)
@pytest.mark.parametrize("algorithm", [ls.FedAvg(), ls.SpectralSharding()], ids=["dense", "sharded"])
def test_an_attribute_that_cannot_be_copied_is_named(
    add: Any, message: str, algorithm: Any, lit: Any, data: Any, fit: Fit
) -> None:
    add(lit.net[2])
    with pytest.raises(ValueError, match=f"^Clients train copies of LitMLP, and {message}"):
        fit(lit, data, algorithm=algorithm)


@pytest.mark.filterwarnings("ignore:`torch.jit")  # of another category in newer versions
def test_a_traced_part_is_named(lit: Any, data: Any, fit: Fit) -> None:
    lit.net[2] = torch.jit.trace(lit.net[2], torch.zeros(1, 12))
    with pytest.raises(
        ValueError, match=r"and 'net\.2' is a scripted or traced module.*use the module that it was made"
    ):
        fit(lit, data)


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated:FutureWarning")
@pytest.mark.parametrize("algorithm", [ls.FedAvg(), ls.SpectralSharding(exclude=["net.3"])], ids=["dense", "sharded"])
@pytest.mark.parametrize("change", [nn.utils.weight_norm, lambda layer: prune.l1_unstructured(layer, "weight", 0.5)])
def test_weights_that_a_hook_recomputes_are_trained_after_a_forward_pass(
    change: Any, algorithm: Any, lit: Any, data: Any, fit: Fit
) -> None:
    lit.net.insert(3, change(seeded(nn.Linear, 12, 12)))
    lit(torch.zeros(1, 6))  # leaves a weight with a gradient function
    before = lit.net[3].weight.detach().clone()
    after = fit(lit, data, algorithm=algorithm).module.net[3]
    after(torch.zeros(1, 12))
    assert not torch.equal(after.weight, before)
    assert torch.equal(after.weight == 0, before == 0)  # pruned entries stay pruned


def test_a_copy_shares_no_gradient_function_with_the_original() -> None:
    layer = prune.l1_unstructured(seeded(nn.Linear, 4, 4), "weight", 0.5)
    copied = copy_module(layer)
    copied(torch.ones(1, 4)).sum().backward()
    assert copied.weight_orig.grad is not None
    assert layer.weight_orig.grad is None


def test_what_is_added_to_a_copy_where_the_original_has_nothing_is_not_added_to_it() -> None:
    layer: Any = nn.Linear(2, 2)
    layer.cache, layer.alias = {}, OrderedDict()
    layer.same = layer.cache
    copied = copy_module(layer)
    copied.register_forward_hook(print)
    copied.cache["seen"] = copied.alias["seen"] = True
    assert copied.same is copied.cache
    assert type(copied.alias) is OrderedDict
    assert not any((layer._forward_hooks, layer.cache, layer.alias))
