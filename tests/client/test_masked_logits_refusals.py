"""What cannot be masked by class is refused or warned of, by name."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from federation import Fit, same_state, seeded
from masked_heads import LitHead, clients, masked
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import lightning_spectral as ls

INF = math.inf


@pytest.mark.parametrize(
    ("hook", "data", "message"),
    [
        (ls.client.MaskedLogits("haed"), clients, r"LitHead has no layer 'haed'; it has 'head'"),
        (ls.client.MaskedLogits("net.0.weight"), clients, r"has no layer 'net\.0\.weight'; it has 'net\.0'"),
        (
            ls.client.MaskedLogits(),
            lambda: clients([(0, 5), (5,), (1,), (2,)]),
            r"the layer 'head' has 5 outputs, and there are examples of class 5; name the layer that makes the logits",
        ),
    ],
)
def test_what_cannot_be_masked_is_refused_before_training(hook: Any, data: Any, message: str, fit: Fit) -> None:
    with pytest.raises(ValueError, match=message):
        fit(seeded(LitHead), data(), local_hooks=[hook])


def test_examples_without_labels_are_refused_before_training(fit: Fit) -> None:
    examples = [{"x": torch.zeros(7), "y": 0} for _ in range(12)]
    data = ls.FederatedDataModule(examples, ls.IIDPartitioner(4))
    with pytest.raises(
        ValueError, match=r"MaskedLogits needs the class of .*labels=\.\.\.\)\. Examples of list must be"
    ):
        fit(seeded(LitHead), data, local_hooks=[ls.client.MaskedLogits()])


@pytest.mark.parametrize(
    "target", [torch.rand(12), torch.rand(12, 5), torch.ones(12, 5).long(), torch.ones(12, 2, 2).long()]
)
def test_targets_that_are_no_single_class_are_refused_before_training(target: Tensor, fit: Fit) -> None:
    data = ls.FederatedDataModule(TensorDataset(torch.zeros(12, 7), target), ls.IIDPartitioner(4))
    with pytest.raises(
        ValueError, match=r"must be one integer per example, .* where an example has several classes, or"
    ):
        fit(seeded(LitHead), data, local_hooks=[ls.client.MaskedLogits()])


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (nn.Sequential(nn.Linear(2, 3)), r"the layer '' has 3 outputs, and there are examples of class 4"),
        (
            nn.Linear(2, 1),
            r"'' has one output, .* of class 4; a single logit cannot be masked by class: leave the hook out",
        ),
        (nn.LSTM(2, 5), r"the output of '' is tuple; name the layer that makes the logits"),
        (nn.Flatten(0), r"the output of '' is a tensor of shape \(4,\)"),
    ],
)
def test_outputs_that_are_no_logits_are_refused(layer: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        masked(layer, torch.ones(2, 2), 0, 4)


def test_a_layer_that_nobody_calls_is_warned_of(fit: Fit) -> None:
    class LitIdle(LitHead):
        def __init__(self) -> None:
            super().__init__()
            self.idle = nn.Linear(12, 5)

    with pytest.warns(ls.SpectralWarning, match="has masked nothing: the layer 'idle' was not called"):
        fit(seeded(LitIdle), clients(), local_hooks=[ls.client.MaskedLogits("idle")])


def test_clients_that_take_no_steps_call_no_layer(fit: Fit) -> None:
    lit = seeded(LitHead)
    before = {name: value.clone() for name, value in lit.state_dict().items()}
    fitted = fit(lit, clients(), local_epochs=0, local_hooks=[ls.client.MaskedLogits()])  # a warning is an error
    assert same_state(fitted.state, before)


def test_a_layer_inside_of_a_compiled_part_is_refused() -> None:
    lit = LitHead()
    lit.net, lit.head = (torch.compile(part, backend="eager") for part in (lit.net, lit.head))
    hook = ls.client.MaskedLogits("net._orig_mod.2")
    with pytest.raises(ValueError, match=r"inside of 'net', which is compiled"):
        hook.check(lit, lambda: torch.zeros(1, dtype=torch.int64))
    ls.client.MaskedLogits().check(lit, lambda: torch.zeros(1, dtype=torch.int64))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ls.client.MaskedLogits(absent=INF), "`absent` must be below inf, got inf; 0 as in HeteroFL, or -inf"),
        (lambda: ls.client.MaskedLogits(absent=math.nan), "`absent` must be below inf, got nan"),
    ],
)
def test_a_constant_that_makes_no_loss_is_refused(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
