"""Copies of a user's module, for results that are modules of their own."""

from collections import OrderedDict
from typing import Any

import torch
from federation import seeded
from torch import nn
from torch.nn.utils import prune

from lightning_spectral.protocol.exchange import copy_module


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
