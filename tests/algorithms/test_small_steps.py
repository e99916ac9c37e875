"""Steps in which a larger client trains no more than the smallest ones hold: against steps written out."""

import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
from federation import seeded
from masked_heads import LitHead, clients
from small_convs import LitConvs, LitOnlyConvs, images_of
from torch import nn
from torch.nn import functional as F

import lightning_spectral as ls
from lightning_spectral.algorithms.filter import Plan
from lightning_spectral.client.device import Device, Instructions
from lightning_spectral.client.local_loop import LocalSettings
from lightning_spectral.client.user_optimizer import options_of
from lightning_spectral.nn.layers.tucker import tucker_ranks
from lightning_spectral.plugin.callbacks import BatchNormEstimation
from lightning_spectral.protocol.cohort import Cohort
from lightning_spectral.protocol.records import WorkUnit
from lightning_spectral.protocol.rng import derived_generator

MIXED = {0.3: 0.5, 0.9: 0.5}
AS_IT_IS = {"clip_tau": float("inf"), "clip_weight_lr": float("inf"), "frobenius_decay": 0.0, "spectral_start": None}


def turn(lit: Any, data: Any, algorithm: ls.SpectralSharding, epochs: int) -> tuple[Any, Any]:
    """The download of the larger client, and what it sends back."""
    half = algorithm.bind(lit, algorithm.new_state(lit, 0))
    half.settle()
    small, large = WorkUnit(0), WorkUnit(3)
    download, _ = half.open(Cohort(0, 0, {0.3: (small,), 0.9: (large,)})).send(large)
    own = lit.configure_optimizers()
    sent = replace(download, options=(options_of(own),), local_epochs=epochs)
    upload = Device(lit, Instructions(half.client_side), [own], data.client_data, LocalSettings()).run(sent)
    assert upload.failure is None
    return sent, upload


def is_small(sent: Any, share: float) -> list[bool]:
    generator = derived_generator(sent.seed, "small steps", *sent.ids)
    return [float(torch.rand((), generator=generator)) < share for _ in range(100)]


@pytest.mark.parametrize("share", [0.0, 0.6, 0.999])
def test_terms_beyond_the_first_rest_in_small_steps(share: float) -> None:
    lit, data = seeded(LitHead), clients()
    sent, upload = turn(lit, data, ls.SpectralSharding(keep_ratio=MIXED, small_steps=share, **AS_IT_IS), epochs=4)
    values = {name: tensor.clone() for name, tensor in sent.tensors.items()}
    trained = {name: t.requires_grad_() for name, t in values.items() if not name.endswith("omega")}
    optimizer, few = torch.optim.SGD(trained.values(), lr=0.3), 4  # ceil(0.3 * 12)
    small = iter(is_small(sent, share))
    for epoch in range(4):
        for (x, y), _ in data.client_data(sent).epoch(epoch):
            n = few if share and next(small) else values["net.2.omega"].numel()
            weight = (values["net.2.u"][:, :n] * values["net.2.omega"][:n]) @ values["net.2.v"][:n]
            hidden = F.linear(x[:, :6], values["net.0.weight"], values["net.0.bias"]).tanh()
            hidden = F.linear(hidden, weight, values["net.2.bias"]).tanh()
            optimizer.zero_grad()
            F.cross_entropy(F.linear(hidden, values["head.weight"], values["head.bias"]), y).backward()
            optimizer.step()
    for name, tensor in upload.tensors.items():
        # some 50 steps of float32, whose products are taken in another order
        torch.testing.assert_close(tensor, trained[name].detach(), rtol=0.0, atol=1e-5)
    moved = (upload.tensors["net.2.v"] - sent.tensors["net.2.v"]).abs().amax(1)
    assert bool((moved[:few] > 0).all())
    assert bool((moved[few:] > 0).all()) is not all(is_small(sent, share)[: upload.num_steps])


def test_convolutions_beyond_the_first_channels_rest_too() -> None:
    lit, choices = seeded(LitOnlyConvs), ls.LayerChoices(convolutions="tucker")
    algorithm = ls.SpectralSharding(keep_ratio=MIXED, small_steps=0.99, layers=choices, spectral_start=None)
    sent, upload = turn(lit, images_of(), algorithm, epochs=1)
    a, b = tucker_ranks((8, 6, 3, 3), 3)
    steps = sum(1 for _ in images_of().client_data(sent).epoch(0))
    assert all(is_small(sent, 0.99)[:steps])
    core = (upload.tensors["net.2.core"] - sent.tensors["net.2.core"]).abs().amax((2, 3))
    assert bool((core[:b, :a] > 0).all())
    decay = 1 - 0.1 * 1e-3  # which acts on all entries, without momentum at first
    rest = torch.ones_like(core, dtype=torch.bool)
    rest[:b, :a] = False
    assert float(core[rest].max()) < 20 * (1 - decay) * float(sent.tensors["net.2.core"].abs().max())
    assert lit.net[2].__class__ is nn.Conv2d


def test_the_smallest_clients_take_no_small_steps() -> None:
    sides = [
        ls.SpectralSharding(keep_ratio=ratio, small_steps=0.5).bind(seeded(LitHead)).client_side
        for ratio in (0.3, MIXED)
    ]
    assert [(side.small_steps, side.smallest) for side in sides] == [(0.5, 0.3), (0.5, 0.3)]


@pytest.mark.parametrize(
    ("lit", "algorithm", "callbacks", "said"),
    [
        (LitConvs, ls.SpectralSharding(keep_ratio=MIXED, small_steps=0.5), [], True),
        (LitConvs, ls.SpectralSharding(keep_ratio=MIXED, small_steps=0.5), [BatchNormEstimation()], False),
        (LitConvs, ls.SpectralSharding(keep_ratio=0.3, small_steps=0.5), [], False),
        (LitConvs, ls.SpectralSharding(keep_ratio=MIXED), [], False),
        (LitOnlyConvs, ls.SpectralSharding(keep_ratio=MIXED, small_steps=0.5), [], False),
    ],
    ids=["alone", "estimated", "equal", "no small steps", "no averages"],
)
def test_running_averages_of_small_steps_are_warned_of(lit: Any, algorithm: Any, callbacks: Any, said: bool) -> None:
    module = lit()
    plan = Plan(module, algorithm, optimizers=[module.configure_optimizers()], callbacks=callbacks)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        algorithm.check(plan)
    found = [str(each.message) for each in caught if "small_steps" in str(each.message)]
    assert len(found) == said
    assert all("running averages of net.3 are mostly those of small steps" in each for each in found)
