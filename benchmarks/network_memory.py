"""The server's memory for rounds of 3, 30 and 100 clients that are elsewhere.

    python benchmarks/network_memory.py

Needs no Flower: messages go through files, as they go through a SuperLink's database, and a device trains in this
process when its answer is fetched. The table shows the largest resident memory of a process that plays one round, in
MiB beyond that of a round of one client. A multi-layer perceptron of 2.1 million parameters (8 MiB) is trained. What
all clients get is in memory once; a sub-model of a client's own is there until its answer, and `at_once` bounds their
number. How many are in flight without it depends on how fast answers come. In rows "returned", glibc is told to give
freed blocks back: it keeps them otherwise, split into ever smaller ones, and the process grows by what it could reuse.
"""

import argparse
import gc
import os
import pickle
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

import lightning.pytorch as pl
import torch
from page import show
from torch import nn
from torch.utils.data import TensorDataset

import lightning_spectral as ls
import lightning_spectral.network as net
from lightning_spectral.models import LitClassifier
from lightning_spectral.network.device import DeviceService
from lightning_spectral.network.line import Answer, Line

WIDTH, COHORTS = 1024, (1, 3, 30, 100)
SHARDING = "spectral sharding, r = 0.2"
CASES = {  # with how many clients train at once
    "FedAvg": None,
    "FedAvg, returned": None,
    SHARDING: None,
    f"{SHARDING}, at_once=8": 8,
    f"{SHARDING}, at_once=8, returned": 8,
}
RETURNED = {"MALLOC_MMAP_THRESHOLD_": "65536"}  # glibc gives freed blocks of 64 KiB and more back at once


def module():
    layers = nn.Sequential(nn.Linear(8, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
    return LitClassifier(layers, num_classes=WIDTH, lr=0.01)


class Files(Line):
    """Nodes whose messages lie in files until they are fetched."""

    def __init__(self, folder, clients):
        self.folder, self.clients, self.count = folder, clients, 0
        data = TensorDataset(torch.ones(2, 8), torch.zeros(2, dtype=torch.int64))
        self.data = net.ClientData(data, batch_size=2)

    def nodes(self):
        return range(self.clients)

    def ask(self, question):
        self.count += 1
        (self.folder / str(self.count)).write_bytes(pickle.dumps((question.node, question.kind, dict(question.parts))))
        return str(self.count)

    def answers(self, tickets):
        for ticket in tickets:
            node, kind, parts = pickle.loads((self.folder / ticket).read_bytes())
            (self.folder / ticket).unlink()
            service = DeviceService({"": module}, {"": self.data}, str(node), accelerator="cpu")
            parts = service.answer(kind, parts)
            del service
            gc.collect()  # it would be in another process
            yield Answer(ticket, parts)


def play(case, clients):
    """Play a round; print the largest resident memory so far, in MiB."""
    algorithm = ls.FedAvg() if case.startswith("FedAvg") else ls.SpectralSharding(keep_ratio=0.2)
    federation = ls.FederatedModule(module(), algorithm=algorithm, clients_per_round=clients)
    options = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    trainer = pl.Trainer(max_epochs=1, enable_checkpointing=False, **options)
    with tempfile.TemporaryDirectory() as folder:
        trainer.fit(federation, net.RemoteClients(Files(Path(folder), clients), at_once=CASES[case]))
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--play", nargs=2, help=argparse.SUPPRESS)
    if arguments := parser.parse_args().play:
        return play(arguments[0], int(arguments[1]))
    rows = []
    for case in CASES:
        peaks = []
        for clients in COHORTS:
            command = [sys.executable, __file__, "--play", case, str(clients)]
            environment = {**os.environ, **(RETURNED if case.endswith("returned") else {})}
            done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
            peaks.append(int(done.stdout.split()[-1]))
        rows.append((case, f"{peaks[0]} MiB", *(f"+{peak - peaks[0]}" for peak in peaks[1:])))
    show([("clients in a round", *map(str, COHORTS)), *rows])


if __name__ == "__main__":
    main()
