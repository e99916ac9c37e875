"""Steps taken by Lightning, in the module's own hooks, and by hand in its `training_step` are the same steps."""

import copy
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from federation import Fit, Fitted, ScalesAlone, check_resumes, same_state, seeded
from observed_runs import acting
from programs import AdversarialPair, ClosesFirst, Lit, Manual, StepsEveryOtherBatch
from torch import Tensor, nn
from torch.optim.lr_scheduler import StepLR
from toy_models import LitNet, step_by_hand, variant

import lightning_spectral as ls
from lightning_spectral.protocol.cohort import Workers

MIXED = ls.SpectralSharding(ls.Unbiased(), keep_ratio={0.3: 0.5, 0.6: 0.5}, clip_tau=1.2, frobenius_decay=0.01)
UNCLIPPED = replace(MIXED, clip_tau=float("inf"))  # Adam undoes the clip
DENSE = ls.FedAvg()


@pytest.fixture
def data(data: Any) -> Any:
    data.val = None  # not all modules here have a step for it
    return data


@pytest.fixture
def fit(fit: Fit) -> Fit:
    return partial(fit, algorithm=MIXED, max_epochs=2)


def in_own_hooks(kind: Any) -> Any:
    """A class whose hooks do what Lightning does where they are not overridden."""

    class Own(kind):  # type: ignore[misc]
        def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
            optimizer.step(closure=optimizer_closure)

        def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
            optimizer.zero_grad()

        def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
            loss.backward(*args, **kwargs)

        def configure_gradient_clipping(
            self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None
        ) -> None:
            self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)

    return Own


def by_hand(kind: Any) -> Any:
    """A class that takes the same steps in its ``training_step``."""

    class Manual(kind):  # type: ignore[misc]
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            output = super().training_step(batch, batch_idx)
            loss = output["loss"] if isinstance(output, Mapping) else output
            if loss is not None:
                optimizer = self.optimizers()
                optimizer.zero_grad()
                self.manual_backward(loss)
                optimizer.step()
            return output

    return Manual


WAYS: dict[str, Callable[[Any], Any]] = {"own hooks": in_own_hooks, "manual": by_hand}


def both_ways(way: str, fit: Fit, kind: Any, data: Any, **options: Any) -> list[Fitted]:
    """The same federation twice, from the same weights: steps are Lightning's, and then those of a way."""
    return [fit(seeded(one), data, **options) for one in (kind, WAYS[way](kind))]


def assert_same_run(one: Fitted, two: Fitted) -> None:
    for name, value in one.state.items():
        assert torch.equal(value, two.state[name]), name
    assert repr(one.rows) == repr(two.rows)  # NaN equals NaN


@pytest.mark.parametrize("way", WAYS)
class TestAsAnAutomaticStep:
    """Writing out what Lightning does changes no bit of a run."""

    @pytest.mark.sampled(1)
    @pytest.mark.parametrize("local_epochs", [1, 2])
    @pytest.mark.parametrize("algorithm", [DENSE, MIXED], ids=["dense", "spectral"])
    def test_with_every_layer(
        self, algorithm: Any, local_epochs: int, way: str, lit_mlp: Any, data: Any, fit: Fit
    ) -> None:
        start: list[Tensor] = []

        def setup(self: Any, stage: str) -> None:
            algorithm.bind(self).initialize(Workers())  # here, so that only training changes them in the fit
            start.append(self.net[3].weight.detach().clone())

        kind = variant(lit_mlp, lambda lit: lit.net.insert(1, nn.BatchNorm1d(12)), setup=setup)
        one, two = both_ways(way, fit, kind, data, algorithm=algorithm, local_epochs=local_epochs)
        assert_same_run(one, two)
        assert not torch.equal(start[-1], two.module.net[3].weight)

    @pytest.mark.sampled(1)
    @pytest.mark.parametrize("precision", ["bf16-true", "64-true"])
    def test_in_every_precision(self, precision: Any, way: str, lit_mlp: Any, data: Any, fit: Fit) -> None:
        assert_same_run(*both_ways(way, fit, lit_mlp, data, trainer={"precision": precision}))

    @pytest.mark.sampled(1)
    def test_with_scaled_gradients(self, way: str, lit_mlp: Any, data: Any, fit: Fit) -> None:
        """A large scale overflows at first: steps are skipped, and no client starts from the scale of another."""
        steep = variant(
            lit_mlp,
            lambda lit: lit.hparams.update(lr=1e-4),
            training_step=lambda self, *args: 1000.0 * lit_mlp.training_step(self, *args),
        )
        plugin = ScalesAlone(2.0**117)
        one, two = both_ways(way, fit, steep, data, trainer={"plugins": [plugin]}, local_epochs=2)
        assert_same_run(one, two)
        assert plugin.scaler.get_scale() == 2.0**117
        assert not same_state(one.state, fit(seeded(steep), data, local_epochs=2).state)

    @pytest.mark.sampled(1)
    def test_with_clients_that_fail_and_are_left_out(self, way: str, lit_mlp: Any, data: Any, fit: Fit) -> None:
        def too_warm(lit: Any, batch: Any) -> None:
            if batch[0][0, 0] > 1.0:
                raise FloatingPointError("too warm")

        faults = ls.Faults(on_error=ls.LeaveOut(1.0))
        with pytest.warns(ls.SpectralWarning, match=r"average: training failed \(FloatingPointError: too warm\)"):
            one, two = both_ways(way, fit, variant(lit_mlp, before_step=too_warm), data, faults=faults, max_epochs=3)
        assert_same_run(one, two)
        assert 0 < sum(two.history.column("fl/left_out_error")) < 12

    @pytest.mark.sampled(1)
    @pytest.mark.parametrize("hook", [ls.ProximalTerm(5.0), ls.GradientClip(0.1)], ids=["proximal", "clip"])
    def test_with_local_hooks(self, hook: Any, way: str, lit_mlp: Any, data: Any, fit: Fit) -> None:
        one, two = both_ways(way, fit, lit_mlp, data, local_hooks=[hook])
        assert_same_run(one, two)
        assert not torch.equal(fit(seeded(lit_mlp), data).module.net[0].weight, two.module.net[0].weight)

    @pytest.mark.sampled(1)
    @pytest.mark.parametrize("is_scaled", [False, True], ids=["", "scaled"])
    def test_with_steps_that_are_skipped_and_epochs_that_end_early(
        self, is_scaled: bool, way: str, lit_mlp: Any, data: Any, fit: Fit
    ) -> None:
        def training_step(self: Any, batch: Any, batch_idx: int) -> Any:
            loss = lit_mlp.training_step(self, batch, batch_idx)
            return None if batch_idx == 1 else {"loss": loss, "more": 1}

        def on_train_batch_start(self: Any, batch: Any, batch_idx: int) -> int | None:
            return -1 if batch_idx == 2 else None

        kind = variant(lit_mlp, training_step=training_step, on_train_batch_start=on_train_batch_start)
        trainer = {"plugins": [ScalesAlone()]} if is_scaled else {}
        assert_same_run(*both_ways(way, fit, kind, data, local_epochs=2, trainer=trainer))

    def test_with_a_client_that_trains_nothing(self, way: str, lit_mlp: Any, data: Any, fit: Fit) -> None:
        lit = WAYS[way](lit_mlp)()
        before = copy.deepcopy(lit.state_dict())
        fitted = fit(lit, data, algorithm=replace(MIXED, spectral_start=None), max_epochs=1, local_epochs=0)
        assert same_state(fitted.state, before)
        assert fitted.history.column("fl/loss") == []


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
            step_by_hand(self, loss)  # all have gradients when one steps: its hooks must leave the others' alone
        return loss

    def configure_optimizers(self) -> Any:
        options = {"lr": 0.3, "momentum": 0.9}
        if self.automatic_optimization:
            optimizer = torch.optim.SGD(self.parameters(), **options)
            return [optimizer], [StepLR(optimizer, 1, 0.5)]
        halves = (torch.optim.SGD(half.parameters(), **options) for half in (self.net[:4], self.net[4:]))
        return [{"optimizer": half, "lr_scheduler": StepLR(half, 1, 0.5)} for half in halves]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("algorithm", [DENSE, MIXED], ids=["dense", "spectral"])
def test_two_optimizers_of_one_loss_are_one_optimizer(algorithm: Any, data: Any, fit: Fit) -> None:
    settings: dict[str, Any] = {"algorithm": algorithm, "local_epochs": 2, "max_epochs": 3}
    plain = fit(LitHalves(manual=False), data, **settings)
    manual = fit(LitHalves(manual=True), data, **settings)
    assert_same_run(plain, manual)
    assert manual.history.column("fl/lr") == [0.3, 0.15, 0.075]


def test_local_hooks_act_on_what_each_optimizer_steps(data: Any, fit: Fit) -> None:
    """The pull of a proximal term is the sum of those of its parts, so one optimizer shows what two must do."""
    plain = fit(LitHalves(manual=False), data, local_hooks=[ls.ProximalTerm(2.0)])
    manual = fit(LitHalves(manual=True), data, local_hooks=[ls.ProximalTerm(2.0)])
    assert_same_run(plain, manual)
    assert not torch.equal(manual.module.net[6].weight, fit(LitHalves(manual=True), data).module.net[6].weight)


def test_steps_are_those_of_all_optimizers(data: Any, fit: Fit) -> None:
    steps: list[int] = []
    note = acting(on_client_end=lambda trainer, model, turn: steps.append(turn.upload.num_steps))
    fit(seeded(AdversarialPair), data, algorithm=DENSE, clients_per_round=3, max_epochs=1, callbacks=[note])
    assert steps == [6, 6, 6]  # three batches, two optimizers


def test_resumed_run_equals_the_uninterrupted_one(data: Any, fit: Fit, tmp_path: Path) -> None:
    check_resumes(fit, AdversarialPair, data, tmp_path, algorithm=UNCLIPPED, clients_per_round=3)


def test_an_extra_round_beside_the_run_trains_the_same_way(data: Any, fit: Fit) -> None:
    def listen(trainer: pl.Trainer, model: Any) -> None:
        cosines.append(float(trainer.callback_metrics["fl/fedavg_alignment"]))

    cosines: list[float] = []
    watchers = [ls.plugin.callbacks.UpdateAlignment(every_n_rounds=1), acting(on_train_epoch_end=listen)]
    fit(seeded(AdversarialPair), data, algorithm=DENSE, clients_per_round=3, callbacks=watchers)
    assert cosines == [pytest.approx(1.0, abs=1e-6)] * 2  # the round it compares with does what the run does


def test_schedulers_can_be_read_and_are_stepped_by_the_server(data: Any, fit: Fit) -> None:
    def on_train_epoch_end(self: Any) -> None:
        for scheduler in self.lr_schedulers():
            scheduler.step()
            rates.append(scheduler.get_last_lr()[0])

    rates: list[float] = []
    history = fit(
        variant(LitHalves, on_train_epoch_end=on_train_epoch_end)(manual=True), data, clients_per_round=2
    ).history
    assert rates == [0.3] * 4 + [0.15] * 4
    assert history.column("fl/lr") == [0.3, 0.15]


def test_hooks_of_optimizers_run_in_each_step(data: Any, fit: Fit) -> None:
    stepped: list[str] = []

    def on_before_optimizer_step(self: Any, optimizer: Any) -> None:
        assert type(optimizer) is torch.optim.SGD
        stepped.append("front" if optimizer is self.optimizers()[0].optimizer else "back")

    def configure_gradient_clipping(self: Any, *args: Any, **options: Any) -> None:
        raise AssertionError("Lightning leaves clipping to a module that optimises manually")

    clips = {"configure_gradient_clipping": configure_gradient_clipping}
    kind = variant(LitHalves, on_before_optimizer_step=on_before_optimizer_step, **clips)
    fit(kind(manual=True), data, clients_per_round=2, max_epochs=1)
    assert stepped == 2 * 3 * ["front", "back"]


def test_what_an_optimizer_wrapped_by_the_client_says_is_that_of_the_users(data: Any, fit: Fit) -> None:
    def on_train_epoch_start(self: Any) -> None:
        front, back = self.optimizers()
        assert isinstance(front, torch.optim.SGD)
        assert front.param_groups is front.optimizer.param_groups
        assert self.optimizers(use_pl_optimizer=False) == [front.optimizer, back.optimizer]
        assert not front.state  # every client begins without
        seen.append(front.param_groups[0]["lr"])

    seen: list[float] = []
    fit(variant(LitHalves, on_train_epoch_start=on_train_epoch_start)(manual=True), data, clients_per_round=2)
    assert seen == [0.3, 0.3, 0.15, 0.15]


def test_backward_passes_by_hand_need_manual_optimisation(lit_mlp: Any, data: Any, fit: Fit) -> None:
    kind = variant(lit_mlp, training_step=lambda self, *args: self.manual_backward(lit_mlp.training_step(self, *args)))
    with pytest.raises(ls.ClientError, match="`manual_backward` is for manual optimisation: set"):
        fit(kind(), data)


def test_several_optimizers_need_manual_optimisation(lit_mlp: Any, data: Any, fit: Fit) -> None:
    def halves(self: Any) -> Any:
        return [torch.optim.SGD(half.parameters(), lr=0.1) for half in (self.net[:2], self.net[2:])]

    with pytest.raises(ValueError, match=r"got 2 \(SGD, SGD\); several need manual optimisation: `self.automatic_opt"):
        fit(variant(lit_mlp, configure_optimizers=halves)(), data)


def test_gradients_from_before_the_step_are_unscaled_in_it(data: Any, fit: Fit) -> None:
    plain = fit(seeded(ClosesFirst), data)
    assert same_state(plain.state, fit(seeded(ClosesFirst), data, trainer={"plugins": [ScalesAlone()]}).state)
    assert not same_state(plain.state, fit(seeded(Lit), data).state)  # it does not step on every batch


@pytest.mark.parametrize("algorithm", [DENSE, MIXED], ids=["dense", "spectral"])
def test_local_hooks_act_once_in_each_step(algorithm: Any, data: Any, fit: Fit) -> None:
    """Not in each backward pass, where a step is taken for several of them: a pull would act twice."""

    class ByHand(Manual):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = LitNet.training_step(self, batch, batch_idx)
            if batch_idx % 2 == 0:
                self.optimizers().zero_grad()
            self.manual_backward(loss)
            if batch_idx % 2 == 1:
                self.optimizers().step()
            return loss

    data.batch_size = 2
    options: dict[str, Any] = {"algorithm": algorithm, "local_hooks": [ls.ProximalTerm(5.0)]}
    one, two = fit(seeded(StepsEveryOtherBatch), data, **options), fit(seeded(ByHand), data, **options)
    assert same_state(one.state, two.state)


@pytest.mark.parametrize(("max_steps", "seen"), [(2, 12), (-1, -1)])
def test_runs_that_end_by_steps_or_never(max_steps: int, seen: int, lit_mlp: Any, data: Any, fit: Fit) -> None:
    totals: list[int] = []
    kind = variant(lit_mlp, on_train_epoch_start=lambda self: totals.append(self.trainer.max_steps))

    class Stop(ls.RoundCallback):
        def on_round_end(self, trainer: pl.Trainer, pl_module: Any, summary: Any) -> None:
            trainer.should_stop = summary.round_idx == 1

    options: dict[str, Any] = {"max_epochs": -1, "trainer": {"max_steps": max_steps}, "callbacks": [Stop()]}
    fit(kind(), data, algorithm=DENSE, clients_per_round=2, local_epochs=2, **options)
    assert totals == [seen] * 8
