"""A client's own Trainer gives the same results as the plain loop, where the loop is enough."""

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from both_engines import DENSE, MIXED, UNCLIPPED, assert_same_run, with_both_engines
from federation import Fit, same_state
from lightning.pytorch.plugins import MixedPrecision
from one_by_one import OneByOne
from torch import nn
from torch.amp.grad_scaler import GradScaler

import lightning_spectral as ls
from lightning_spectral.algorithms.capabilities import Initializes
from lightning_spectral.protocol.cohort import Alone


@pytest.mark.parametrize("local_epochs", [1, 2])
@pytest.mark.parametrize("algorithm", [DENSE, MIXED], ids=["dense", "spectral"])
def test_both_engines_end_with_the_same_bits(algorithm: Any, local_epochs: int, lit: Any, data: Any, fit: Fit) -> None:
    lit.net.insert(1, nn.BatchNorm1d(12))
    if isinstance(half := algorithm.bind(lit), Initializes):
        half.initialize(Alone())  # here, so that only training changes them in the fit
    start = copy.deepcopy(lit)
    one, two = with_both_engines(fit, lit, data, algorithm=algorithm, local_epochs=local_epochs)
    assert_same_run(one, two)
    assert not torch.equal(start.net[3].weight, two.module.net[3].weight)


@pytest.mark.parametrize("precision", ["bf16-mixed", "64-true"])
def test_in_every_precision(precision: Any, lit: Any, data: Any, fit: Fit) -> None:
    assert_same_run(*with_both_engines(fit, lit, data, trainer={"precision": precision}))


def test_with_scaled_gradients(lit: Any, data: Any, fit: Fit) -> None:
    """A large scale overflows at first: steps are skipped, and no client starts from the scale of another."""
    plugin = MixedPrecision("16-mixed", "cpu", GradScaler("cpu", init_scale=2.0**20, growth_interval=1))
    assert_same_run(*with_both_engines(fit, lit, data, trainer={"plugins": [plugin]}, local_epochs=2))
    assert plugin.scaler is not None
    assert plugin.scaler.get_scale() == 2.0**20


def test_with_clients_that_fail_and_are_left_out(lit_mlp: Any, data: Any, fit: Fit) -> None:
    class Lit(lit_mlp):  # type: ignore[misc]
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if batch[0][0, 0] > 1.0:
                raise FloatingPointError("too warm")
            return super().training_step(batch, batch_idx)

    faults = ls.server.Faults(on_error=ls.server.LeaveOut(1.0))
    with pytest.warns(ls.SpectralWarning, match=r"average: training failed \(FloatingPointError: too warm\)"):
        one, two = with_both_engines(fit, Lit(), data, faults=faults, max_epochs=3)
    assert_same_run(one, two)
    assert 0 < sum(two.history.column("fl/left_out_error")) < 12


@pytest.mark.parametrize("hook", [ls.client.ProximalTerm(5.0), ls.client.GradientClip(0.1)], ids=["proximal", "clip"])
def test_with_local_hooks(hook: Any, lit: Any, data: Any, fit: Fit) -> None:
    start = copy.deepcopy(lit)
    one, two = with_both_engines(fit, lit, data, local_hooks=[hook])
    assert_same_run(one, two)
    without = fit(start, data)
    assert not torch.equal(without.module.net[0].weight, two.module.net[0].weight)


def test_with_weight_decay_apart_from_gradients(lit_mlp: Any, data: Any, fit: Fit) -> None:
    class Lit(lit_mlp):  # type: ignore[misc]
        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=0.01, weight_decay=0.1)

    with pytest.warns(ls.SpectralWarning, match="weight_decay"):
        assert_same_run(*with_both_engines(fit, Lit(), data, algorithm=UNCLIPPED))


def test_with_data_from_a_loader(lit: Any, data: Any, toy: Any, fit: Fit) -> None:
    unindexed = ls.FederatedDataModule(OneByOne(toy), data.partitioner, val=toy, batch_size=4, labels=toy.tensors[1])
    assert_same_run(*with_both_engines(fit, lit, unindexed))


def test_with_steps_that_are_skipped_and_epochs_that_end_early(lit_mlp: Any, data: Any, fit: Fit) -> None:
    class Lit(lit_mlp):  # type: ignore[misc]
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
            return -1 if batch_idx == 2 else None

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            return None if batch_idx == 1 else {"loss": loss, "more": 1}

    data.val = None
    with pytest.warns(UserWarning, match="`training_step` returned `None`"):
        assert_same_run(*with_both_engines(fit, Lit(), data, local_epochs=2))


def test_a_client_that_trains_nothing(lit: Any, data: Any, fit: Fit) -> None:
    before = copy.deepcopy(lit.state_dict())
    unchanged = replace(MIXED, spectral_start=None)
    fitted = fit(lit, data, algorithm=unchanged, max_epochs=1, local_epochs=0)
    assert same_state(fitted.state, before)
    assert str(fitted.history.column("fl/loss")) == "[nan]"
