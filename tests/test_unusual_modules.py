"""Modules whose step, hooks and optimizers reach beyond their arguments: clients train as plain Lightning does."""

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from itertools import repeat
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from federation import Fit, Fitted, same_state, seeded
from lightning.pytorch.loggers import CSVLogger
from observed_runs import acting
from torch import Tensor, nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, IterableDataset
from toy_models import LitNet

import lightning_spectral as ls

UNCLIPPED = {"clip_tau": float("inf")}  # the clip is not exact for every optimizer, of which the package warns
HALF = ls.SpectralSharding(keep_ratio=0.5, **UNCLIPPED)
SPECTRAL = {"half": HALF, "mixed": ls.SpectralSharding(ls.Unbiased(), keep_ratio=[0.4, 0.8, 1.0], **UNCLIPPED)}
HERE: dict[str, Any] = {}  # by this global name, programs reach their module

pytestmark = [
    pytest.mark.filterwarnings("ignore:You have overridden `on_before_batch_transfer`"),  # to record batches
    pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated"),  # of one program
]
# Clients of some programs change what the server drops, of which the package warns
DROPPED = pytest.mark.filterwarnings("ignore::lightning_spectral.errors.SpectralWarning")


class Lit(LitNet):
    """Three layers, of which spectral sharding takes the second."""

    def __init__(self) -> None:
        layers = nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 3)
        super().__init__(nn.Sequential(*layers), momentum=0.9)
        HERE["lit"] = self


# A step, hooks and values that reach the module in other ways than as `self`


class StepByGlobal(Lit):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) + 0.05 * HERE["lit"].net[2].weight.square().sum()


class WholeStepByGlobal(Lit):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return nn.functional.cross_entropy(HERE["lit"](x), y)


class GradientHookByGlobal(Lit):
    def __init__(self) -> None:
        super().__init__()
        self.scale = 0.5
        self.net[0].weight.register_hook(lambda grad: grad * HERE["lit"].scale + HERE["lit"].net[0].weight.detach())


class GradientHookBySelf(Lit):
    def __init__(self) -> None:
        super().__init__()
        self.net[0].weight.register_hook(lambda grad: grad + 0.1 * self.net[0].weight.detach())


class ForwardHookByGlobal(Lit):
    def __init__(self) -> None:
        super().__init__()
        self.net[2].register_forward_hook(lambda layer, args, out: out * HERE["lit"].net[2].weight.norm())


class ForwardHookBySelf(Lit):
    def __init__(self) -> None:
        super().__init__()
        self.net[2].register_forward_hook(lambda layer, args, out: out * self.net[2].weight.norm())


class PenaltyKept(Lit):
    """Keeps a tensor with its graph, from the start."""

    def __init__(self) -> None:
        super().__init__()
        self.penalty = self.penalise()

    def penalise(self) -> Tensor:
        return self.net[4].weight.square().sum()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.penalty = self.penalise()
        return super().training_step(batch, batch_idx) + 0.05 * self.penalty


class FeaturesKept(Lit):
    """A hook leaves its layer's output, with its graph, in a dictionary; so does a forward pass before the fit."""

    def __init__(self) -> None:
        super().__init__()
        self.features: dict[str, Tensor] = {}
        self.net[2].register_forward_hook(lambda layer, args, out: self.features.update(middle=out))
        self(torch.zeros(1, 6))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) + 0.05 * self.features["middle"].square().mean()


# Parts and objects that cannot be copied


class Body(nn.Sequential):
    """Has code of its own, which `torch.compile` needs."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self:
            x = layer(x)
        return x


class CompiledInPlace(Lit):
    def __init__(self) -> None:
        super().__init__()
        self.net = Body(*self.net)
        self.net.compile(backend=counted)


def counted(graph: Any, example_inputs: Any) -> Any:
    """A backend of `torch.compile` that changes nothing, as ``"eager"`` does."""
    HERE["compiled"] = HERE.get("compiled", 0) + 1
    return graph.forward


class ScriptedPart(Lit):
    def __init__(self) -> None:
        super().__init__()
        self.net.insert(1, torch.jit.script(nn.Sequential(nn.Linear(12, 12), nn.Tanh())))


class WithLock(Lit):
    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        with self.lock:
            return super().training_step(batch, batch_idx)


class WithGenerator(Lit):
    def __init__(self) -> None:
        super().__init__()
        self.halves = (value for value in repeat(0.5))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) * next(self.halves)


class WithFile(Lit):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        HERE["opened"].write("a line\n")
        self.file.write("a line\n")
        return super().training_step(batch, batch_idx)

    def __init__(self) -> None:
        super().__init__()
        self.file = HERE["opened"]


class WithSocket(Lit):
    def __init__(self) -> None:
        super().__init__()
        self.socket = HERE["socket"]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        assert self.socket.fileno() > 0
        return super().training_step(batch, batch_idx)


@pytest.fixture(autouse=True)
def _opened(tmp_path: Path) -> Iterator[None]:
    """What two of the programs hold open."""
    with (tmp_path / "lines").open("w") as HERE["opened"], closing(socket.socket()) as HERE["socket"]:
        yield
    HERE.clear()


# Optimizers that cannot be rebuilt


class Lookahead(torch.optim.Optimizer):
    """Every second step, the weights go half the way back to where they were (Zhang et al., 2019)."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner, self.num_steps = inner, 0
        super().__init__(inner.param_groups, inner.defaults)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        for parameter in parameters_of(self):
            if not self.state[parameter]:
                self.state[parameter]["slow"] = parameter.detach().clone()
        loss = self.inner.step(closure)
        self.num_steps += 1
        if self.num_steps % 2 == 0:
            for parameter in parameters_of(self):
                parameter.copy_(self.state[parameter]["slow"].lerp_(parameter, 0.5))
        return loss


class WithLookahead(Lit):
    def configure_optimizers(self) -> Any:
        HERE["optimizer"] = Lookahead(super().configure_optimizers())
        return HERE["optimizer"]


class WithStepHooks(Lit):
    """Lowers the learning rate before each step, and shrinks weights after it."""

    def configure_optimizers(self) -> Any:
        def slow_down(optimizer: Any, *args: Any) -> None:
            for group in optimizer.param_groups:
                group["lr"] *= 0.8

        def shrink(optimizer: Any, *args: Any) -> None:
            for parameter in parameters_of(optimizer):
                parameter.data.mul_(0.99)

        optimizer = super().configure_optimizers()
        optimizer.register_step_pre_hook(slow_down)
        optimizer.register_step_post_hook(shrink)
        return optimizer


class WithOwnStep(Lit):
    """Its optimizer's ``step`` is replaced on the instance."""

    def configure_optimizers(self) -> Any:
        def step(closure: Any = None) -> Any:
            loss = plain(closure)
            for parameter in parameters_of(optimizer):
                parameter.data.mul_(0.99)
            return loss

        optimizer = super().configure_optimizers()
        plain = optimizer.step
        optimizer.step = step
        return optimizer


def parameters_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


# Manual optimisation


class Manual(Lit):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        self.clip_gradients(optimizer, gradient_clip_val=0.05, gradient_clip_algorithm="norm")
        optimizer.step()


class ClipsInStepHook(Manual):
    """Its optimizer clips gradients, which are there when it is called."""

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        optimizer.register_step_pre_hook(lambda *args: nn.utils.clip_grad_value_(parameters_of(optimizer), 0.003))
        return optimizer


class Accumulating(Manual):
    """Steps after every other batch; of three, the last one's gradients wait for the next epoch."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        self.manual_backward(LitNet.training_step(self, batch, batch_idx) / 2)
        if batch_idx % 2 == 1:
            optimizer.step()
            optimizer.zero_grad()


class AdversarialPair(Lit):
    """Two networks with opposite aims, two optimizers, of which one is toggled at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.net = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 6))
        self.judge = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        x, _ = batch
        makers, judges = self.optimizers()  # type: ignore[misc]
        bce = nn.functional.binary_cross_entropy_with_logits
        one, zero = torch.ones(len(x), 1), torch.zeros(len(x), 1)
        for optimizer, other in ((makers, self.judge), (judges, self.net)):
            self.toggle_optimizer(optimizer)
            assert not any(parameter.requires_grad for parameter in other.parameters())
            made = self.net(x[:, :2])
            loss = bce(self.judge(made), one)
            if optimizer is judges:
                loss = bce(self.judge(made.detach()), zero) + bce(self.judge(x), one)
            self.log("judge_loss" if optimizer is judges else "maker_loss", loss)
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self) -> Any:
        make = torch.optim.SGD(self.net.parameters(), lr=0.2, momentum=0.9)
        return make, torch.optim.SGD(self.judge.parameters(), lr=0.1)


# Hooks of automatic optimisation


class WarmsUp(Lit):
    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        for group in optimizer.param_groups:
            group["lr"] = 0.1 * (batch_idx + 1) / 3
        optimizer.step(closure=optimizer_closure)


class TrainsFirstLayersOnce(Lit):
    """All batches but the first train the last layer alone."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        features = self.net[:4](x)
        return nn.functional.cross_entropy(self.net[4](features if batch_idx == 0 else features.detach()), y)


class KeepsZeros(TrainsFirstLayersOnce):
    """The momentum of the first layers acts in all steps, because their gradients are zero instead of none."""

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        optimizer.zero_grad(set_to_none=False)


class ScalesBackward(Lit):
    def backward(self, loss: Tensor, *args: Any, **options: Any) -> None:
        (loss * 0.25).backward(*args, **options)


class Clips(Lit):
    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **options: Any) -> None:
        self.clip_gradients(optimizer, gradient_clip_val=0.05, gradient_clip_algorithm="norm")


class ReadsSchedule(Lit):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        schedule: Any = self.lr_schedulers()
        return super().training_step(batch, batch_idx) * (10 * schedule.get_last_lr()[0])

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        return [optimizer], [StepLR(optimizer, 10, 0.5)]


PROGRAMS: tuple[type[Lit], ...] = (
    *(StepByGlobal, WholeStepByGlobal, GradientHookByGlobal, GradientHookBySelf, ForwardHookByGlobal),
    *(ForwardHookBySelf, PenaltyKept, FeaturesKept, CompiledInPlace, ScriptedPart, WithLock, WithGenerator, WithFile),
    *(WithSocket, WithLookahead, WithStepHooks, WithOwnStep, Manual, ClipsInStepHook, Accumulating, AdversarialPair),
    *(WarmsUp, KeepsZeros, ScalesBackward, Clips, ReadsSchedule),
)
CHANGED = PenaltyKept, FeaturesKept  # attributes of these
SAME = WholeStepByGlobal, CompiledInPlace, WithLock, WithFile, WithSocket, ReadsSchedule  # as without what is added
EVERY_PROGRAM = pytest.mark.parametrize(
    "program", [pytest.param(one, id=one.__name__, marks=DROPPED if one in CHANGED else ()) for one in PROGRAMS]
)


@pytest.fixture(autouse=True)
def _compile_anew() -> Iterator[None]:
    yield
    torch._dynamo.reset()


# One client is plain Lightning


class RecordsBatches(ls.FederatedDataModule):
    """Notes the batches that clients train on."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.batches: list[Any] = []

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.batches.append([part.clone() for part in batch])
        return batch


class Replayed(IterableDataset[Any]):
    """The batches of a client, epoch by epoch."""

    def __init__(self, batches: list[Any], num_epochs: int) -> None:
        size = len(batches) // num_epochs
        self.epochs = iter([batches[epoch * size : (epoch + 1) * size] for epoch in range(num_epochs)])

    def __iter__(self) -> Iterator[Any]:
        return iter(next(self.epochs))


@EVERY_PROGRAM
@pytest.mark.filterwarnings("ignore:The 'train_dataloader' does not have many workers")
def test_one_client_ends_where_plain_lightning_does(program: Any, toy: Any, fit: Fit, quiet: Any) -> None:
    data = RecordsBatches(toy, ls.IIDPartitioner(num_clients=1), batch_size=40)
    federated = fit(seeded(program), data, algorithm=ls.FedAvg(), clients_per_round=1, local_epochs=3)
    assert len(data.batches) == 3 * 3
    start = seeded(program).state_dict()
    loader = DataLoader(Replayed(data.batches, 3), batch_size=None)
    plain = seeded(program)
    pl.Trainer(max_epochs=3, **quiet).fit(plain, loader)
    alone = plain.state_dict()
    assert list(federated.state) == list(alone)
    for name, value in alone.items():
        assert float((value - start[name]).abs().max()) > 1e-4, name
        torch.testing.assert_close(federated.state[name], value, rtol=0, atol=1e-6)  # the average rounds


@EVERY_PROGRAM
def test_what_the_program_adds_makes_a_difference(program: Any, toy: Any, fit: Fit) -> None:
    """Otherwise it would prove little that it trains as in plain Lightning."""
    data = ls.FederatedDataModule(toy, ls.IIDPartitioner(num_clients=1), batch_size=40)
    run = partial(fit, data=data, algorithm=ls.FedAvg(), clients_per_round=1)
    with_it, without = (run(seeded(kind)).module.net.state_dict() for kind in (program, program.__base__))
    if program in SAME:
        torch.testing.assert_close(with_it, without, rtol=0, atol=1e-6)
    else:
        assert not same_state(with_it, without)


# Several clients


@pytest.fixture
def data(toy: Any) -> ls.FederatedDataModule:
    """Three clients of three batches each."""
    return ls.FederatedDataModule(toy, ls.IIDPartitioner(num_clients=3), batch_size=16)


@pytest.fixture
def fit_three(fit: Fit) -> Fit:
    return partial(fit, clients_per_round=3, max_epochs=2)


@EVERY_PROGRAM
@pytest.mark.parametrize("algorithm", [ls.FedAvg(), SPECTRAL["mixed"]], ids=["dense", "mixed"])
def test_it_trains_and_twice_gives_the_same_bits(algorithm: Any, program: Any, data: Any, fit_three: Fit) -> None:
    def run() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        starts: list[dict[str, Tensor]] = []
        note = acting(on_round_start=lambda trainer, model, opened: starts.append(clones(model.module.state_dict())))
        fitted = fit_three(seeded(program), data, algorithm=algorithm, callbacks=[note])
        assert len(fitted.rows) == 2
        return starts[0], fitted.state

    (start, one), (_, two) = run(), run()
    assert same_state(one, two)
    for name, value in one.items():
        assert bool(torch.isfinite(value).all()), name
        assert not torch.equal(value, start[name]), name


def clones(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in state.items()}


@EVERY_PROGRAM
def test_no_client_notices_another(program: Any, toy: Any, fit: Fit) -> None:
    """What two of four clients send is the same where the others do not take part."""

    def sent(clients_per_round: int) -> dict[int, dict[str, Tensor]]:
        uploads: dict[int, dict[str, Tensor]] = {}

        def note(trainer: Any, model: Any, turn: Any) -> None:
            uploads[turn.unit.client_id] = clones(turn.upload.tensors)

        callbacks = [acting(on_client_end=note)]
        fit(seeded(program), data, algorithm=ls.FedAvg(), clients_per_round=clients_per_round, callbacks=callbacks)
        return uploads

    data = ls.FederatedDataModule(toy, ls.IIDPartitioner(num_clients=4), batch_size=10)
    every, two = sent(4), sent(2)
    assert len(two) == 2
    assert all(same_state(upload, every[client_id]) for client_id, upload in two.items())


@pytest.mark.parametrize("algorithm", [ls.FedAvg(), *SPECTRAL.values()], ids=["dense", *SPECTRAL])
def test_a_part_compiled_in_place_runs_compiled_on_clients(algorithm: Any, data: Any, fit_three: Fit) -> None:
    module = fit_three(seeded(CompiledInPlace), data, algorithm=algorithm).module
    assert HERE["compiled"] >= 1
    assert module.net._compiled_call_impl is not None


def test_what_optimizers_keep_on_themselves_and_of_their_own_starts_anew(data: Any, fit_three: Fit) -> None:
    class Watched(WithLookahead):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if batch_idx == 0:
                outer = HERE["optimizer"]
                seen.append((outer.num_steps, len(outer.state), len(outer.inner.state)))

    seen: list[tuple[int, int, int]] = []
    fit_three(seeded(Watched), data, algorithm=HALF)
    assert seen == [(0, 0, 0)] * 6


def test_gradients_that_one_client_leaves_are_not_the_next_ones(data: Any, fit_three: Fit) -> None:
    class Watched(Accumulating):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if batch_idx == 0:
                seen.append(sum(parameter.grad is not None for parameter in self.parameters()))

    seen: list[int] = []
    module = fit_three(seeded(Watched), data, algorithm=HALF).module
    assert seen == [0] * 6
    assert not any(parameter.grad is not None for parameter in module.parameters())


@pytest.mark.parametrize("program", [WithFile, WithLock, WithSocket, WithGenerator])
def test_an_object_that_cannot_be_copied_is_the_same_on_clients(program: Any, data: Any, fit_three: Fit) -> None:
    class Watched(program):  # type: ignore[misc]
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            seen.add(id(getattr(self, name)))

    name = {WithFile: "file", WithLock: "lock", WithSocket: "socket", WithGenerator: "halves"}[program]
    seen: set[int] = set()
    module = seeded(Watched)
    fit_three(module, data, algorithm=HALF)
    assert seen == {id(getattr(module, name))}


def test_a_lock_that_a_client_holds_when_it_fails_is_released(data: Any, fit_three: Fit) -> None:
    class Failing(WithLock):
        def forward(self, x: Tensor) -> Tensor:
            raise FloatingPointError("within the lock")

    module = seeded(Failing)
    with pytest.raises(
        ls.ClientError, match=r"Round 0, client \d, local training: FloatingPointError: within the lock"
    ):
        fit_three(module, data, algorithm=HALF)
    assert not module.lock.locked()


@pytest.mark.parametrize("algorithm", [ls.FedAvg(), HALF], ids=["dense", "half"])
def test_a_client_that_fails_while_an_optimizer_is_toggled_leaves_nothing_frozen(algorithm, data, fit_three):
    class Failing(AdversarialPair):
        def manual_backward(self, loss: Tensor, *args: Any, **options: Any) -> None:
            calls.append(loss.item())
            if len(calls) == 2:
                raise FloatingPointError("while toggled")
            super().manual_backward(loss, *args, **options)

    calls: list[float] = []
    module = seeded(Failing)
    faults = ls.server.Faults(on_error=ls.server.LeaveOut(1.0))
    with pytest.warns(ls.SpectralWarning, match="while toggled"):
        fit_three(module, data, algorithm=algorithm, faults=faults)
    assert len(calls) == 2 + 5 * 6  # the others take both steps in each of three batches
    assert all(parameter.requires_grad for parameter in module.parameters())


# The Trainer of the run


def seen_on_clients(
    look: Callable[[Any], Any], data: Any, fit: Fit, base: type[Lit] = Lit, **options: Any
) -> tuple[list[Any], Fitted]:
    """What a function of the module finds in each first step, and the fit."""

    class Watched(base):  # type: ignore[misc, valid-type]
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if batch_idx == 0:
                found.append(look(self))

    found: list[Any] = []
    return found, fit(seeded(Watched), data, **options)


TRAINED_BY = pytest.mark.parametrize("base", [Lit, Manual], ids=["automatic", "manual"])


@TRAINED_BY
@pytest.mark.parametrize("algorithm", [ls.FedAvg(), HALF], ids=["dense", "half"])
def test_the_trainer_in_a_step_is_that_of_the_run(algorithm, base, data, fit_three, tmp_path):
    def look(module: Any) -> Any:
        trainer = module.trainer
        return trainer, trainer.datamodule, trainer.logger, module.logger, dict(trainer.callback_metrics)

    logger = CSVLogger(tmp_path)
    found, fitted = seen_on_clients(
        look, data, fit_three, base, algorithm=algorithm, trainer={"logger": logger, "log_every_n_steps": 1}
    )
    assert len(found) == 6
    for trainer, datamodule, *loggers, _ in found:
        assert trainer is fitted.trainer
        assert datamodule is data
        assert loggers == [logger, logger]
    assert [bool(metrics) for *_, metrics in found] == [False] * 3 + [True] * 3
    assert repr(found[-1][-1]["fl/loss"].item()) == repr(fitted.history.column("fl/loss")[0])


@TRAINED_BY
@pytest.mark.parametrize("algorithm", [ls.FedAvg(), HALF], ids=["dense", "half"])
def test_a_step_that_asks_the_trainer_to_stop_ends_the_run_after_its_round(algorithm, base, data, fit_three):
    def stop(module: Any) -> None:
        if module.trainer.current_epoch == 1:
            module.trainer.should_stop = True

    found, fitted = seen_on_clients(stop, data, fit_three, base, algorithm=algorithm, max_epochs=5)
    assert len(found) == 6  # all clients of the round take their turns
    assert fitted.trainer.current_epoch == fitted.trainer.global_step == 2
    assert fitted.history.column("fl/clients") == [3.0, 3.0]


@TRAINED_BY
def test_counters_in_a_step_are_those_of_rounds(base: Any, data: Any, fit_three: Fit) -> None:
    found, _ = seen_on_clients(
        lambda module: (module.current_epoch, module.global_step), data, fit_three, base, algorithm=ls.FedAvg()
    )
    assert found == [(0, 0)] * 3 + [(1, 1)] * 3
