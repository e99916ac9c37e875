"""The memory of a round of a large model, by stage, in units of the model's size.

    python benchmarks/large.py --model gpt2

A GPT-2 of 85 million parameters (12 blocks of width 768), or one of 353 million ("medium", 28 of width 1024): rounds of
two clients with two steps each, two sequences of 16 characters in a batch, SGD with momentum. Counted is the memory of
all tensors, the server's weights included; for each stage of the second and later rounds, the most that is held at once
within it. Each case has a process of its own, whose largest resident memory, beyond that before the model is built, is
in the last column: it includes what the allocator has not given back, but nothing that libraries hold.
"""

import argparse
import json
import logging
import math
import re
import resource
import subprocess
import sys
import warnings
from collections import defaultdict
from itertools import accumulate
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.profilers import Profiler
from page import show, write
from torch.utils.data import TensorDataset

import lightning_spectral as ls
from lightning_spectral.models import CharTransformer, LitNextToken
from lightning_spectral.nn.cost import LiveBytes
from lightning_spectral.protocol.records import STAGES

SIZES = {"tiny": (32, 2, 2), "gpt2": (768, 12, 12), "medium": (1024, 16, 28)}  # width, heads, blocks
ALGORITHMS = {"FedAvg": ls.FedAvg(), "spectral": ls.SpectralSharding(ls.Collective(), keep_ratio=0.1)}
TYPES = {"float32": torch.float32, "bf16": torch.bfloat16}
VOCABULARY, LENGTH, BATCH, STEPS, CLIENTS = 90, 16, 2, 2, 2
STAGE = re.compile(rf".*\b({'|'.join(STAGES)})$")  # of the profiler's names


class Watermarks(Profiler):
    """The most memory that tensors hold within each stage of a round, and between stages.

    Attributes:
        most: Bytes, by stage; of the first round under "first", whatever the stage.
        live: Counts what is alive.
    """

    def __init__(self, live: LiveBytes) -> None:
        super().__init__()
        self.live, self.most = live, defaultdict[str, int](int)
        self._now = self._num_events = 0  # bytes that are alive, and all events so far, when last looked at
        self.is_first = True
        self._open: list[str] = []

    def note(self) -> None:
        stage = "first" if self.is_first else self._open[-1] if self._open else "between"
        events = self.live.events[self._num_events :]
        alive = list(accumulate(map(math.prod, events), initial=self._now))
        self.most[stage] = max(self.most[stage], max(alive))
        self._now, self._num_events = alive[-1], self._num_events + len(events)

    def start(self, action_name: str) -> None:
        if found := STAGE.match(action_name):
            self.note()
            self._open.append(found[1])

    def stop(self, action_name: str) -> None:
        if STAGE.match(action_name):
            self.note()
            self._open.pop()


class Begins(pl.Callback):
    """Tells the first round, in which forms are built, from others."""

    def __init__(self, watermarks: Watermarks) -> None:
        self.watermarks = watermarks

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.current_epoch == 1:
            self.watermarks.note()
            self.watermarks.is_first = False


def measure(model: str, algorithm: str, kind: str, rounds: int = 3) -> dict[str, float]:
    """Bytes of each stage, of the model, and of the process, over those of the model's parameters."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    width, heads, blocks = SIZES[model]
    tokens = torch.randint(VOCABULARY, (CLIENTS * STEPS * BATCH, LENGTH))
    quiet: dict[str, Any] = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary"), False)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with LiveBytes() as live:
        watermarks = Watermarks(live)
        network = CharTransformer(VOCABULARY, LENGTH, width, heads, blocks, dropout=0.0).to(TYPES[kind])
        federation = ls.FederatedModule(
            LitNextToken(network, VOCABULARY, lr=0.01), algorithm=ALGORITHMS[algorithm], clients_per_round=CLIENTS
        )
        data = ls.FederatedDataModule(TensorDataset(tokens, tokens), ls.IIDPartitioner(CLIENTS), batch_size=BATCH)
        trainer = pl.Trainer(
            max_epochs=rounds,
            accelerator="cpu",
            precision="bf16-true" if kind == "bf16" else "32-true",
            callbacks=[Begins(watermarks)],
            profiler=watermarks,
            enable_checkpointing=False,
            **quiet,
        )
        trainer.fit(federation, data)
    size = sum(parameter.numel() * parameter.element_size() for parameter in network.parameters())
    resident = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    found = {**watermarks.most, "all": max(watermarks.most.values()), "resident": resident}
    return {"MB": size / 1e6, **{stage: most / size for stage, most in found.items()}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=SIZES, default="gpt2")
    parser.add_argument("--types", nargs="+", choices=TYPES, default=list(TYPES))
    parser.add_argument("--case", nargs=2, metavar=("ALGORITHM", "TYPE"), help=argparse.SUPPRESS)
    parser.add_argument("--write", action="store_true", help="write the table to docs/tables")
    options = parser.parse_args()
    if options.case:
        warnings.filterwarnings("ignore")
        logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
        print(json.dumps(measure(options.model, *options.case)))
        return
    columns = ["first", *STAGES, "between", "all", "resident"]
    table = [("algorithm", "type", "MB", *columns)]
    for kind in options.types:
        for algorithm in ALGORITHMS:
            command = [sys.executable, __file__, "--model", options.model, "--case", algorithm, kind]
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
            found = json.loads(done.stdout.splitlines()[-1])
            cells = [f"{found.get(name, 0.0):.2f}" for name in columns]
            table.append((algorithm, kind, f"{found['MB']:.0f}", *cells))
            print(*table[-1], sep="  ", file=sys.stderr)
    show(table)
    if options.write:
        write(f"large_{options.model}", {"torch": torch.__version__}, table)


if __name__ == "__main__":
    main()
