"""A server whose own weights are not finite ends the run itself; no client is blamed, and no faults policy hides it."""

import math
import warnings
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from federation import Fit, seeded
from torch import nn

import lightning_spectral as ls
from lightning_spectral.server.advice import check_weights

ALGORITHMS = [
    ls.FedAvg(),
    ls.SpectralSharding(keep_ratio=0.5),
    ls.SpectralSharding(keep_ratio=0.5, spectral_start=None),
]
TOLERANT = ls.server.Faults(on_error=ls.server.LeaveOut(1.0), on_not_finite=ls.server.LeaveOut(1.0))


class Breaks(torch.optim.SGD):
    """Puts a value into one weight at each step."""

    value = math.nan

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        with torch.no_grad():
            self.param_groups[0]["params"][self.which].view(-1)[0] = self.value


def breaking(which: int) -> Any:
    def optimizer(parameters: Iterable[nn.Parameter]) -> Breaks:
        made = Breaks(parameters, lr=1.0)
        made.which = which
        return made

    return optimizer


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=repr)
@pytest.mark.parametrize(("which", "name"), [(0, "net.0.weight"), (2, "net.2.weight"), (5, "net.5.bias")])
@pytest.mark.parametrize("faults", [None, TOLERANT], ids=["default", "tolerant"])
def test_a_server_step_that_broke_a_weight_is_named(
    algorithm: Any, which: int, name: str, faults: Any, lit: Any, data: Any, fit: Fit
) -> None:
    options = {"algorithm": algorithm, "server_optimizer": breaking(which), "faults": faults}
    with warnings.catch_warnings():
        warnings.simplefilter("error", ls.SpectralWarning)  # no client is left out on the way
        with pytest.raises(ls.errors.RoundError) as caught:
            fit(lit, data, max_epochs=3, trainer={"limit_val_batches": 0}, **options)
    told = str(caught.value)
    assert told.startswith(f"Round 1: the server's weights were not finite before it began: '{name}' had a NaN")
    assert "the server optimizer's step did it" in told
    assert "client 1" not in told


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=repr)
@pytest.mark.parametrize("layer", [0, 2])
def test_initial_weights_are_named(algorithm: Any, layer: int, lit: Any, data: Any, fit: Fit) -> None:
    nn.init.constant_(lit.net[layer].weight, math.inf)
    with pytest.raises(
        ls.errors.RoundError, match=rf"Round 0: .* 'net.{layer}.weight' had .* These are the initial weights"
    ):
        fit(lit, data, algorithm=algorithm)


@pytest.mark.parametrize("faults", [ls.server.Faults(), TOLERANT], ids=["raise", "leave out"])
def test_a_step_that_fails_on_such_weights_is_not_the_clients_fault(
    faults: ls.server.Faults, lit: Any, data: Any, fit: Fit
) -> None:
    def step(batch: Any, batch_idx: int) -> Any:
        raise FloatingPointError("NaN in the logits")

    nn.init.constant_(lit.net[0].bias, math.nan)
    lit.training_step = step
    with pytest.raises(ls.errors.RoundError, match=r"Round 0: the server's weights .* 'net.0.bias'") as caught:
        fit(lit, data, faults=faults)
    assert isinstance(caught.value.__cause__, FloatingPointError)


def test_a_client_is_still_to_blame_where_the_server_is_fine(lit: Any, data: Any, fit: Fit) -> None:
    def step(batch: Any, batch_idx: int) -> Any:
        raise FloatingPointError("its own")

    lit.register_buffer("mask", torch.full((3,), -math.inf))
    lit.frozen_mask = nn.Parameter(torch.full((3,), -math.inf), requires_grad=False)
    lit.training_step = step
    with pytest.raises(ls.ClientError, match=r"Round 0, client \d+, local training: FloatingPointError: its own"):
        fit(lit, data)


def test_a_healthy_round_never_reads_the_weights(data: Any, lit: Any, fit: Fit, monkeypatch: Any) -> None:
    def read(*args: Any) -> None:
        raise AssertionError("a pass over all weights")

    for module in ("round", "advice"):
        monkeypatch.setattr(f"lightning_spectral.server.{module}.check_weights", read)
    fit(lit, data, algorithm=ls.SpectralSharding(keep_ratio=0.5), max_epochs=2)


def test_many_broken_weights_are_counted(lit_mlp: Any) -> None:
    module = seeded(lit_mlp)
    check_weights(module, 3)
    for parameter in module.parameters():
        nn.init.constant_(parameter, math.nan)
    with pytest.raises(
        ls.errors.RoundError, match=r"^Round 3: .*: 'net.0.weight', 'net.0.bias', 'net.2.weight' and 3 more had"
    ):
        check_weights(module, 3)
