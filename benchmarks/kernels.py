"""How many kernels a local step and a round start, which is what small rounds on a GPU wait for.

``python benchmarks/kernels.py`` takes seconds on the CPU: it counts operations on the device that the tests pretend,
without views, allocations and copies, with optimizers as on a GPU (``foreach=True``). A step is counted by piece, a
client's first one apart, in which SGD copies every gradient to begin its momentum; what is left of a round of ten
clients, once their steps are subtracted, is outside of steps.
"""

from __future__ import annotations

import logging
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import TensorDataset

import lightning_spectral as ls

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
import pretend_device

NUM_CLIENTS, NUM_STEPS = 10, 3
FIRST, LATER, OUTSIDE = "first step", "later step", "outside"
FREE = {  # they start nothing on a GPU, or only reserve memory
    *("view", "_unsafe_view", "t", "transpose", "expand", "detach", "alias", "slice", "select", "split", "unsqueeze"),
    *(
        "squeeze",
        "permute",
        "as_strided",
        "empty",
        "empty_like",
        "new_empty",
        "empty_strided",
        "set_",
        "unbind",
        "_to_copy",
    ),
    *("split_with_sizes", "diagonal", "lift_fresh", "_local_scalar_dense", "is_same_size", "narrow", "_to_copy"),
}


class Kernels(TorchDispatchMode):
    """Counts operations by piece."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()
        self.piece = OUTSIDE

    def begin(self, piece: str) -> None:
        if self.piece != FIRST or piece in (LATER, OUTSIDE):  # pieces of a first step are not told apart
            self.piece = piece

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_there = pretend_device.PretendTensor in types  # not a draw of terms, which is on the CPU
        if is_there and func.overloadpacket.__name__ not in FREE:
            self.found[self.piece] += 1
        return func(*args, **(kwargs or {}))


class Lit(pl.LightningModule):
    """A network whose hooks say which piece of a step begins."""

    def __init__(self, net: nn.Module, kernels: Kernels) -> None:
        super().__init__()
        self.net = net
        self.begin: Callable[[str], None] = lambda piece: kernels.begin(piece)  # which a client must not put back

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.begin("forward")
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def on_before_backward(self, loss: Tensor) -> None:
        self.begin("backward")

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.begin("clip and decay")

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.begin(FIRST if batch_idx == 0 else LATER)

    def on_train_epoch_end(self) -> None:
        self.begin(OUTSIDE)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9, foreach=True)
        optimizer.register_step_pre_hook(lambda *_: None)
        return optimizer


def mlp() -> nn.Module:
    return nn.Sequential(*(layer for _ in range(3) for layer in (nn.Linear(64, 64), nn.ReLU())), nn.Linear(64, 10))


def cnn() -> nn.Module:
    layers: list[nn.Module] = []
    for c_in, c_out in ((1, 16), (16, 32), (32, 32), (32, 64)):
        layers += [nn.Conv2d(c_in, c_out, 3, padding=1), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


NETS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {"MLP": (mlp, (64,)), "CNN": (cnn, (1, 14, 14))}
ALGORITHMS: dict[str, ls.Algorithm] = {"FedAvg": ls.FedAvg(), "sharding at 0.2": ls.SpectralSharding(keep_ratio=0.2)}


def counted(net: str, algorithm: ls.Algorithm, num_clients: int = NUM_CLIENTS) -> tuple[float, dict[str, float], int]:
    """Kernels of a client's first step, of a later one by piece, and of a round outside of steps, in a second round."""
    make, shape = NETS[net]
    kernels = Kernels()
    torch.manual_seed(0)
    size = 8 * NUM_STEPS * num_clients
    examples = TensorDataset(torch.randn(size, *shape), torch.arange(size) % 10)
    data = ls.FederatedDataModule(examples, ls.IIDPartitioner(num_clients), batch_size=8)
    model = ls.FederatedModule(Lit(make(), kernels), algorithm=algorithm, clients_per_round=num_clients)

    class SecondRound(ls.RoundCallback):
        def on_round_start(self, trainer: Any, pl_module: Any, opened: Any) -> None:
            kernels.found.clear()

    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    with kernels:
        pl.Trainer(max_epochs=2, callbacks=[SecondRound()], **quiet, **pretend_device.trainer_options()).fit(
            model, data
        )
    first, outside = kernels.found.pop(FIRST) / num_clients, kernels.found.pop(OUTSIDE)
    later = num_clients * (NUM_STEPS - 1)
    return first, {piece: count / later for piece, count in kernels.found.items()}, outside


def main() -> None:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    pretend_device.install()
    print("| network | algorithm | first step | a later one | by piece | outside of steps, a round of ten clients |")
    print("| --- | --- | --- | --- | --- | --- |")
    for net in NETS:
        for name, algorithm in ALGORITHMS.items():
            first, later, outside = counted(net, algorithm)
            pieces = ", ".join(f"{piece} {count:g}" for piece, count in later.items())
            print(f"| {net} | {name} | {first:g} | {sum(later.values()):g} | {pieces} | {outside} |", flush=True)


if __name__ == "__main__":
    main()
