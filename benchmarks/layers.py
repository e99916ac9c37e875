"""How much faster a sub-model trains than its dense model, and how many multiplications it saves.

    python benchmarks/layers.py --model resnet18 cct gpt gpt2-block --turns 15

One local step (forward, backward, SGD with momentum) of each dense model and of its sub-models with keep ratios 0.1 to
1, in one process with one thread. The contenders take turns, and on a CPU the clock is process time, so that a busy
machine matters less. A speed-up is the median over turns of (dense step / this step), with its quartiles. "MAC ratio"
is the same ratio of multiplications in affine layers, forward and backward, counted while they run; attention products
are left out. "share" is speed-up over MAC ratio. "hooks" is the share of a step spent on effective-learning-rate
clipping and Frobenius decay; speed-ups do not include it. Dropout is off: it costs the same at each keep ratio. In
channels_last memory ("last"), speed-ups are over the dense model in channels_last as well, and "over first" is over
the dense model in torch's default.
"""

import argparse
import copy
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median, quantiles

import torch
import torch.nn.functional as F
from page import show, write
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import lightning_spectral as ls
from lightning_spectral.models import CCT, CharTransformer, ResNet18
from lightning_spectral.models.language import GPT2Block
from lightning_spectral.nn import sharded_layers

KEEP_RATIOS = (0.1, 0.2, 0.4, 0.8, 1.0)
HEADER = ["model", "memory", "r", "MAC ratio", "speed-up", "quartiles", "share", "over first", "hooks"]
AFFINE = ("convolution", "convolution_backward", "mm", "addmm", "bmm", "baddbmm")


class Block(nn.Module):
    """One block of GPT-2 small with a loss to minimise."""

    def __init__(self) -> None:
        super().__init__()
        self.block = GPT2Block(width=768, num_heads=12, dropout=0.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x).mean(2).square()


def images() -> tuple[Tensor, Tensor]:
    return torch.randn(32, 3, 32, 32), torch.randint(10, (32,))


def text() -> tuple[Tensor, Tensor]:
    return torch.randint(90, (32, 80)), torch.randint(90, (32, 80))


def vectors() -> tuple[Tensor, Tensor]:
    return torch.randn(8, 128, 768), torch.randint(128, (8,))


# Model, one batch, and whether the first and last layers stay dense.
MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[Tensor, Tensor]], bool]] = {
    "resnet18": (ResNet18, images, True),
    "cct": (lambda: CCT(attention_dropout=0.0, stochastic_depth=0.0), images, True),
    "gpt": (lambda: CharTransformer(dropout=0.0), text, True),
    "gpt2-block": (Block, vectors, False),
}


@dataclass
class Contender:
    """A model that takes local steps, and the seconds they took."""

    name: tuple[str, str, str]
    module: nn.Module
    batch: tuple[Tensor, Tensor]
    seconds: list[float] = field(default_factory=list)
    hook_seconds: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=1e-3, momentum=0.9)
        if layers := sharded_layers(self.module):
            self.optimizer.register_step_pre_hook(lambda *_: self.hook_seconds.append(-self._now()))
            ls.nn.FrobeniusDecay(dict.fromkeys(layers, 1e-4)).register(self.optimizer, self.module)
            ls.EffectiveLRClip(10.0).register(self.optimizer, self.module)
            self.optimizer.register_step_pre_hook(lambda *_: self._stop())
        with FlopCounterMode(display=False) as counter:
            self._gradients()
        flops = counter.get_flop_counts()["Global"]
        self.macs = sum(count for op, count in flops.items() if str(op).split(".")[-1] in AFFINE)

    def step(self) -> None:
        start = self._now()
        self._gradients()
        self.optimizer.step()
        self.seconds.append(self._now() - start)
        if self.hook_seconds:
            self.seconds[-1] -= self.hook_seconds[-1]

    def _gradients(self) -> None:
        x, y = self.batch
        self.optimizer.zero_grad()
        out = self.module(x)
        F.cross_entropy(out if out.dim() == 2 else out.flatten(0, 1), y.flatten()).backward()

    def _now(self) -> float:
        if self.batch[0].is_cuda:
            torch.cuda.synchronize()
            return time.perf_counter()
        return time.process_time()

    def _stop(self) -> None:
        self.hook_seconds[-1] += self._now()


def contenders(name: str, channels_last: bool, device: str, granularity: int) -> list[Contender]:
    make, make_batch, keep_ends = MODELS[name]
    torch.manual_seed(0)
    dense = make().to(device)
    x, y = (tensor.to(device) for tensor in make_batch())
    memory = "first"
    if channels_last:
        memory, x = "last", x.to(memory_format=torch.channels_last)
        dense = dense.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    found = [Contender((name, memory, "full"), copy.deepcopy(dense), (x, y))]
    for r in KEEP_RATIOS:
        choices = ls.LayerChoices(keep_first_and_last_dense=keep_ends, term_granularity=granularity)
        sub = ls.replace_layers(dense, r, layers=choices)
        found.append(Contender((name, memory, f"{r}"), sub, (x, y)))
    return found


def measured(name: str, turns: int, device: str, granularity: int) -> list[list[str]]:
    memories = (False, True) if MODELS[name][1] is images else (False,)
    groups = [contenders(name, last, device, granularity) for last in memories]
    for _ in range(turns + 1):
        for contender in (one for group in groups for one in group):
            contender.step()
    return [_row(one, group[0], groups[0][0]) for group in groups for one in group]


def _row(one: Contender, dense: Contender, first: Contender) -> list[str]:
    speed_ups = [theirs / ours for theirs, ours in zip(dense.seconds[1:], one.seconds[1:], strict=True)]
    over_first = [theirs / ours for theirs, ours in zip(first.seconds[1:], one.seconds[1:], strict=True)]
    shares = [h / (h + s) for h, s in zip(one.hook_seconds[1:], one.seconds[1:], strict=False)]
    low, middle, high = quantiles(speed_ups, n=4)
    ratio = dense.macs / one.macs
    numbers = [f"{ratio:.2f}", f"{middle:.2f}", f"{low:.2f}-{high:.2f}", f"{middle / ratio:.2f}"]
    return [*one.name, *numbers, f"{median(over_first):.2f}", f"{median(shares):.1%}" if shares else ""]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--turns", type=int, default=15, help="steps of each contender, after a warm-up step")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--granularity", type=int, default=1, help="round numbers of terms up to a multiple of this")
    parser.add_argument("--write", action="store_true", help="write the table to docs/tables")
    options = parser.parse_args()
    torch.set_num_threads(1)
    allocator = "tuned" if ls.plugin.tune_allocator() else "the default"
    rows = [HEADER]
    for name in options.model:
        rows += measured(name, options.turns, options.device, options.granularity)
    settings = {"torch": torch.__version__, "device": options.device, "threads": "1", "allocator": allocator}
    show(rows)
    if options.write:
        write("layers", settings, rows)


if __name__ == "__main__":
    main()
