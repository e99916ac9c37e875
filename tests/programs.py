"""Modules whose steps, hooks and optimizers do more than most, each in its own way."""

import threading
from itertools import repeat
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import StepLR
from toy_models import LitNet

HERE: dict[str, Any] = {}  # by this global name, programs reach their module, and what a test has opened


class Lit(LitNet):
    """Three layers, of which spectral sharding takes the second."""

    def __init__(self) -> None:
        layers = nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 3)
        super().__init__(nn.Sequential(*layers), momentum=0.9)
        HERE["lit"] = self


# A step, hooks and values that reach the module in other ways than as `self`


class StepByGlobal(Lit):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return nn.functional.cross_entropy(HERE["lit"](x), y)


class GradientHookByGlobal(Lit):
    def __init__(self) -> None:
        super().__init__()
        self.scale = 0.5
        self.net[0].weight.register_hook(lambda grad: grad * HERE["lit"].scale + HERE["lit"].net[0].weight.detach())


class ForwardHookByGlobal(Lit):
    def __init__(self) -> None:
        super().__init__()
        self.net[2].register_forward_hook(lambda layer, args, out: out * HERE["lit"].net[2].weight.norm())


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


class HoldsOpen(Lit):
    """Its steps need a lock, a generator, a file and a socket."""

    def __init__(self) -> None:
        super().__init__()
        self.lock, self.halves = threading.Lock(), (value for value in repeat(0.5))
        self.file, self.socket = HERE["opened"], HERE["socket"]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        assert self.socket.fileno() > 0
        HERE["opened"].write("a line\n")
        self.file.write("a line\n")
        with self.lock:
            return super().training_step(batch, batch_idx) * next(self.halves)


# Optimizers that cannot be rebuilt, or call their closure more than once


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


class Sharp(torch.optim.SGD):
    """Evaluates the loss at two points, as sharpness-aware minimisation does; enables no gradients for that."""

    @torch.no_grad()
    def step(self, closure: Any) -> Any:  # type: ignore[override]
        loss = closure()
        before = [p.clone() for p in parameters_of(self)]
        for p in parameters_of(self):
            p.add_(p.grad, alpha=0.05)
        closure()
        for p, old in zip(parameters_of(self), before, strict=True):
            p.copy_(old)
        super().step()
        return loss


class LooksTwice(Lit):
    def configure_optimizers(self) -> Any:
        return Sharp(self.parameters(), lr=0.5, momentum=0.9)


class SearchesLines(Lit):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.01, max_iter=3)


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


class WithClosures(Manual):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer: Any = self.optimizers()

        def closure() -> Tensor:
            loss = LitNet.training_step(self, batch, batch_idx)
            optimizer.zero_grad()
            self.manual_backward(loss)
            return loss

        with optimizer.toggle_model(sync_grad=True):
            optimizer.step(closure=closure)


class StepsTwice(Manual):
    """Two steps on a batch, with a graph that is kept."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer: Any = self.optimizers()
        for number in range(2):
            loss = LitNet.training_step(self, batch, batch_idx)
            optimizer.zero_grad()
            self.manual_backward(loss, retain_graph=True)
            if number == 0:
                self.manual_backward(loss)
            self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="value")
            optimizer.step()
        return {"loss": loss, "more": 1}


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


class StepsEveryOtherBatch(Lit):
    """As Lightning's documentation of `optimizer_step` shows."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        if batch_idx % 2 == 1:
            optimizer.step(closure=optimizer_closure)
        else:
            optimizer_closure()

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        if batch_idx % 2 == 0:
            optimizer.zero_grad()


class ClosesFirst(Lit):
    """Computes gradients, looks at them, and then steps without a closure."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        if float(optimizer_closure()) > 1.05:
            optimizer.step()


class SkipsBatches(Lit):
    """Returns no loss for some batches, and steps in a hook of its own."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None if batch_idx in (1, 2) else super().training_step(batch, batch_idx)

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        optimizer.step(closure=optimizer_closure)


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
    *(StepByGlobal, GradientHookByGlobal, ForwardHookByGlobal, PenaltyKept, FeaturesKept),
    *(CompiledInPlace, ScriptedPart, HoldsOpen),
    *(WithLookahead, WithStepHooks, WithOwnStep, LooksTwice, SearchesLines),
    *(Manual, ClipsInStepHook, Accumulating, WithClosures, StepsTwice, AdversarialPair),
    *(StepsEveryOtherBatch, ClosesFirst, SkipsBatches, WarmsUp, KeepsZeros, ScalesBackward, Clips, ReadsSchedule),
)
