"""Captured passes, with a stand-in for CUDA graphs: the bits of passes, or why none are captured."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from federation import Fit, said_during, same_state, seeded
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from toy_models import LitMLP, LitNet, cross_entropy, toy_examples, variant

import lightning_spectral as ls
from lightning_spectral.client import captured_loop
from lightning_spectral.client.captured_loop import CapturedLoop

DATA = ls.FederatedDataModule(toy_examples(180), ls.IIDPartitioner(6), batch_size=8)  # of 30 each: 8, 8, 8, 6


class Recorded(TorchDispatchMode):
    """The operations of a call, to be done again; like a graph, it knows memory, and no object that has it."""

    def __init__(self, call: Callable[[], object]) -> None:
        super().__init__()
        self.done: list[Any] = []
        with self:
            call()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = tree_map_only(Tensor, Tensor.detach, (args, kwargs or {}))
        result = func(*args, **(kwargs or {}))
        self.done.append((func, *before, tree_map_only(Tensor, Tensor.detach, result)))
        return result

    @torch.no_grad()
    def __call__(self) -> None:
        for func, args, kwargs, results in self.done:
            known = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
            for made, now in zip(tree_leaves(results), tree_leaves(func(*args, **kwargs)), strict=True):
                if isinstance(made, Tensor) and made.untyped_storage()._cdata not in known:
                    made.copy_(now)


class Captures(ls.FederatedModule):
    """A federation that captures steps with the stand-in."""

    loop: Any

    def make_executor(self, engine: Any) -> Any:
        def made(*known: Any) -> Any:
            vars(self)["loop"] = CapturedLoop(*known)
            return self.loop

        return self.make_local_executor(engine, made)


class Lit(LitNet):
    """Draws dropout, keeps running averages, logs, and lowers its rate after the third round."""

    def __init__(self) -> None:
        layers = nn.Linear(6, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Dropout(0.2), nn.Linear(12, 12), nn.Tanh()
        super().__init__(nn.Sequential(*layers, nn.Linear(12, 3)), momentum=0.9, example=torch.zeros(2, 6))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = cross_entropy(self, batch)
        self.log_dict({"mine": loss * 2, "each": torch.stack([loss, loss]), "number": 0.5}, prog_bar=True)
        self.log("first", self.net[0].weight[0, 0])  # its value before the step
        return {"loss": loss, "double": 2 * loss}

    def configure_optimizers(self) -> Any:
        sgd = super().configure_optimizers()
        return [sgd], [torch.optim.lr_scheduler.StepLR(sgd, step_size=3)]


def scaled(module: Any, batch: Any, batch_idx: int) -> Tensor:
    return module.scale * cross_entropy(module, batch)


def count(module: Any, *_: Any) -> None:
    module.count += 1


def noted(optimizer: Any, *_: Any) -> None:
    """Counts in Python, in what it keeps of a parameter."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            optimizer.state[parameter]["steps"] = optimizer.state[parameter].get("steps", 0) + 1


class Counting(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        noted(self)
        return super().step(closure)


class Keeping(torch.optim.SGD):
    """Steps on the sum of a gradient and the one before, which it keeps as it is."""

    def step(self, closure: Any = None) -> Any:
        for parameter in self.param_groups[0]["params"]:
            last, self.state[parameter]["last"] = self.state[parameter].get("last"), parameter.grad
            parameter.data.sub_(0.05 * (parameter.grad if last is None else parameter.grad + last))


class Holder:
    def __init__(self, batch: Any) -> None:
        self.batch = batch

    def __repr__(self) -> str:
        return "Holder()"  # as some say of every batch


def held(module: Any, batch: Any, dataloader_idx: int) -> Holder:
    return Holder(batch)


def of_holder(module: Any, batch: Holder, batch_idx: int) -> Tensor:
    return cross_entropy(module, batch.batch)


def losing(module: Any, batch: Any, batch_idx: int) -> Any:
    return None if len(batch[0]) == 8 and module.training else cross_entropy(module, batch)


NET = lambda: nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 3))  # noqa: E731


def deep() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 3))


def doing(act: Callable[[Any, Any], object], prepare: Any = None) -> Callable[[], Any]:
    return lambda: variant(LitNet, prepare, before_step=act)(NET())


def using(**members: Any) -> Callable[[], Any]:
    return lambda: variant(LitNet, **members)(NET())


def of_index(module: Any, batch: Any, batch_idx: int) -> Tensor:
    loss = cross_entropy(module, batch)
    return 2 * loss if batch_idx % 3 == 1 else loss


ATTRIBUTE = variant(
    LitNet,
    lambda module: setattr(module, "scale", 1.0),
    training_step=scaled,
    on_train_epoch_start=lambda module: setattr(module, "scale", 3.0 - module.scale),  # 2, then 1
)
CAPTURED: dict[str, tuple[Callable[[], Any], dict[str, Any], int]] = {  # and how many steps are replayed
    "FedAvg": (Lit, {}, 60),
    "hooks": (Lit, {"local_hooks": [ls.GradientClip(0.5), ls.ProximalTerm(0.1), ls.FixedBatchNorm(3)]}, 24),
    "sharding": (Lit, {"algorithm": ls.SpectralSharding(keep_ratio={0.3: 0.5, 0.6: 0.5})}, 24),
    "width": (Lit, {"algorithm": ls.WidthSharding(keep_ratio={0.5: 0.5, 1.0: 0.5})}, 24),
    "LoRA": (Lit, {"algorithm": ls.LoRA(rank=2), "buffers": {"*running*": "mean"}}, 60),
    "phases": (Lit, {"algorithm": ls.Ditto()}, 156),
    "local steps": (Lit, {"local_epochs": 1, "local_steps": 7}, 50),
    "Adam": (lambda: LitNet(NET(), optimizer=torch.optim.Adam), {}, 60),
    "Keeping": (lambda: LitNet(NET(), optimizer=lambda p: Keeping(p, lr=0.1)), {}, 60),
    "Counting": (lambda: LitNet(NET(), optimizer=lambda p: Counting(p, lr=0.1)), {}, 60),
}
AS_ALWAYS = "must run in Python each time"
REFUSED: dict[str, tuple[Callable[[], Any], str, dict[str, Any]]] = {  # what the warning says
    "item": (doing(lambda module, batch: module.log("sum", batch[0].sum().item())), "it reads values of tensors", {}),
    "mask": (doing(lambda module, batch: batch[0][batch[0] > 0].sum()), r"it reads values of .* \(index\)", {}),
    "devices": (doing(lambda *_: torch.ones(2, device="meta") * torch.tensor(0.5)), "it uses tensors on cpu and", {}),
    "batch_idx": (using(training_step=of_index), "replayed, it has other values", {}),
    "trainer": (
        doing(lambda module, _: module.log("now", float(module.global_step))),
        "replayed, it has other",
        {},
    ),
    "an attribute that changes between epochs": (lambda: ATTRIBUTE(NET()), "replayed, it has other values", {}),
    "draw": (doing(lambda module, batch: random.random()), "it draws numbers on the CPU", {}),
    "attribute": (doing(count, lambda module: setattr(module, "count", 0)), "it changes count", {}),
    "list": (
        doing(
            lambda module, batch: module.seen.append(module.net(batch[0])), lambda module: setattr(module, "seen", [])
        ),
        "it changes what the module holds",
        {},
    ),
    "generator": (
        doing(lambda *_: None, lambda module: setattr(module, "rng", np.random.default_rng(0))),
        "it holds a generator of its own",
        {},
    ),
    "name": (
        doing(lambda module, _: module.log(f"{module.global_step % 2}", 1.0)),
        "replayed, it has other values",
        {},
    ),
    "batch": (doing(lambda _, batch: batch[0].clamp_(-1.0, 1.0)), "it writes to its batch", {}),
    "no loss": (using(training_step=losing), "`training_step` returns no loss", {}),
    "hook": (using(on_after_backward=lambda module: None), f"on_after_backward {AS_ALWAYS}", {}),
    "layer hook": (
        doing(lambda *_: None, lambda module: module.net[0].register_forward_hook(lambda *_: None)),
        f"hooks on layers {AS_ALWAYS}",
        {},
    ),
    "gradient hook": (
        doing(lambda *_: None, lambda module: module.net[0].weight.register_hook(lambda grad: 2 * grad)),
        f"hooks on gradients {AS_ALWAYS}",
        {},
    ),
    "metric": (LitMLP, "metrics of torchmetrics count in Python", {}),
    "LBFGS": (lambda: LitNet(NET(), optimizer=torch.optim.LBFGS), "the user's code, or LBFGS, evaluates the loss", {}),
    "Zampling": (
        lambda: LitNet(deep()),
        "the algorithm acts in every",
        {"algorithm": ls.Zampling(degree=2)},
    ),
    "logits": (
        lambda: LitNet(deep()),
        f"hooks on layers {AS_ALWAYS}",
        {"local_hooks": [ls.MaskedLogits("net.4")]},
    ),
}


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_spectral.client.device.WATCHED_ROUNDS", 1)
    monkeypatch.setattr(captured_loop, "PATIENCE", 6)
    monkeypatch.setattr(CapturedLoop, "capture", staticmethod(Recorded))


def loop_of(fit: Fit, make: Callable[[], Any], rounds: int = 5, **options: Any) -> CapturedLoop:
    """The loop of a fit with captured steps, which has the bits and figures of one without."""
    options = {"clients_per_round": 4, "local_epochs": 2, **options}
    plain = fit(seeded(make), DATA, max_epochs=rounds, **options)
    with_graphs = fit(Captures(seeded(make), **options), DATA, max_epochs=rounds)
    assert repr(with_graphs.rows) == repr(plain.rows)
    assert same_state(with_graphs.tensors, plain.tensors)
    return with_graphs.model.loop  # type: ignore[attr-defined, no-any-return]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("case", CAPTURED)
def test_captured_steps_have_the_bits_of_steps(fit: Fit, case: str) -> None:
    make, options, replayed = CAPTURED[case]
    loop = loop_of(fit, make, **options)
    assert (loop.num_replayed, loop.reason) == (replayed, "")


@pytest.mark.sampled(4)
@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_captured_is_named_and_runs_as_always(fit: Fit, case: str) -> None:
    make, reason, options = REFUSED[case]
    loops: list[CapturedLoop] = []
    said = said_during(lambda: loops.append(loop_of(fit, make, **{"rounds": 4, **options})))
    (about_steps,) = (message for message in said if message.startswith("No local steps of"))
    assert re.search(f"are captured, and all run as always: {reason}", about_steps)
    assert loops[0].num_replayed == 0


def test_a_graph_that_has_not_been_used_for_longest_makes_room(fit: Fit, monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches of eight and the last ones, of six, take turns."""
    monkeypatch.setattr(captured_loop, "MOST", 1)
    loop = loop_of(fit, Lit)
    assert [one.replay is not None for one in loop._passes_of.values()].count(True) == 1
    assert not loop.reason


def test_without_a_cuda_device_nothing_is_captured(fit: Fit) -> None:
    with pytest.raises(ValueError, match="`capture=True` replays kernels of a CUDA device of this process, got cpu;"):
        fit(LitNet(NET()), DATA, capture=True)


def test_steps_that_hide_examples_are_not_captured() -> None:
    end = ls.ExamplePrivacy(clip=1.0, noise_multiplier=1.0, delta=1e-5).device(Any)  # type: ignore[arg-type]
    settings: Any = SimpleNamespace(placement=SimpleNamespace(scaler=None))
    with pytest.raises(ValueError, match="`capture=True`, as its passes are those of one example"):
        end.trainer(CapturedLoop, settings)


def test_the_loop_of_a_federation_that_captures(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    model = ls.FederatedModule(LitNet(NET()), capture=True)
    monkeypatch.setattr(model, "make_local_executor", lambda engine, loop: made.append(loop))
    model.make_executor(None)
    assert made == [CapturedLoop]
