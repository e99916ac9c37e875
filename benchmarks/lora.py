"""One round of LoRA on a transformer of 10 million parameters, compared with a bare loop, and the server's share of it.

    python benchmarks/lora.py --rounds 6

Four clients of ranks 4 and 8 take local steps of SGD with momentum: two per client, which is few for a round, and then
ten. Everything runs in one process with one thread. The clock is process time, so that a busy machine matters less.
After each of our rounds a bare PyTorch loop takes the same steps on the same examples with ready-made adapters and
averages the factors; a ratio compares such a pair of consecutive rounds. The server's share is the time of all our
stages except training. Then the factors of all layers are decomposed twice: from the stacked factors and from the full
product. Peak memory is measured in separate processes, which play two rounds with few clients and with many.
"""

import argparse
import copy
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from page import show, write
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import lightning_spectral as ls
from lightning_spectral.algorithms.lora.aggregation import balanced_factors
from lightning_spectral.models import CharTransformer, LitNextToken

RANKS, CLIENTS, STEPS, BATCH, LENGTH = (4, 8), 4, (2, 10), 4, 64
STAGES = ("aggregate", "apply", "load", "refresh", "sample", "train")
ROWS = ("round of ours, s", "bare loop, s", "ours less bare, s", "ours over bare")
ROWS += tuple(f"of a round: {stage}" for stage in STAGES)
ALGORITHM = ls.LoRA({rank: 1 / len(RANKS) for rank in RANKS})
QUIET = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}


class LitChars(LitNextToken):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


def module() -> LitChars:
    torch.manual_seed(0)
    net = CharTransformer(context_length=LENGTH, width=384, num_heads=6, num_layers=6, dropout=0.0)
    return LitChars(net, num_classes=90)


def examples(num_clients: int, steps: int) -> TensorDataset:
    tokens = torch.randint(90, (num_clients * steps * BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(0))
    return TensorDataset(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())


def federation(num_clients: int, steps: int) -> tuple[ls.FederatedModule, ls.FederatedDataModule]:
    model = ls.FederatedModule(module(), algorithm=ALGORITHM, clients_per_round=num_clients)
    return model, ls.FederatedDataModule(examples(num_clients, steps), ls.IIDPartitioner(num_clients), batch_size=BATCH)


class BareLoop:
    """The work that any federated LoRA has to do: load factors, train, and average the factors."""

    def __init__(self, model: ls.FederatedModule, steps: int) -> None:
        self.steps = steps
        server = copy.deepcopy(model.module)
        side = ALGORITHM.bind(server, ALGORITHM.new_state(server, 0)).client_side
        self.clients = [copy.deepcopy(server) for _ in RANKS]
        for client, rank in zip(self.clients, RANKS, strict=True):
            side.take_form(client, rank / max(RANKS))
        factors = [{n: p for n, p in client.named_parameters() if p.requires_grad} for client in self.clients]
        self.factors = factors
        self.server = {name: p.detach().clone() for name, p in factors[-1].items()}
        inputs, targets = examples(CLIENTS, steps).tensors
        self.batches = list(zip(inputs.split(BATCH), targets.split(BATCH), strict=True))

    def play(self) -> None:
        sums = {name: torch.zeros_like(value) for name, value in self.server.items()}
        for client_id in range(CLIENTS):
            client, own = self.clients[client_id % len(RANKS)], self.factors[client_id % len(RANKS)]
            optimizer = torch.optim.SGD(own.values(), lr=0.05, momentum=0.9)
            with torch.no_grad():
                for name, value in own.items():
                    value.copy_(self._part(self.server[name], value))
            for x, y in self.batches[client_id * self.steps : (client_id + 1) * self.steps]:
                optimizer.zero_grad()
                nn.functional.cross_entropy(client(x).flatten(0, 1), y.flatten()).backward()
                optimizer.step()
            for name, value in own.items():
                self._part(sums[name], value).add_(value.detach(), alpha=1 / CLIENTS)
        self.server = sums

    @staticmethod
    def _part(whole: Tensor, like: Tensor) -> Tensor:
        return whole[: like.shape[0], : like.shape[1]]


class Interleaved(pl.Callback):
    """Times each round, and the bare loop that follows it."""

    def __init__(self, bare: BareLoop) -> None:
        self.bare = bare
        self.ours: list[float] = []
        self.theirs: list[float] = []

    def on_train_epoch_start(self, trainer: Any, model: Any) -> None:
        if not self.ours:
            self.began = time.process_time()

    def on_train_epoch_end(self, trainer: Any, model: Any) -> None:
        self.ours.append(time.process_time() - self.began)
        self.theirs.append(seconds(self.bare.play))
        self.began = time.process_time()


def seconds(work: Callable[[], object]) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


def timed(rounds: int, steps: int) -> tuple[list[str], ls.FederatedModule]:
    """Return the cells for one number of local steps, in the order of `ROWS`, and the model."""
    model, data = federation(CLIENTS, steps)
    timer, history = Interleaved(BareLoop(model, steps)), ls.RoundHistory()
    pl.Trainer(max_epochs=rounds + 1, callbacks=[history, timer], accelerator="cpu", **QUIET).fit(model, data)
    ours, theirs = timer.ours[1:], timer.theirs[1:]  # the first round warms up
    ratios = sorted(one / other for one, other in zip(ours, theirs, strict=True))
    print("ratios:", *(f"{ratio:.3f}" for ratio in ratios), file=sys.stderr)
    beside = statistics.median(one - other for one, other in zip(ours, theirs, strict=True))
    seconds_of = {stage: sum(history.column(f"fl/seconds_{stage}")[1:]) for stage in STAGES}
    whole = sum(seconds_of.values())
    cells = [
        f"{statistics.median(ours):.2f}",
        f"{statistics.median(theirs):.2f}",
        f"{beside:.2f}",
        f"{statistics.median(ratios):.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f})",
        *(f"{spent / whole:.2%}" for spent in seconds_of.values()),
    ]
    return cells, model


def decomposed(model: ls.FederatedModule, turns: int) -> list[list[str]]:
    pairs = [(adapter.B.detach().double(), adapter.A.detach().double()) for adapter in model.state.adapters]
    compact, full = [], []
    for _ in range(turns):
        compact.append(seconds(lambda: [balanced_factors(b, a, len(a), 1.0, 1e-7) for b, a in pairs]))
        full.append(seconds(lambda: [torch.linalg.svd(b @ a, full_matrices=False) for b, a in pairs]))
    ratio = statistics.median(full) / statistics.median(compact)
    return [
        ["all layers decomposed, compact, s", f"{statistics.median(compact):.3f}"],
        ["the full products instead, s", f"{statistics.median(full):.2f} ({ratio:.0f} times)"],
    ]


def peak_mib(num_clients: int) -> float:
    """Return the peak resident memory of a process that plays two rounds."""
    command = [sys.executable, __file__, "--memory", str(num_clients)]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def play_for_memory(num_clients: int) -> None:
    model, data = federation(num_clients, STEPS[0])
    pl.Trainer(max_epochs=2, accelerator="cpu", **QUIET).fit(model, data)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=6, help="rounds of each of the two, after a warm-up round")
    parser.add_argument("--memory", type=int, help="play two rounds with this many clients and print the peak in MiB")
    parser.add_argument("--write", action="store_true", help="write the table to docs/tables")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.memory:
        play_for_memory(options.memory)
        return
    # this comes first: on Linux a process inherits the peak of the process that started it
    peaks = {num_clients: peak_mib(num_clients) for num_clients in (2, 8)}
    columns, models = zip(*(timed(options.rounds, steps) for steps in STEPS), strict=True)
    rows = [list(cells) for cells in zip(ROWS, *columns, strict=True)]
    rows += [[*row, ""] for row in decomposed(models[0], 3)]
    base = sum(p.nbytes for p in models[0].module.parameters()) / 2**20
    rows += [["the model, MiB", f"{base:.0f}", ""]]
    rows += [[f"peak with {num_clients} clients, MiB", f"{peak:.0f}", ""] for num_clients, peak in peaks.items()]
    table = [["", *(f"{steps} local steps" for steps in STEPS)], *rows]
    show(table)
    if options.write:
        write("lora", {"torch": torch.__version__, "Lightning": pl.__version__}, table)


if __name__ == "__main__":
    main()
