"""A client's steps are the user's, with the hooks that Lightning would call; what it logs is averaged over its turn."""

from collections.abc import Collection
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
import torchmetrics
from federation import Fit, seeded
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import TensorDataset
from toy_models import LitNet, cross_entropy, variant

import lightning_spectral as ls
from lightning_spectral.algorithms.fed_avg import DenseSide
from lightning_spectral.client.batches import BatchSource, ClientData
from lightning_spectral.client.device import StepActions
from lightning_spectral.client.local_loop import LocalLoop, LocalResult, LocalSettings, LocalTask, Placement, Recorder
from lightning_spectral.plugin.user_hooks import defines
from lightning_spectral.protocol.records import Download, LoggedValue, WorkUnit


class LitPlain(pl.LightningModule):
    """Notes its largest gradient wherever a hook may look at them."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(3, 1)
        self.seen: dict[str, list[float]] = {"after backward": [], "before step": []}

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        return (self.line(x).squeeze(1) - y).square().mean()

    def note(self, when: str) -> None:
        self.seen[when].append(max(float(p.grad.abs().max()) for p in self.parameters() if p.grad is not None))

    def on_after_backward(self) -> None:
        self.note("after backward")

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.note("before step")


SENT = Download(WorkUnit(0), 1.0, {})


@pytest.fixture
def client_data() -> ClientData:
    x = torch.randn(20, 3, generator=torch.Generator().manual_seed(0))
    return ClientData(BatchSource(TensorDataset(x, 8 * x.sum(1))), torch.arange(20), batch_size=4, seed=0, ids=(0, 0))


def run(module: Any, data: ClientData, sent: Download = SENT, before_step: Any = ((),), **settings: Any) -> LocalResult:
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
    task = LocalTask(sent, data, Recorder(module), before_step=before_step)
    return LocalLoop(module, [optimizer], LocalSettings(**settings))(task)


def trained(data: ClientData, scaler: GradScaler | None, skip: Collection[int] = ()) -> Any:
    module = seeded(LitPlain)
    step = module.training_step
    module.training_step = lambda b, i: None if i in skip else step(b, i)
    run(module, data, placement=Placement(scaler=scaler))
    return module


def same(one: nn.Module, two: nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))


def test_scaling_by_a_power_of_two_changes_no_bit(client_data: ClientData) -> None:
    plain, scaled = trained(client_data, None), trained(client_data, GradScaler("cpu", init_scale=2.0**10))
    assert same(plain, scaled)
    assert scaled.seen["after backward"] == [2.0**10 * g for g in plain.seen["after backward"]]  # as in Lightning
    assert scaled.seen["before step"] == plain.seen["before step"]


def test_a_step_whose_gradients_overflow_is_skipped(client_data: ClientData) -> None:
    """Scaled by 2^125, gradients of 8 and more do; each skipped step halves the scale."""
    module = trained(client_data, GradScaler("cpu", init_scale=2.0**125))
    overflows = {i for i, gradient in enumerate(module.seen["before step"]) if gradient == float("inf")}
    assert 1 <= len(overflows) <= 4
    assert same(module, trained(client_data, None, skip=overflows))


def test_hooks_around_a_step_see_unscaled_gradients(client_data: ClientData) -> None:
    seen: list[float] = []

    def seen_with(scaler: GradScaler | None) -> list[float]:
        seen.clear()
        module = seeded(LitPlain)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
        optimizer.register_step_post_hook(lambda *args: seen.append(float(module.line.bias.grad)))  # type: ignore[arg-type]
        hook = ls.GradientClip(0.5).start_client(module, optimizer)
        before_step = [lambda: seen.append(float(module.line.bias.grad)), hook]  # type: ignore[arg-type]
        task = LocalTask(SENT, client_data, Recorder(module), before_step=[before_step])
        LocalLoop(module, [optimizer], LocalSettings(Placement(scaler=scaler)))(task)
        return list(seen)

    assert seen_with(GradScaler("cpu", init_scale=2.0**10)) == seen_with(None)


class Reads(TorchDispatchMode):
    """Counts what makes the host wait for a value of a tensor."""

    WAITING = ("_local_scalar_dense", "item", "is_nonzero", "equal", "nonzero", "_unique2", "masked_select")

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.overloadpacket.__name__ in self.WAITING
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("algorithm", [ls.FedAvg(), ls.SpectralSharding(keep_ratio=0.5, clip_tau=2.0)], ids=repr)
def test_local_steps_read_no_value_from_the_device(
    algorithm: Any, toy: TensorDataset, fit: Fit, monkeypatch: pytest.MonkeyPatch
) -> None:
    def logged(lit: Any, batch: Any) -> torch.Tensor:
        loss = cross_entropy(lit, batch)
        lit.log("train_loss", loss, prog_bar=True)
        return loss

    def reading(lit: Any, batch: Any) -> torch.Tensor:
        (loss := logged(lit, batch)).item()
        return loss

    def make(loss: Any = logged) -> LitNet:
        layers = nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.Dropout(0.1), nn.Linear(8, 3)
        optimizer = partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=1e-3)
        return LitNet(nn.Sequential(*layers), loss=loss, optimizer=optimizer)

    reads: list[int] = []

    train = LocalLoop.__call__

    def counted(*args: Any) -> Any:
        with Reads() as mode:
            result = train(*args)
        reads.append(mode.count)
        return result

    monkeypatch.setattr(LocalLoop, "__call__", counted)

    def counts(local_epochs: int, module: pl.LightningModule) -> list[int]:
        reads.clear()
        data = ls.FederatedDataModule(toy, ls.IIDPartitioner(num_clients=6), batch_size=5)
        hooks = [ls.ProximalTerm(0.1), ls.GradientClip(1.0)]
        settings: dict[str, Any] = {"clients_per_round": 2, "local_epochs": local_epochs, "local_hooks": hooks}
        fit(module, data, algorithm=algorithm, **settings)
        return list(reads)

    dense = algorithm == ls.FedAvg()
    with nullcontext() if dense else pytest.warns(ls.SpectralWarning, match="weight_decay"):
        assert counts(1, make()) == counts(5, make()) == [0, 0]  # losses are read together, when a client is done
        assert counts(1, make(reading)) == [4, 4]  # 20 examples in batches of 5: the count is not blind


class LitHooked(LitPlain):
    """Defines one hook in its class; another may be put on the instance."""

    def on_train_epoch_end(self) -> None:
        self.seen.setdefault("epoch end", []).append(1.0)


def test_only_hooks_that_the_user_wrote_are_called(client_data: ClientData, monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []

    def lightnings_own(name: str) -> Any:
        return lambda *args: called.append(name)

    for name in ("on_train_epoch_start", "on_train_batch_start", "on_train_batch_end", "on_before_backward"):
        monkeypatch.setattr(pl.LightningModule, name, lightnings_own(name))
    module = LitHooked()
    module.on_before_zero_grad = lightnings_own("the instance's")  # type: ignore[method-assign]
    sent = replace(SENT, local_epochs=2)
    run(module, client_data, sent, defines=defines)
    assert called == ["the instance's"] * 10  # five batches, two epochs
    assert {when: len(values) for when, values in module.seen.items()} == {
        "after backward": 10,
        "before step": 10,
        "epoch end": 2,
    }
    called.clear()
    run(module, client_data, sent)  # without `defines` all hooks are called
    assert len(called) == 2 + 10 + 10 + 10 + 10


def test_a_device_half_acts_in_every_step(data: Any, fit: Fit) -> None:
    """Its actions belong to one client: they are asked for once a turn, after the client's values are there."""
    events: list[str] = []

    class Acting(DenseSide):
        def start(self, client: Any, download: Download) -> StepActions:
            assert torch.equal(client.net.weight, download.tensors["net.weight"])
            events.append(f"client {download.unit.client_id}")
            return StepActions(
                lambda: events.append("before_forward"),
                lambda optimizer: events.append(f"before a step of {type(optimizer).__name__}"),
            )

    class Algorithm(ls.FedAvg):
        side = Acting

    def on_train_batch_start(self: Any, batch: Any, batch_idx: int) -> int | None:
        events.append("on_train_batch_start")
        return -1 if batch_idx == 2 else None

    lit = variant(
        LitNet, before_step=lambda lit, batch: events.append("training_step"), on_train_batch_start=on_train_batch_start
    )(nn.Linear(6, 3))
    data.val = None
    ledger = fit(lit, data, algorithm=Algorithm(), clients_per_round=3).ledger
    step = ["on_train_batch_start", "before_forward", "training_step", "before a step of SGD"]
    turn = [*step, *step, "on_train_batch_start"]  # the epoch ends there: no forward pass, and nothing before it
    assert events == [said for row in ledger.rows for said in [f"client {row.client_id}", *turn]]


class LitOwnWays(LitPlain):
    """Takes every part of a step itself, as Lightning would."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[str] = []

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        self.events.append(f"step {batch_idx}")
        optimizer.step(closure=optimizer_closure)
        self.events.append("stepped")

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        self.events.append("zero")
        optimizer.zero_grad()

    def backward(self, loss: torch.Tensor, *args: Any, **options: Any) -> None:
        self.events.append("backward")
        loss.backward(*args, **options)

    def configure_gradient_clipping(self, optimizer: Any, gradient_clip_val: Any, gradient_clip_algorithm: Any) -> None:
        self.events.append("clip")


@pytest.mark.parametrize("scaler", [None, GradScaler("cpu", init_scale=2.0**10)], ids=["plain", "scaled"])
def test_a_user_may_take_every_part_of_a_step(client_data: ClientData, scaler: GradScaler | None) -> None:
    own, plain = seeded(LitOwnWays), seeded(LitPlain)
    acts: list[str] = own.events
    before_step = [[lambda: acts.append("the algorithm")]]
    for module, act in ((own, before_step), (plain, [[]])):
        result = run(module, client_data, before_step=act, placement=Placement(scaler=scaler), defines=defines)
        assert result.num_steps == 5
    assert same(own, plain)
    assert own.seen == plain.seen
    step = ["zero", "backward", "clip", "the algorithm", "stepped"]
    assert acts == [event for i in range(5) for event in [f"step {i}", *step]]


def test_a_loop_without_defines_leaves_lightnings_own_ways_of_a_step_alone(client_data: ClientData) -> None:
    """They need a Trainer, and there is none."""
    module = seeded(LitOwnWays)
    run(module, client_data)
    assert module.events.count("clip") == 5
    assert same(module, trained(client_data, None))


def test_a_clients_value_is_the_mean_over_its_examples() -> None:
    recorder = Recorder(nn.Linear(1, 1))
    finished = []
    for batches in ([(1.0, 3), (5.0, 1)], [(7.0, 6)]):
        recorder.start_client()
        for value, batch_size in batches:
            recorder.num_examples = batch_size
            recorder.log("loss", torch.tensor(value))
        finished.append(recorder.finish_client()["loss"].value)
    assert finished == [2.0, 7.0]
    recorder.start_client()
    assert recorder.finish_client() == {}


def test_metric_is_computed_once_per_client_and_starts_empty() -> None:
    module: Any = nn.Module()
    module.mean = torchmetrics.MeanMetric()
    recorder = Recorder(module)
    module.mean.update(1e6)
    for value in (1.0, 4.0):
        recorder.start_client()
        module.mean.update(value)
        recorder.log_dict({"mean": module.mean}, prog_bar=True, logger=False)
        assert recorder.finish_client() == {"mean": LoggedValue(value, prog_bar=True, logger=False)}


def test_names_and_weights_follow_lightning() -> None:
    recorder = Recorder(nn.Linear(1, 1))
    recorder.start_client()
    recorder.log("both", 1.0, on_step=True, on_epoch=True)
    recorder.log("own", 1.0, batch_size=3)
    recorder.log("own", 5.0, batch_size=1, sync_dist=True)
    finished = recorder.finish_client()
    assert set(finished) == {"both_epoch", "own"}
    assert finished["own"].value == pytest.approx(2.0)


@pytest.mark.parametrize("value", ["text", [1.0, 2.0], None])
def test_what_is_no_number_is_refused_by_its_name(value: Any) -> None:
    with pytest.raises(TypeError, match=r"^`self\.log\('x', \.\.\.\)` takes a number, a tensor or a metric.*, got "):
        Recorder(nn.Module()).log("x", value)


def test_numbers_of_numpy_are_numbers() -> None:
    recorder = Recorder(nn.Module())
    recorder.log("x", np.float32(0.5))  # type: ignore[arg-type]
    assert recorder.finish_client()["x"].value == 0.5
