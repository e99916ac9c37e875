import copy
from collections import OrderedDict, deque
from typing import Any

import numpy as np
import pytest
import torch
from federation import Fit, check_resumes
from torch import Tensor, nn
from toy_models import LitMLP

from lightning_spectral.client.metrics import KeptAttributes


def module_with(value: Any) -> Any:
    module: Any = nn.Sequential(nn.Linear(1, 1))
    module[0].kept = value
    return module


def same(one: Any, two: Any) -> bool:
    return repr(one) == repr(two)


@pytest.mark.parametrize(
    ("value", "change"),
    [
        ([1], lambda v: v.append(2)),
        ([[1], 2], lambda v: v[0].append(2)),
        ({"a": [1]}, lambda v: v["a"].clear()),
        (OrderedDict(a=1), lambda v: v.update(b=2)),
        ({1}, lambda v: v.add(2)),
        (deque([1, 2], maxlen=2), lambda v: v.append(3)),
        (([1], 2), lambda v: v[0].append(2)),
        (torch.zeros(2), lambda v: v.add_(1)),
        ([torch.zeros(2)], lambda v: v[0].add_(1)),
        (np.zeros(2), lambda v: v.fill(1)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_is_changed_in_place_gets_its_content_back(value: Any, change: Any) -> None:
    module, before = module_with(value), copy.deepcopy(value)
    kept = KeptAttributes(module)
    for _ in range(2):  # also a second time
        change(value)
        assert not same(value, before)
        kept.restore()
        assert module[0].kept is value
        assert same(value, before)


@pytest.mark.parametrize(
    "value", [torch.zeros(1).expand(3), torch.nn.Parameter(torch.zeros(2)), np.broadcast_to(np.zeros(1), (3,)), (1, 2)]
)
def test_what_nobody_can_change_in_place_is_left_alone(value: Any) -> None:
    KeptAttributes(module_with(value)).restore()


def test_attributes_are_bound_again_and_new_ones_removed() -> None:
    module = module_with(None)
    own, kept = object(), KeptAttributes(module)
    module[0].kept, module[0].new, module.training = own, own, False
    weight = module[0].weight.data.fill_(3.0).clone()
    kept.restore()
    assert module[0].kept is None
    assert not hasattr(module[0], "new")
    assert module.training
    assert torch.equal(module[0].weight, weight)


class Remembers(LitMLP):
    """Scales its loss by what earlier steps left on it: counters, lists, a running average."""

    def __init__(self) -> None:
        super().__init__()
        self.steps, self.seen, self.center = 0, [], torch.zeros(())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = super().training_step(batch, batch_idx)
        self.steps += 1
        self.seen.append(loss.detach())
        self.center.lerp_(loss.detach(), 0.1)
        return loss * (1 + 0.1 * self.steps) + 0.01 * len(self.seen) * self.center


@pytest.mark.parametrize("client_engine", ["loop", "trainer"])
def test_no_client_inherits_what_another_left_on_the_module(
    data: Any, fit: Fit, tmp_path: Any, client_engine: str
) -> None:
    check_resumes(fit, Remembers, data, tmp_path, client_engine=client_engine)
