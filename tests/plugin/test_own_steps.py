"""Modules that decide how their optimizer steps: as in plain Lightning, and as where they leave it to the client."""

import copy
from dataclasses import replace
from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from federation import Fit, same_state, seeded
from lightning.pytorch.plugins import MixedPrecision
from lightning_versions import AUTOCAST_CACHES
from one_by_one import OneByOne
from own_steps import DENSE, MIXED, UNCLIPPED, WAYS, ScalesAlone, assert_same_run, both_ways
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.utils.data import DataLoader

import lightning_spectral as ls
from lightning_spectral.protocol.cohort import Workers
from lightning_spectral.protocol.records import Download, WorkUnit


@pytest.fixture
def fit(fit: Fit) -> Fit:
    """Fits of two rounds, with spectral sharding."""
    return partial(fit, algorithm=MIXED, max_epochs=2)


@pytest.mark.parametrize("way", WAYS)
class TestAsAnAutomaticStep:
    """Writing out what Lightning does changes no bit of a run."""

    @pytest.mark.parametrize("local_epochs", [1, 2])
    @pytest.mark.parametrize("algorithm", [DENSE, MIXED], ids=["dense", "spectral"])
    def test_with_every_layer(
        self, algorithm: Any, local_epochs: int, way: str, lit_mlp: Any, data: Any, fit: Fit
    ) -> None:
        start: list[Tensor] = []

        class Lit(lit_mlp):  # type: ignore[misc]
            def __init__(self) -> None:
                super().__init__()
                self.net.insert(1, nn.BatchNorm1d(12))

            def setup(self, stage: str) -> None:
                algorithm.bind(self).initialize(Workers())  # here, so that only training changes them in the fit
                start.append(self.net[3].weight.detach().clone())

        one, two = both_ways(way, fit, Lit, data, algorithm=algorithm, local_epochs=local_epochs)
        assert_same_run(one, two)
        assert not torch.equal(start[-1], two.module.net[3].weight)

    @pytest.mark.parametrize("precision", ["bf16-true", "64-true"])
    def test_in_every_precision(self, precision: Any, way: str, lit_mlp: Any, data: Any, fit: Fit) -> None:
        assert_same_run(*both_ways(way, fit, lit_mlp, data, trainer={"precision": precision}))

    def test_with_scaled_gradients(self, way: str, lit_mlp: Any, data: Any, fit: Fit) -> None:
        """A large scale overflows at first: steps are skipped, and no client starts from the scale of another."""

        class Steep(lit_mlp):  # type: ignore[misc]
            def __init__(self) -> None:
                super().__init__(lr=1e-4)

            def training_step(self, batch: Any, batch_idx: int) -> Any:
                return 1000.0 * super().training_step(batch, batch_idx)

        plugin = ScalesAlone(2.0**117)
        one, two = both_ways(way, fit, Steep, data, trainer={"plugins": [plugin]}, local_epochs=2)
        assert_same_run(one, two)
        assert plugin.scaler.get_scale() == 2.0**117
        plain = fit(seeded(Steep), data, local_epochs=2)
        assert not same_state(one.state, plain.state)

    def test_with_clients_that_fail_and_are_left_out(self, way: str, lit_mlp: Any, data: Any, fit: Fit) -> None:
        class Lit(lit_mlp):  # type: ignore[misc]
            def training_step(self, batch: Any, batch_idx: int) -> Any:
                if batch[0][0, 0] > 1.0:
                    raise FloatingPointError("too warm")
                return super().training_step(batch, batch_idx)

        faults = ls.server.Faults(on_error=ls.server.LeaveOut(1.0))
        with pytest.warns(ls.SpectralWarning, match=r"average: training failed \(FloatingPointError: too warm\)"):
            one, two = both_ways(way, fit, Lit, data, faults=faults, max_epochs=3)
        assert_same_run(one, two)
        assert 0 < sum(two.history.column("fl/left_out_error")) < 12

    @pytest.mark.parametrize(
        "hook", [ls.client.ProximalTerm(5.0), ls.client.GradientClip(0.1)], ids=["proximal", "clip"]
    )
    def test_with_local_hooks(self, hook: Any, way: str, lit_mlp: Any, data: Any, fit: Fit) -> None:
        one, two = both_ways(way, fit, lit_mlp, data, local_hooks=[hook])
        assert_same_run(one, two)
        without = fit(seeded(lit_mlp), data)
        assert not torch.equal(without.module.net[0].weight, two.module.net[0].weight)

    def test_with_weight_decay_apart_from_gradients(self, way: str, lit_mlp: Any, data: Any, fit: Fit) -> None:
        class Lit(lit_mlp):  # type: ignore[misc]
            def configure_optimizers(self) -> Any:
                return torch.optim.AdamW(self.parameters(), lr=0.01, weight_decay=0.1)

        with pytest.warns(ls.SpectralWarning, match="weight_decay"):
            assert_same_run(*both_ways(way, fit, Lit, data, algorithm=UNCLIPPED))

    def test_with_data_from_a_loader(self, way: str, lit_mlp: Any, data: Any, toy: Any, fit: Fit) -> None:
        unindexed = ls.FederatedDataModule(
            OneByOne(toy), data.partitioner, val=toy, batch_size=4, labels=toy.tensors[1]
        )
        assert_same_run(*both_ways(way, fit, lit_mlp, unindexed))

    @pytest.mark.parametrize("is_scaled", [False, True], ids=["", "scaled"])
    def test_with_steps_that_are_skipped_and_epochs_that_end_early(
        self, is_scaled: bool, way: str, lit_mlp: Any, data: Any, fit: Fit
    ) -> None:
        class Lit(lit_mlp):  # type: ignore[misc]
            def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
                return -1 if batch_idx == 2 else None

            def training_step(self, batch: Any, batch_idx: int) -> Any:
                loss = super().training_step(batch, batch_idx)
                return None if batch_idx == 1 else {"loss": loss, "more": 1}

        data.val = None
        trainer = {"plugins": [ScalesAlone()]} if is_scaled else {}
        assert_same_run(*both_ways(way, fit, Lit, data, local_epochs=2, trainer=trainer))

    def test_with_a_client_that_trains_nothing(self, way: str, lit_mlp: Any, data: Any, fit: Fit) -> None:
        lit = WAYS[way](lit_mlp)()
        before = copy.deepcopy(lit.state_dict())
        fitted = fit(lit, data, algorithm=replace(MIXED, spectral_start=None), max_epochs=1, local_epochs=0)
        assert same_state(fitted.state, before)
        assert str(fitted.history.column("fl/loss")) == "[nan]"


@pytest.mark.parametrize("mixed", ["bf16-mixed", "16-mixed"])
def test_own_hooks_change_nothing_in_mixed_precision(mixed: Any, lit_mlp: Any, data: Any, fit: Fit) -> None:
    """A large scale overflows at first: steps are skipped, and no client starts from the scale of another."""
    scaler = GradScaler("cpu", init_scale=2.0**20, growth_interval=1) if mixed == "16-mixed" else None
    trainer = {"plugins": [MixedPrecision(mixed, "cpu", scaler)]}
    assert_same_run(*both_ways("own hooks", fit, lit_mlp, data, trainer=trainer, local_epochs=2))
    assert scaler is None or scaler.get_scale() == 2.0**20


HOOKS = ["training_step", "on_train_epoch_start", "on_train_batch_start", "on_before_zero_grad", "on_before_backward"]
HOOKS += ["on_after_backward", "on_before_optimizer_step", "on_train_batch_end", "on_train_epoch_end"]
HOOKS += ["optimizer_step", "optimizer_zero_grad", "backward", "configure_gradient_clipping"]


class LitSmooth(pl.LightningModule):
    """A network whose every step shows in its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))

    def loss(self, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.5, momentum=0.9)


class Accumulates(LitSmooth):
    """Steps once for two batches, as Lightning's documentation of `optimizer_step` shows."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        if batch_idx % 2 == 1:
            optimizer.step(closure=optimizer_closure)
        else:
            optimizer_closure()

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        if batch_idx % 2 == 0:
            optimizer.zero_grad()


class WarmsUp(LitSmooth):
    """Sets the learning rate of each step."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        for group in optimizer.param_groups:
            group["lr"] = 0.1 * (1 + batch_idx)
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)


class ClosesFirst(LitSmooth):
    """Computes gradients, looks at them, and then steps without a closure."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        if float(optimizer_closure()) > 1.0:
            optimizer.step()


class SkipsBatches(LitSmooth):
    """Returns no loss for some batches, and steps in a hook of its own."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None if batch_idx in (1, 2) else super().training_step(batch, batch_idx)

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        optimizer.step(closure=optimizer_closure)


class Clips(LitSmooth):
    def configure_gradient_clipping(self, optimizer: Any, gradient_clip_val: Any, gradient_clip_algorithm: Any) -> None:
        assert gradient_clip_val is gradient_clip_algorithm is None
        self.clip_gradients(optimizer, gradient_clip_val=0.05, gradient_clip_algorithm="norm")


class GoesBackwardsItself(LitSmooth):
    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        (3.0 * loss).backward(*args, **kwargs)


class Sharp(torch.optim.SGD):
    """Evaluates the loss at two points, as sharpness-aware minimisation does; enables no gradients for that."""

    @torch.no_grad()
    def step(self, closure: Any) -> Any:  # type: ignore[override]
        loss = closure()
        parameters = [p for group in self.param_groups for p in group["params"]]
        before = [p.clone() for p in parameters]
        for p in parameters:
            p.add_(p.grad, alpha=0.05)
        closure()
        for p, old in zip(parameters, before, strict=True):
            p.copy_(old)
        super().step()
        return loss


class LooksTwice(LitSmooth):
    def configure_optimizers(self) -> Any:
        return Sharp(self.parameters(), lr=0.5, momentum=0.9)


class SearchesLines(LitSmooth):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.2, max_iter=3)


class Manual(LitSmooth):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class ManualAccumulates(Manual):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer = self.optimizers()
        if batch_idx % 2 == 0:
            optimizer.zero_grad()
        self.manual_backward(self.loss(batch) / 2)
        if batch_idx % 2 == 1:
            optimizer.step()


class ManualWithClosures(Manual):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer = self.optimizers()

        def closure() -> Tensor:
            loss = self.loss(batch)
            optimizer.zero_grad()
            self.manual_backward(loss)
            return loss

        with optimizer.toggle_model(sync_grad=True):
            optimizer.step(closure=closure)


class ManualSeveralTimes(Manual):
    """Several steps on a batch, with a graph that is kept."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer = self.optimizers()
        for number in range(2):
            loss = self.loss(batch)
            optimizer.zero_grad()
            self.manual_backward(loss, retain_graph=True)
            if number == 0:
                self.manual_backward(loss)
            self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="value")
            optimizer.step()
        return {"loss": loss, "more": 1}


KINDS = [Accumulates, WarmsUp, ClosesFirst, SkipsBatches, Clips, GoesBackwardsItself, LooksTwice, SearchesLines]
KINDS += [ManualAccumulates, ManualWithClosures, ManualSeveralTimes]
PRECISIONS = {"": None, "scaled": ScalesAlone, "bf16-mixed": lambda: MixedPrecision("bf16-mixed", "cpu")}
CASES = [(kind, name) for name in PRECISIONS for kind in KINDS]
WITHOUT_SCALE = (LooksTwice, SearchesLines, ClosesFirst)  # Lightning scales the only closure that a step gets


def watched(kind: Any, calls: list[Any], weights: list[Tensor]) -> Any:
    """A module of this kind that notes its hooks as they are called, and its weights after each epoch."""

    def spy(name: str) -> Any:
        inherited = getattr(kind, name)

        def hook(self: Any, *args: Any, **options: Any) -> Any:
            calls.append((name, *(argument for argument in args if isinstance(argument, int))))
            if name == "on_train_epoch_end":
                weights.append(nn.utils.parameters_to_vector(self.parameters()).detach().clone())
            return inherited(self, *args, **options)

        return hook

    own = {name: spy(name) for name in HOOKS if "on_" in name or name in vars(kind)}
    return seeded(type(kind.__name__, (kind,), own))


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`", "ignore:You have overridden `on_")
@pytest.mark.parametrize(
    ("kind", "precision"),
    [case for case in CASES if case[1] != "scaled" or case[0] not in WITHOUT_SCALE],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_a_client_trains_as_in_plain_lightning(
    kind: Any, precision: str, toy: Any, quiet: dict[str, Any], fit: Fit
) -> None:
    """Its hooks are called in the same order, with the same numbers, and its weights have the same bits."""
    if AUTOCAST_CACHES and kind is ManualSeveralTimes and precision == "bf16-mixed":
        pytest.skip("this Lightning's autocast keeps weights of before a step, which clients' does not")
    calls: tuple[list[Any], list[Any]] = ([], [])
    weights: tuple[list[Tensor], list[Tensor]] = ([], [])
    data = ls.FederatedDataModule(toy, ls.IIDPartitioner(num_clients=1), batch_size=20)
    plugins = [make()] if (make := PRECISIONS[precision]) else []
    trainer = {"plugins": plugins}
    fit(watched(kind, calls[0], weights[0]), data, algorithm=DENSE, clients_per_round=1, max_epochs=1, trainer=trainer)
    batches = [batch for batch, _ in data.client_data(Download(WorkUnit(0), 1.0, {})).epoch(0)]
    pl.Trainer(max_epochs=1, log_every_n_steps=1, plugins=plugins, **quiet).fit(
        watched(kind, calls[1], weights[1]), DataLoader(batches, batch_size=None, num_workers=0)
    )
    assert calls[0] == calls[1]
    assert torch.equal(weights[0][0], weights[1][0])


def test_gradients_from_before_the_step_are_unscaled_in_it(data: Any, fit: Fit) -> None:
    data.val = None
    plain = fit(seeded(ClosesFirst), data)
    scaled = fit(seeded(ClosesFirst), data, trainer={"plugins": [ScalesAlone()]})
    assert same_state(plain.state, scaled.state)
    assert not same_state(plain.state, fit(seeded(LitSmooth), data).state)  # it does not step on every batch


@pytest.mark.parametrize("algorithm", [DENSE, MIXED], ids=["dense", "spectral"])
def test_local_hooks_act_once_in_each_step(algorithm: Any, data: Any, fit: Fit) -> None:
    """Not in each backward pass, where a step is taken for several of them: a pull would act twice."""

    class ByHand(Manual):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self.loss(batch)
            if batch_idx % 2 == 0:
                self.optimizers().zero_grad()
            self.manual_backward(loss)
            if batch_idx % 2 == 1:
                self.optimizers().step()
            return loss

    data.val, data.batch_size = None, 2
    options: dict[str, Any] = {"algorithm": algorithm, "local_hooks": [ls.client.ProximalTerm(5.0)]}
    one, two = fit(seeded(Accumulates), data, **options), fit(seeded(ByHand), data, **options)
    assert same_state(one.state, two.state)


def test_an_epoch_is_a_round_and_a_step_is_one_too(lit_mlp: Any, data: Any, fit: Fit) -> None:
    """Also for a client: `self.trainer` is the Trainer of the rounds."""
    seen: list[tuple[int, int, int]] = []
    trainers: list[pl.Trainer] = []

    class Lit(lit_mlp):  # type: ignore[misc]
        def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
            assert epoch == self.current_epoch
            optimizer.step(closure=optimizer_closure)

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            seen.append((self.current_epoch, self.global_step, self.trainer.max_epochs))
            trainers.append(self.trainer)

    data.val, data.batch_size = None, 5  # ten examples a client: two batches
    fitted = fit(Lit(), data, clients_per_round=2, local_epochs=3)
    assert seen == 12 * [(0, 0, 2)] + 12 * [(1, 1, 2)]
    assert all(trainer is fitted.trainer for trainer in trainers)


@pytest.mark.parametrize(("max_steps", "seen"), [(2, 2), (-1, -1)])
def test_runs_that_end_by_steps_or_never(max_steps: int, seen: int, lit_mlp: Any, data: Any, fit: Fit) -> None:
    totals: list[int] = []

    class Lit(lit_mlp):  # type: ignore[misc]
        def on_train_epoch_start(self) -> None:
            totals.append(self.trainer.max_steps)

    class Stop(ls.RoundCallback):
        def on_round_end(self, trainer: pl.Trainer, pl_module: Any, summary: Any) -> None:
            trainer.should_stop = summary.round_idx == 1

    data.val = None
    options: dict[str, Any] = {"max_epochs": -1, "trainer": {"max_steps": max_steps}, "callbacks": [Stop()]}
    fit(Lit(), data, algorithm=DENSE, clients_per_round=2, local_epochs=2, **options)
    assert totals == [seen] * 8
