"""Modules that optimise manually, with several optimizers."""

import copy
import itertools
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from federation import Fit, check_resumes
from observed_runs import acting
from own_steps import DENSE, MIXED, UNCLIPPED, ScalesAlone, assert_same_run
from torch import Tensor, nn
from torch.optim.lr_scheduler import StepLR

import lightning_spectral as ls
from lightning_spectral.protocol.cohort import Workers
from lightning_spectral.protocol.records import Download, WorkUnit


@pytest.fixture
def fit(fit: Fit) -> Fit:
    """Fits of two rounds, with spectral sharding."""
    return partial(fit, algorithm=MIXED, max_epochs=2)


class LitHalves(pl.LightningModule):
    """One loss, two optimizers that each step one half of the network: together they are one optimizer over all."""

    def __init__(self, manual: bool) -> None:
        super().__init__()
        self.automatic_optimization = not manual
        with torch.random.fork_rng():
            torch.manual_seed(3)
            self.net = nn.Sequential(
                nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)
            )

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = nn.functional.cross_entropy(self.net(x), y)
        self.log("train_loss", loss)
        if not self.automatic_optimization:
            front, back = self.optimizers()
            front.zero_grad()
            back.zero_grad()
            self.manual_backward(loss)
            front.step()  # while the other half also has gradients: hooks of one must leave the other's alone
            back.step()
        return loss

    def configure_optimizers(self) -> Any:
        options = {"lr": 0.3, "momentum": 0.9}
        if self.automatic_optimization:
            optimizer = torch.optim.SGD(self.parameters(), **options)
            return [optimizer], [StepLR(optimizer, 1, 0.5)]
        halves = (torch.optim.SGD(half.parameters(), **options) for half in (self.net[:4], self.net[4:]))
        return [{"optimizer": half, "lr_scheduler": StepLR(half, 1, 0.5)} for half in halves]


class LitGAN(pl.LightningModule):
    """Two networks with opposite aims, as in Lightning's own example."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        with torch.random.fork_rng():
            torch.manual_seed(5)
            self.make = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 6))
            self.judge = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))

    def losses(self, x: Tensor) -> tuple[Tensor, Tensor]:
        made = self.make(x[:, :2])
        one, zero = torch.ones(len(x), 1), torch.zeros(len(x), 1)
        bce = nn.functional.binary_cross_entropy_with_logits
        return bce(self.judge(made), one), bce(self.judge(x), one) + bce(self.judge(made.detach()), zero)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        makers, judges = self.optimizers()
        for number, optimizer in enumerate((makers, judges)):
            self.toggle_optimizer(optimizer)
            loss = self.losses(batch[0])[number]
            self.log(["maker_loss", "judge_loss"][number], loss)
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.make.parameters(), lr=0.01), torch.optim.SGD(self.judge.parameters(), lr=0.1)


@pytest.mark.parametrize("algorithm", [DENSE, MIXED], ids=["dense", "spectral"])
def test_two_optimizers_of_one_loss_are_one_optimizer(algorithm: Any, data: Any, fit: Fit) -> None:
    data.val = None
    settings: dict[str, Any] = {"algorithm": algorithm, "local_epochs": 2, "max_epochs": 3}
    plain = fit(LitHalves(manual=False), data, **settings)
    manual = fit(LitHalves(manual=True), data, **settings)
    assert_same_run(plain, manual)
    assert manual.history.column("fl/lr") == [0.3, 0.15, 0.075]


def test_local_hooks_act_on_what_each_optimizer_steps(data: Any, fit: Fit) -> None:
    """The pull of a proximal term is the sum of those of its parts, so one optimizer shows what two must do."""
    data.val = None
    plain = fit(LitHalves(manual=False), data, local_hooks=[ls.client.ProximalTerm(2.0)])
    manual = fit(LitHalves(manual=True), data, local_hooks=[ls.client.ProximalTerm(2.0)])
    assert_same_run(plain, manual)
    without = fit(LitHalves(manual=True), data)
    assert not torch.equal(manual.module.net[6].weight, without.module.net[6].weight)


def test_a_gan_of_one_client_is_a_loop_written_out(toy: Any, fit: Fit) -> None:
    federation = ls.FederatedDataModule(toy, ls.IIDPartitioner(num_clients=1), batch_size=30)
    module, twin = LitGAN(), LitGAN()
    history = fit(module, federation, algorithm=DENSE, clients_per_round=1, max_epochs=1, local_epochs=2).history
    own = federation.client_data(Download(WorkUnit(0), 1.0, {}))
    makers, judges = twin.configure_optimizers()
    last = []
    for batch, _ in itertools.chain(own.epoch(0), own.epoch(1)):
        for number, optimizer in enumerate((makers, judges)):
            twin.zero_grad()
            loss = twin.losses(batch[0])[number]
            loss.backward()
            optimizer.step()
            last.append(float(loss.detach()))
    for ours, theirs in zip(module.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-7)  # w - (w - w') rounds at the size of w
    assert history.column("judge_loss") == [pytest.approx(sum(last[1::2]) / 8, rel=1e-6)]
    assert str(history.column("fl/loss")) == "[nan]"  # its step returns no loss


def test_a_gan_of_sub_models_trains_both_networks(data: Any, fit: Fit) -> None:
    data.val = None
    module = LitGAN()
    half: Any = UNCLIPPED.bind(module)
    half.initialize(Workers())
    start = copy.deepcopy(module)
    history = fit(module, data, max_epochs=3, algorithm=UNCLIPPED).history
    for name, value in module.named_parameters():
        assert not torch.equal(value, start.get_parameter(name)), name
    assert len(history.column("maker_loss")) == 3
    assert history.column("fl/clients") == [4.0] * 3


def test_steps_are_those_of_all_optimizers(data: Any, fit: Fit) -> None:
    steps: list[int] = []
    note = acting(on_client_end=lambda trainer, model, turn: steps.append(turn.upload.num_steps))
    data.val = None
    fit(LitGAN(), data, algorithm=DENSE, clients_per_round=3, max_epochs=1, callbacks=[note])
    assert steps == [6, 6, 6]  # three batches, two optimizers


def test_resumed_run_equals_the_uninterrupted_one(data: Any, fit: Fit, tmp_path: Path) -> None:
    data.val = None
    check_resumes(fit, LitGAN, data, tmp_path, algorithm=UNCLIPPED, clients_per_round=3)


def test_an_extra_round_beside_the_run_trains_the_same_way(data: Any, fit: Fit) -> None:
    def listen(trainer: pl.Trainer, model: Any) -> None:
        cosines.append(float(trainer.callback_metrics["fl/fedavg_alignment"]))

    cosines: list[float] = []
    data.val = None
    watchers = [ls.plugin.callbacks.UpdateAlignment(every_n_rounds=1), acting(on_train_epoch_end=listen)]
    fit(LitGAN(), data, algorithm=DENSE, clients_per_round=3, callbacks=watchers)
    assert cosines == [pytest.approx(1.0, abs=1e-6)] * 2  # the round it compares with does what the run does


def test_schedulers_can_be_read_and_are_stepped_by_the_server(data: Any, fit: Fit) -> None:
    class Lit(LitHalves):
        def on_train_epoch_end(self) -> None:
            for scheduler in self.lr_schedulers():
                scheduler.step()
                rates.append(scheduler.get_last_lr()[0])

    rates: list[float] = []
    data.val = None
    history = fit(Lit(manual=True), data, clients_per_round=2).history
    assert rates == [0.3] * 4 + [0.15] * 4
    assert history.column("fl/lr") == [0.3, 0.15]


def test_hooks_of_optimizers_run_in_each_step(data: Any, fit: Fit) -> None:
    stepped: list[str] = []

    class Lit(LitHalves):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            assert type(optimizer) is torch.optim.SGD
            stepped.append("front" if optimizer is self.optimizers()[0].optimizer else "back")

        def configure_gradient_clipping(self, *args: Any, **options: Any) -> None:
            raise AssertionError("Lightning leaves clipping to a module that optimises manually")

    data.val = None
    fit(Lit(manual=True), data, clients_per_round=2, max_epochs=1)
    assert stepped == 2 * 3 * ["front", "back"]


def test_what_an_optimizer_wrapped_by_the_client_says_is_that_of_the_users(data: Any, fit: Fit) -> None:
    class Lit(LitHalves):
        def on_train_epoch_start(self) -> None:
            front, back = self.optimizers()
            assert isinstance(front, torch.optim.SGD)
            assert front.param_groups is front.optimizer.param_groups
            assert self.optimizers(use_pl_optimizer=False) == [front.optimizer, back.optimizer]
            assert not front.state  # every client begins without
            seen.append(front.param_groups[0]["lr"])

    seen: list[float] = []
    data.val = None
    fit(Lit(manual=True), data, clients_per_round=2)
    assert seen == [0.3, 0.3, 0.15, 0.15]


def test_gradients_of_two_optimizers_are_scaled(data: Any, fit: Fit) -> None:
    data.val = None
    plugin = ScalesAlone()
    plain = fit(LitGAN(), data, algorithm=UNCLIPPED)
    scaled = fit(LitGAN(), data, algorithm=UNCLIPPED, trainer={"plugins": [plugin]})
    assert_same_run(plain, scaled)
    assert plugin.scaler.get_scale() == 2.0**8


def test_backward_passes_by_hand_need_manual_optimisation(lit_mlp: Any, data: Any, fit: Fit) -> None:
    class Lit(lit_mlp):  # type: ignore[misc]
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.manual_backward(super().training_step(batch, batch_idx))

    with pytest.raises(ls.ClientError, match="`manual_backward` is for manual optimisation: set"):
        fit(Lit(), data)


def test_several_optimizers_need_manual_optimisation(lit_mlp: Any, data: Any, fit: Fit) -> None:
    class Lit(lit_mlp):  # type: ignore[misc]
        def configure_optimizers(self) -> Any:
            return [torch.optim.SGD(half.parameters(), lr=0.1) for half in (self.net[:2], self.net[2:])]

    with pytest.raises(ValueError, match=r"got 2 \(SGD, SGD\); several need manual optimisation: `self.automatic_opt"):
        fit(Lit(), data)
