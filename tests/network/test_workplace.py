"""Where devices train: optimizers, precisions, the Trainer that a module sees, and accelerators that are not there."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from fake_line import remote, toy_line
from federation import Fit, same_state, seeded
from lightning.pytorch.plugins.precision import Precision
from other_process import toy_data
from torch.optim.lr_scheduler import CosineAnnealingLR
from toy_models import LitHalves, LitMLP, variant

import lightning_spectral as ls
from lightning_spectral.network.roster import Roster

SPECTRAL = ls.SpectralSharding(keep_ratio={0.3: 0.5, 0.6: 0.5})
SETTINGS: dict[str, Any] = {"clients_per_round": 4, "local_epochs": 2, "seed": 3, "max_epochs": 3}


def looks_at_its_trainer(self: Any, *batch: Any) -> Any:
    """A loss that depends on which round of how many it is."""
    return (1 + self.current_epoch) / self.trainer.max_epochs * LitMLP.training_step(self, *batch)


def falls(self: Any) -> Any:
    """As many modules do, it reads from its Trainer how long the learning rate is to fall."""
    optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
    return [optimizer], [CosineAnnealingLR(optimizer, self.trainer.max_epochs)]


CASES: dict[str, tuple[Any, dict[str, Any], str]] = {
    "32-true": (LitMLP, {"algorithm": SPECTRAL}, "32-true"),
    "several optimizers": (LitHalves, {}, "32-true"),
    "several optimizers, spectral": (LitHalves, {"algorithm": replace(SPECTRAL, clip_tau=math.inf)}, "32-true"),
    "64-true": (LitMLP, {"algorithm": SPECTRAL}, "64-true"),
    "bf16-mixed": (LitMLP, {"algorithm": SPECTRAL}, "bf16-mixed"),
    "bf16-mixed, several optimizers": (LitHalves, {}, "bf16-mixed"),
    "bf16-true": (LitMLP, {}, "bf16-true"),
    "a step that reads its Trainer": (variant(LitMLP, training_step=looks_at_its_trainer), {}, "32-true"),
    "a schedule that reads its Trainer": (variant(LitMLP, configure_optimizers=falls), {}, "32-true"),
    "a local hook": (LitMLP, {"local_hooks": [ls.ProximalTerm(0.5)]}, "32-true"),
    "calibrated logits": (LitMLP, {"local_hooks": [ls.CalibratedLogits("net.5", rounds=4)]}, "32-true"),
}
PLAIN: list[Any] = []  # the weights without any of that


@pytest.mark.sampled(1)
@pytest.mark.filterwarnings("ignore:weight_decay=0.01 of AdamW does not act on the factors")
@pytest.mark.parametrize("name", CASES)
def test_devices_train_as_the_simulation_does(name: str, fit: Fit) -> None:
    lit, options, precision = CASES[name]
    options = {**SETTINGS, **options, "trainer": {"precision": precision}}
    theirs = fit(seeded(lit), toy_data(), **options)
    ours = fit(seeded(lit), remote(toy_line(lit)), **options)
    assert same_state(ours.state, theirs.state)
    assert [row["fl/loss"] for row in ours.rows] == [row["fl/loss"] for row in theirs.rows]
    if not PLAIN:
        PLAIN.append(fit(seeded(LitMLP), toy_data(), **SETTINGS).state)
    assert not same_state(ours.state, PLAIN[0])


class Odd(Precision):
    precision = "7-bit"  # type: ignore[assignment]


def test_other_precisions_are_refused(fit: Fit) -> None:
    with pytest.raises(ValueError, match=r"precisions 32-true, .* got Trainer\(precision='7-bit'\); choose one"):
        fit(seeded(LitMLP), remote(toy_line(LitMLP)), trainer={"plugins": [Odd()]})


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_an_accelerator_that_is_not_there_is_named_when_the_device_says_who_it_is() -> None:
    roster = Roster(toy_line(LitMLP, accelerator="cuda"), patience=0.0)
    with pytest.warns(UserWarning, match="was rejected: `accelerator='cuda'` cannot be used on this device"):
        roster.look()
    assert roster.names == []


def test_a_scheduler_of_the_server_cannot_be_read_on_a_device(fit: Fit) -> None:
    lit = variant(LitHalves, on_train_epoch_end=lambda self: print(self.lr_schedulers()[0].get_last_lr()))
    with pytest.raises(ls.ClientError, match="Schedulers are at the server, so a device cannot read their `get"):
        fit(seeded(lit), remote(toy_line(lit, share_errors=True)), clients_per_round=1)


def test_a_device_sees_the_trainer_of_a_plain_fit_on_its_data(fit: Fit) -> None:
    """As in the simulation, and with its own optimizers alone."""

    def seen(lit: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        trainer = lit.trainer
        size = len(trainer.train_dataloader.dataset)
        own = trainer.num_training_batches, trainer.is_last_batch, trainer.global_step, trainer.world_size, size
        FOUND.append((trainer.current_epoch, batch_idx, *own, [type(one) for one in trainer.optimizers]))

    lit = variant(LitMLP, on_train_batch_end=seen)
    elsewhere: list[Any] = []
    for data in (remote(toy_line(lit)), toy_data()):
        FOUND.clear()
        fit(seeded(lit), data, clients_per_round=2, max_epochs=2)
        elsewhere.append(sorted(map(repr, FOUND)))
    assert elsewhere[0] == elsewhere[1]
    assert len(elsewhere[0]) > 4


FOUND: list[Any] = []


def test_a_callback_that_needs_examples_is_refused(fit: Fit) -> None:
    callbacks = [ls.plugin.callbacks.BatchNormEstimation()]
    with pytest.raises(ValueError, match=r"BatchNormEstimation needs clients' examples at the server"):
        fit(seeded(LitMLP), remote(toy_line(LitMLP)), callbacks=callbacks, **SETTINGS)


def test_what_trains_elsewhere_is_not_captured(fit: Fit) -> None:
    with pytest.raises(ValueError, match=r"`capture=True` replays kernels .* of this process, got RemoteClients;"):
        fit(seeded(LitMLP), remote(toy_line(LitMLP)), capture=True, **SETTINGS)


def test_weights_that_a_device_does_not_hold_take_no_memory(fit: Fit) -> None:
    modules = []

    def make() -> LitMLP:
        modules.append(LitMLP())
        return modules[-1]

    fit(seeded(LitMLP), remote(toy_line(make)), algorithm=ls.SpectralSharding(keep_ratio=0.5))
    assert modules
    for module in modules:
        for name, parameter in module.named_parameters():
            is_whole = not name.startswith("net.2.")  # it holds terms of this layer
            assert parameter.untyped_storage().nbytes() == 4 * (parameter.numel() if is_whole else 1), name
