"""Captured steps (`captured.py`) beside the steps themselves, with a stand-in for CUDA graphs, on the CPU.

    python benchmarks/captured_steps.py [CASE ...]

The stand-in records what torch dispatches, and does the same again in the same memory. Printed is, for algorithms and
hooks, how many steps were replayed, and whether all weights and metrics have equal bits; and for what cannot be
captured, why.
"""

from __future__ import annotations

import logging
import random
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import captured
import lightning.pytorch as pl
import torch
from captured import CapturedLoop
from page import show
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

import lightning_spectral as ls

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from toy_models import LitMLP, LitNet, cross_entropy, toy_examples, variant

DATA = ls.FederatedDataModule(toy_examples(180), ls.IIDPartitioner(6), batch_size=8)  # of 30 each: 8, 8, 8, 6


class Recorded(TorchDispatchMode):
    """The operations of a call, to be done again; like a graph, it knows memory, and no object that has it."""

    def __init__(self, call: Callable[[], object], generators: Sequence[torch.Generator]) -> None:
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
            vars(self)["loop"] = CapturedLoop(*known, capture=Recorded)
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


class Listing(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter].setdefault("kept", []).append(parameter.detach().clone())
        return super().step(closure)


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


REFUSED: dict[str, Callable[[], Any]] = {
    "item": doing(lambda module, batch: module.log("sum", batch[0].sum().item())),
    "mask": doing(lambda module, batch: batch[0][batch[0] > 0].sum()),
    "devices": doing(lambda *_: torch.ones(2, device="meta") * torch.tensor(0.5)),
    "batch_idx": using(training_step=of_index),
    "trainer": doing(lambda module, batch: module.log("now", float(module.global_step))),
    "draw": doing(lambda module, batch: random.random()),
    "attribute": doing(count, lambda module: setattr(module, "count", 0)),
    "no loss": using(training_step=losing),
    "hook": using(on_after_backward=lambda module: None),
    "layer hook": doing(lambda *_: None, lambda module: module.net[0].register_forward_hook(lambda *_: None)),
    "gradient hook": doing(lambda *_: None, lambda module: module.net[0].weight.register_hook(lambda grad: 2 * grad)),
    "metric": LitMLP,
    "Adam": lambda: LitNet(NET(), optimizer=torch.optim.Adam),
    "Counting": lambda: LitNet(NET(), optimizer=lambda p: Counting(p, lr=0.1)),
    "Listing": lambda: LitNet(NET(), optimizer=lambda p: Listing(p, lr=0.1)),
    "LBFGS": lambda: LitNet(NET(), optimizer=torch.optim.LBFGS),
}


CHOICES: dict[str, dict[str, Any]] = {
    "FedAvg": {},
    "hooks": {"local_hooks": [ls.GradientClip(0.5), ls.ProximalTerm(0.1), ls.FixedBatchNorm(3)]},
    "sharding": {"algorithm": ls.SpectralSharding(keep_ratio={0.3: 0.5, 0.6: 0.5})},
    "width": {"algorithm": ls.WidthSharding(keep_ratio={0.5: 0.5, 1.0: 0.5})},
    "LoRA": {"algorithm": ls.LoRA(rank=2), "buffers": {"*running*": "mean"}},
    "phases": {"algorithm": ls.Ditto()},
    "local steps": {"local_epochs": 1, "local_steps": 7},
}


OTHERS: dict[str, dict[str, Any]] = {
    "Zampling": {"algorithm": ls.Zampling(degree=2)},
    "logits": {"local_hooks": [ls.MaskedLogits("net.4")]},
}
ATTRIBUTE = variant(
    LitNet,
    lambda module: setattr(module, "scale", 1.0),
    training_step=scaled,
    on_train_epoch_start=lambda module: setattr(module, "scale", 3.0 - module.scale),  # 2, then 1
)


def compared(make: Callable[[], Any], rounds: int = 5, **options: Any) -> tuple[int, str, bool]:
    """The number of replayed steps, why there are none, and whether the bits are those of a fit without them."""
    options = {"clients_per_round": 4, "local_epochs": 2, **options}
    fits = []
    for kind in (ls.FederatedModule, Captures):
        torch.manual_seed(0)
        module, history = make(), ls.RoundHistory()
        quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
        model = kind(module, **options)
        pl.Trainer(max_epochs=rounds, accelerator="cpu", callbacks=[history], **quiet).fit(model, DATA)
        rows = [{name: v for name, v in row.items() if "seconds" not in name} for row in history.rows]
        fits.append((repr(rows), module.state_dict(), model))
    (rows, weights, _), (others, captured_weights, model) = fits
    equal = rows == others and all(torch.equal(weights[name], captured_weights[name]) for name in weights)
    return model.loop.num_replayed, model.loop.reason, equal


def main() -> None:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    cases = {name: (Lit, options) for name, options in CHOICES.items()}
    cases |= {"attribute read": (lambda: ATTRIBUTE(NET()), {})}
    cases |= {name: (lambda: LitNet(deep()), options) for name, options in OTHERS.items()}
    cases |= {name: (make, {"rounds": 4}) for name, make in REFUSED.items()}
    rows = [("case", "replayed", "bits", "why not")]
    with patch("lightning_spectral.client.device.WATCHED_ROUNDS", 1), patch.object(captured, "PATIENCE", 6):
        for name in sys.argv[1:] or cases:
            make, options = cases[name]
            replayed, reason, equal = compared(make, **options)
            rows.append((name, str(replayed), "equal" if equal else "DIFFERENT", reason))
    show(rows)


if __name__ == "__main__":
    main()
