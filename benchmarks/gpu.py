"""What a GPU changes: the tests on it, the overhead of a round, factorisations, and processes that share it.

    python benchmarks/gpu.py                     # in about a quarter of an hour
    python benchmarks/gpu.py --cifar10 FOLDER    # also 200 rounds of CIFAR-10, from its binary version
    python benchmarks/gpu.py --cifar10 FOLDER --rounds 50 --processes 4 --parts cifar10
    python benchmarks/gpu.py --device cpu --toy  # as the tests run it

Needs nothing but the package's dependencies, and pytest for its tests. Each case has a process of its own with a time
limit; one that fails is a line of its table, and the others go on. The parts:

- ``tests``: ``pytest tests/devices`` and ``python -m lightning_spectral doctor`` on the device.
- ``rounds``: milliseconds of a round of FedAvg, and of spectral sharding at keep ratio 0.2, beside a bare loop: ten
  clients with five batches of 20 each.
- ``factorise``: milliseconds to factorise matrices, all terms or the largest tenth, on the device and on the CPU.
- ``shared``: a round of the tiny network and of the CNN, by the number of processes on the device.
- ``stacked``: the same round with all clients at once, their weights stacked by ``torch.func``.
- ``captured``: the same round with captured passes, on the CPU as always; differences of final weights.
- ``cifar10``: the row "Collective, keep ratio 0.2" of Table 1 for CIFAR-10, as long as it is said.
"""

import argparse
import copy
import itertools
import json
import logging
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import lightning.pytorch as pl
import numpy as np
import torch
from contenders.workload import cnn, mlp
from page import show
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.utils.data import TensorDataset

import lightning_spectral as ls
from lightning_spectral.functional.spectra import factorize, leading_factors
from lightning_spectral.models import CharTransformer, LitClassifier, ResNet18
from lightning_spectral.protocol.records import Download, Upload
from lightning_spectral.server.executor import Executor

ROOT = Path(__file__).parents[1]
CLIENTS, BATCHES, BATCH, VOCABULARY, LENGTH = 10, 5, 20, 90, 80
SHAPES = ((256, 256), (512, 4608), (768, 768), (768, 3072), (2048, 2048))
HEADERS = {
    "tests": ("what", "outcome", "s"),
    "rounds": ("model", "bare loop, ms", "ours, ms", "over bare", "sharded, ms", "over bare"),
    "factorise": ("matrix", "CPU, all", "CPU, a tenth", "device, all", "device, svd", "device, a tenth"),
    "shared": ("model, processes", "ms", "faster than one"),
    "stacked": ("model", "one by one, ms", "stacked, ms", "over one by one", "largest difference"),
    "captured": ("model", "bare loop, ms", "eager, ms", "captured, ms", "over bare", "difference", "of eager runs"),
    "cifar10": ("rounds", "s/round", "accuracy"),
}
# Of a case, at most. A process took up to 20 s on a new machine before it had its first kernels.
SECONDS = dict.fromkeys(HEADERS, 120) | {"tests": 300, "rounds": 300, "factorise": 60, "cifar10": 3600}
Rows = Sequence[Sequence[str]]


def gpt2() -> nn.Module:
    return CharTransformer(VOCABULARY, LENGTH, width=768, num_heads=12, num_layers=12, dropout=0.0)


def toy_gpt() -> nn.Module:
    return CharTransformer(VOCABULARY, LENGTH, width=16, num_layers=1, dropout=0.0)


MODELS: dict[str, Callable[[], nn.Module]] = {"tiny": mlp, "CNN": cnn, "ResNet-18": ResNet18, "GPT-2": gpt2}
TOYS: dict[str, Callable[[], nn.Module]] = {"tiny": mlp, "GPT": toy_gpt}


class LitNet(pl.LightningModule):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net
        self.example_input_array = examples(net)[0][:2]

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.net(x)
        return found

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return loss_of(self.net, *batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)


def loss_of(net: Callable[[Tensor], Tensor], x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.cross_entropy(net(x).flatten(0, -2), y.flatten())


def examples(net: nn.Module) -> tuple[Tensor, Tensor]:
    count = CLIENTS * BATCHES * BATCH
    if isinstance(net, CharTransformer):
        return torch.randint(VOCABULARY, (count, LENGTH)), torch.randint(VOCABULARY, (count, LENGTH))
    return torch.randn(count, 3, 32, 32), torch.randint(10, (count,))


def now(device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


class Stacked(Executor):
    """Trains all clients of a round at once: a prototype, for SGD with momentum and networks without buffers.

    Few large kernels take the place of many small ones, for clients with the same batches and one local epoch.
    """

    def __init__(self, federation: Any) -> None:
        self.federation = federation

    def run(self, downloads: Iterable[Download]) -> Iterator[Upload]:
        asked, net, device = list(downloads), self.federation.module.net, self.federation.device
        weights = {name: torch.stack([download.tensors[f"net.{name}"] for download in asked]) for name in own(net)}
        momenta = [torch.zeros_like(tensor) for tensor in weights.values()]
        batches = [[batch for batch, _ in self.federation.data.client_data(one).epoch(0)] for one in asked]
        options = asked[0].options[0][0]

        def loss(of_client: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
            return loss_of(lambda x: functional_call(net, of_client, (x,)), x, y)

        for of_step in zip(*batches, strict=True):
            x, y = (torch.stack(parts).to(device) for parts in zip(*of_step, strict=True))
            gradients = list(vmap(grad(loss))(weights, x, y).values())
            torch._foreach_mul_(momenta, options["momentum"])
            torch._foreach_add_(momenta, gradients)
            torch._foreach_add_(list(weights.values()), momenta, alpha=-options["lr"])
        for client, download in enumerate(asked):
            returned = {f"net.{name}": tensor[client] for name, tensor in weights.items()}
            yield Upload(download.unit, returned, num_steps=len(batches[client]))


def own(net: nn.Module) -> list[str]:
    return [name for name, _ in net.named_parameters()]


class StackedFederation(ls.FederatedModule):
    def make_executor(self, engine: Any) -> Executor:
        return Stacked(self)


class Clock(pl.Callback):
    def __init__(self, device: str) -> None:
        self.device, self.starts = device, list[float]()

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.starts.append(now(self.device))

    def milliseconds(self, skipped: int = 2) -> float:
        """The median round, without the first ones, in which buffers are made and kernels chosen."""
        return 1e3 * statistics.median(
            b - a for a, b in zip(self.starts[skipped:], self.starts[skipped + 1 :], strict=False)
        )


def train(
    net: nn.Module,
    data: ls.FederatedDataModule,
    device: str,
    rounds: int,
    kind: Callable[..., ls.FederatedModule] = ls.FederatedModule,
    algorithm: ls.Algorithm | None = None,
    **options: Any,
) -> Clock:
    clock = Clock(device)
    quiet: dict[str, Any] = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary"), False)
    settings = {"accelerator": device, "devices": 1, "enable_checkpointing": False, **quiet, **options}
    trainer = pl.Trainer(max_epochs=rounds + 3, callbacks=[clock], **settings)
    trainer.fit(kind(LitNet(net), algorithm=algorithm, clients_per_round=CLIENTS), data)
    if not trainer.is_global_zero:
        raise SystemExit
    return clock


def bare(net: nn.Module, x: Tensor, y: Tensor, device: str) -> Iterator[float]:
    """Milliseconds of rounds of a loop that copies weights in, steps and averages."""
    server, client = net.to(device), copy.deepcopy(net).to(device)
    optimizer = torch.optim.SGD(client.parameters(), lr=0.01, momentum=0.9)
    while True:
        start = now(device)
        sums = [torch.zeros_like(parameter) for parameter in server.parameters()]
        for of_client in torch.randperm(len(x)).split(BATCHES * BATCH):
            client.load_state_dict(server.state_dict())
            optimizer.state.clear()
            for chosen in of_client.split(BATCH):
                optimizer.zero_grad()
                loss_of(client, x[chosen].to(device), y[chosen].to(device)).backward()
                optimizer.step()
            with torch.no_grad():
                torch._foreach_add_(sums, list(client.parameters()), alpha=1 / CLIENTS)
        with torch.no_grad():
            torch._foreach_copy_(list(server.parameters()), sums)
        yield 1e3 * (now(device) - start)


def federated(net: nn.Module) -> ls.FederatedDataModule:
    return ls.FederatedDataModule(TensorDataset(*examples(net)), ls.IIDPartitioner(CLIENTS), batch_size=BATCH)


def tests(what: str, device: str, toy: bool) -> Rows:
    doctor = ["-m", "lightning_spectral", "doctor", "--device", device]
    pytest = ["-m", "pytest", "-q", "-p", "no:benchmark", str(ROOT / "tests" / "devices"), "--device", device]
    start = time.perf_counter()
    command = [sys.executable, *(doctor if what == "doctor" else pytest)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    print(done.stdout, done.stderr, sep="\n", file=sys.stderr)
    outcome = "passed" if done.returncode == 0 else f"exit status {done.returncode}"
    return [(what, outcome, f"{time.perf_counter() - start:.0f}")]


def rounds(model: str, device: str, toy: bool) -> Rows:
    net, count = (TOYS if toy else MODELS)[model](), 2 if toy else 8
    ours, sharded = (
        train(copy.deepcopy(net), federated(net), device, count, algorithm=algorithm).milliseconds()
        for algorithm in (ls.FedAvg(), ls.SpectralSharding(keep_ratio=0.2))
    )
    loop = bare(net, *examples(net), device)
    theirs = statistics.median([next(loop) for _ in range(count + 2)][2:])
    cells = (f"{each:.1f} {each / theirs:.2f}".split() for each in (ours, sharded))
    return [(model, f"{theirs:.1f}", *itertools.chain(*cells))]


def factorise(shape: str, device: str, toy: bool) -> Rows:
    rows, columns = (int(size) for size in shape.split("x"))
    here = torch.linalg.svd(torch.randn(rows, columns), full_matrices=False)  # spectra fall, as those of trained layers
    weight = (here.U / torch.arange(1, len(here.S) + 1)) @ here.Vh
    there, num_terms = weight.to(device), max(1, min(rows, columns) // 10)
    contenders: list[Callable[[], object]] = [
        lambda: factorize(weight),
        lambda: leading_factors(weight, num_terms),
        lambda: factorize(there),
        lambda: torch.linalg.svd(there.double(), full_matrices=False),
        lambda: leading_factors(there, num_terms),
    ]
    cells = []
    for contender in contenders:
        times = []
        for _ in range(4):
            start = now(device)
            contender()
            times.append(1e3 * (now(device) - start))
        cells.append(f"{min(times[1:]):.1f}")
    return [(shape, *cells)]


def shared(case: str, device: str, toy: bool) -> Rows:
    model, processes = case.split(", ")
    net = MODELS[model]()
    clock = train(net, federated(net), device, 2 if toy else 20, **on(int(processes)))
    return [(case, f"{clock.milliseconds():.1f}", "")]


def stacked(model: str, device: str, toy: bool) -> Rows:
    one_by_one, at_once = (net := MODELS[model]()), copy.deepcopy(net)
    data, count = federated(net), 2 if toy else 20
    alone = train(one_by_one, data, device, count).milliseconds()
    together = train(at_once, data, device, count, StackedFederation).milliseconds()
    pairs = zip(one_by_one.parameters(), at_once.parameters(), strict=True)
    farthest = max(float((a - b).abs().max()) for a, b in pairs)
    return [(model, f"{alone:.1f}", f"{together:.1f}", f"{together / alone:.2f}", f"{farthest:.0e}")]


ALGORITHMS: dict[str, Callable[[], ls.Algorithm]] = {
    "FedAvg": ls.FedAvg,
    "sharded": lambda: ls.SpectralSharding(keep_ratio=0.2),
    "width": lambda: ls.WidthSharding(keep_ratio=0.25),
    "LoRA": lambda: ls.LoRA(rank=4),
}


def captured(case: str, device: str, toy: bool) -> Rows:
    model, algorithm = case.split(", ")
    net, count = (TOYS if toy else MODELS)[model](), 2 if toy else 8
    data, loop = federated(net), bare(copy.deepcopy(net), *examples(net), device)

    def trained(capture: bool = False) -> tuple[float, list[Tensor]]:
        own = copy.deepcopy(net)
        kind = partial(ls.FederatedModule, capture=capture)
        clock = train(own, data, device, count, kind, ALGORITHMS[algorithm]())
        return clock.milliseconds(3), [tensor.detach().double() for tensor in own.state_dict().values()]

    def farthest(some: list[Tensor], others: list[Tensor]) -> str:
        return f"{max(float((a - b).abs().max()) for a, b in zip(some, others, strict=True)):.0e}"

    with patch(f"{ls.__name__}.client.device.WATCHED_ROUNDS", 1):  # in place of ten
        (eager, weights), (_, again), (at_once, replayed) = trained(), trained(), trained(capture=device == "cuda")
    theirs = statistics.median([next(loop) for _ in range(count + 2)][2:])
    figures = f"{theirs:.1f} {eager:.1f} {at_once:.1f} {at_once / theirs:.2f}".split()
    return [(case, *figures, farthest(weights, replayed), farthest(weights, again))]


class Progress(pl.Callback):
    """Says after every validation where a long case stands, and keeps what it says."""

    def __init__(self, device: str) -> None:
        self.device, self.start, self.rows = device, now(device), list[tuple[str, str, str]]()

    def on_validation_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        done = trainer.current_epoch + 1
        if trainer.sanity_checking or not trainer.is_global_zero:
            return
        accuracy = float(trainer.callback_metrics["val_accuracy"])
        self.rows.append((str(done), f"{(now(self.device) - self.start) / done:.2f}", f"{accuracy:.1%}"))
        print(*self.rows[-1], file=sys.stderr, flush=True)


def cifar10(folder: str, device: str, toy: bool, rounds: int = 200, processes: int = 1) -> Rows:
    """As the examples' ``table1``: 100 clients, Dirichlet 1, ten a round, two local epochs, batch size 32."""

    def read(*names: str) -> TensorDataset:
        rows = np.concatenate([np.fromfile(Path(folder) / f"{name}.bin", np.uint8) for name in names])
        found = torch.from_numpy(rows).view(-1, 1 + 3 * 32 * 32)
        images = ls.functional.standardize_images(found[:, 1:].view(-1, 3, 32, 32))
        return TensorDataset(images, found[:, 0].long())

    train_set, test_set = read(*(f"data_batch_{part}" for part in range(1, 6))), read("test_batch")
    count = 2 if toy else rounds
    clients = ls.DirichletPartitioner(num_clients=10 if toy else 100, alpha=1.0)
    data = ls.FederatedDataModule(train_set, clients, val=test_set, batch_size=32)
    model = ls.FederatedModule(
        LitClassifier(mlp() if toy else ResNet18(), 10, lr=0.1),
        algorithm=ls.SpectralSharding.published(ls.Collective(), keep_ratio=0.2, clip_tau=10.0),
        clients_per_round=10,
        local_epochs=2,
    )
    quiet: dict[str, Any] = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary"), False)
    settings = {"accelerator": device, "devices": 1, "enable_checkpointing": False, **on(processes)}
    progress = Progress(device)
    every = max(1, count // 20)
    trainer = pl.Trainer(max_epochs=count, callbacks=[progress], check_val_every_n_epoch=every, **settings, **quiet)
    trainer.fit(model, data)
    if not trainer.is_global_zero:
        raise SystemExit
    return progress.rows


def on(processes: int) -> dict[str, Any]:
    """Options of a Trainer for a number of processes on the device."""
    parallel = ls.plugin.ClientParallelStrategy(processes_per_device=processes)
    return {"strategy": parallel} if processes > 1 else {}


def cases(options: argparse.Namespace) -> dict[str, list[str]]:
    shapes = ((12, 20),) if options.toy else SHAPES
    models, counts = (["tiny"], (1, 2)) if options.toy else (["tiny", "CNN"], (1, 2, 4))
    return {
        "tests": ["doctor", *(["pytest tests/devices"] if options.device == "cuda" else [])],
        "rounds": list(TOYS if options.toy else MODELS),
        "factorise": [f"{rows}x{columns}" for rows, columns in shapes],
        "shared": [f"{model}, {count}" for model in models for count in counts],
        "stacked": models,
        "captured": [f"{model}, {algorithm}" for model in models for algorithm in ALGORITHMS],
        "cifar10": [options.cifar10] if options.cifar10 else [],
    }


def in_a_process(part: str, case: str, options: argparse.Namespace) -> Rows:
    numbers = ["--rounds", str(options.rounds), "--processes", str(options.processes)]
    arguments = ["--device", options.device, *numbers, *(["--toy"] if options.toy else []), "--case", part, case]
    command = [sys.executable, __file__, *arguments]
    told = None if part == "cifar10" else subprocess.DEVNULL  # its progress is shown while it trains
    try:
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=told, text=True, timeout=SECONDS[part], check=True
        )
        found: Rows = json.loads(done.stdout.splitlines()[-1])
        return found
    except subprocess.TimeoutExpired:
        return [(case, f"longer than {SECONDS[part]} s")]
    except subprocess.CalledProcessError as error:
        return [(case, f"failed: exit status {error.returncode}")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--parts", nargs="+", choices=HEADERS, default=list(HEADERS))
    parser.add_argument("--cifar10", default="", metavar="FOLDER", help="with data_batch_1.bin ... and test_batch.bin")
    parser.add_argument("--rounds", type=int, default=200, help="of CIFAR-10 (200)")
    parser.add_argument("--processes", type=int, default=1, help="that share the device for CIFAR-10 (1)")
    parser.add_argument("--toy", action="store_true", help="small sizes and few rounds")
    parser.add_argument("--case", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        warnings.filterwarnings("ignore")
        logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
        torch.manual_seed(0)
        part, case = options.case
        measure = {each.__name__: each for each in (tests, rounds, factorise, shared, stacked, captured)}
        measure["cifar10"] = partial(cifar10, rounds=options.rounds, processes=options.processes)
        try:
            rows = measure[part](case, options.device, options.toy)
        except Exception as error:
            rows = [(case, f"failed: {type(error).__name__}: {error}")]
        print(json.dumps(rows))
        return
    name = torch.cuda.get_device_name() if options.device == "cuda" else options.device
    print(f"torch {torch.__version__}, {name}")
    for part in options.parts:
        rows = [row for case in cases(options)[part] for row in in_a_process(part, case, options)]
        if not rows:
            continue
        if part == "shared":
            rows = [beside_one(row, rows) for row in rows]
        width = len(HEADERS[part])
        print(f"\n{part}\n", flush=True)
        show([HEADERS[part], *((*row, *[""] * (width - len(row))) for row in rows)])


def beside_one(row: Sequence[str], rows: Rows) -> Sequence[str]:
    """The row with how much faster it is than that of one process, if both are numbers."""
    model = row[0].split(", ")[0]
    try:
        alone = next(float(other[1]) for other in rows if other[0] == f"{model}, 1")
        return (*row[:2], f"{alone / float(row[1]):.2f}")
    except ValueError:
        return row


if __name__ == "__main__":
    main()
