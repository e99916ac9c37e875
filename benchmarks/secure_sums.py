"""What secure sums cost: bytes of a client and seconds of a round, beside plain sums.

    python benchmarks/secure_sums.py

Clients and server are in this process, one after another, on one thread, and talk over a line that counts bytes. A
network of 100,489 weights trains on 100 examples of each client, in batches of 10. In the rows "lost", one client in
ten does not send its update after it has agreed on masks. Seconds are of CPU, medians of a round without its first.
"""

import argparse
import statistics
import time
from collections import Counter

import torch
from page import show
from torch import nn
from torch.utils.data import TensorDataset

import lightning_spectral as ls
import lightning_spectral.network as net
from lightning_spectral.models import LitClassifier
from lightning_spectral.network.device import DeviceService
from lightning_spectral.network.line import Answer, Line
from lightning_spectral.network.messages import Kind
from lightning_spectral.plugin.trainer import silence, silent_trainer

WIDTH = 316
CASES = {"plain": (None, 0), "secure": (0.6, 0), "plain, lost": (None, 10), "secure, lost": (0.6, 10)}


def module():
    return LitClassifier(nn.Sequential(nn.Flatten(), nn.Linear(WIDTH, WIDTH)), num_classes=WIDTH, lr=0.01)


class Counted(Line):
    """Nodes in this process; every `lost`-th, if any, sends no update."""

    def __init__(self, clients, lost):
        self.lost, self.ready, self.num_bytes = lost, {}, Counter()
        data = TensorDataset(torch.ones(100, WIDTH), torch.zeros(100, dtype=torch.int64))
        own = net.ClientData(data, batch_size=10)
        make = ({"": module}, {"": own})
        self.services = {node: DeviceService(*make, f"{node}", accelerator="cpu") for node in range(clients)}

    def nodes(self):
        return list(self.services)

    def ask(self, question):
        parts = self.services[question.node].answer(question.kind, question.parts)
        if question.kind != Kind.WHO:
            self.num_bytes["down"] += sum(map(len, question.parts.values()))
            self.num_bytes["up"] += sum(map(len, parts.values()))
        ticket, is_lost = f"{time.perf_counter_ns()}", bool(self.lost) and question.node % self.lost == 0
        is_lost &= question.kind == Kind.TRAIN
        self.ready[ticket] = Answer(ticket, {} if is_lost else parts, "dropped_out" if is_lost else None)
        return ticket

    def answers(self, tickets):
        return [self.ready.pop(ticket) for ticket in tickets if ticket in self.ready]


class Ends(ls.RoundCallback):
    def __init__(self):
        self.at = []

    def on_round_end(self, trainer, pl_module, summary):
        self.at.append(time.process_time())


def measured(case, clients, rounds):
    """Seconds of a round, and kilobytes that a client gets and sends in it."""
    threshold, lost = CASES[case]
    filters = [] if threshold is None else [ls.SecureSums(threshold)]
    model = ls.FederatedModule(module(), clients_per_round=clients, filters=filters)
    line, ends = Counted(clients, lost), Ends()
    with silence():
        trainer = silent_trainer(max_epochs=rounds, accelerator="cpu", devices=1, callbacks=[ends])
        trainer.fit(model, net.RemoteClients(line, update_bound=None))
    seconds = statistics.median(later - earlier for earlier, later in zip(ends.at, ends.at[1:], strict=False))
    return seconds, *(line.num_bytes[way] / clients / rounds / 1000 for way in ("down", "up"))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, nargs="+", default=[10, 50])
    parser.add_argument("--rounds", type=int, default=6)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = [("", "clients", "s a round", "of plain", "KB down", "of plain", "KB up", "of plain")]
    for clients in options.clients:
        all_found = {case: measured(case, clients, options.rounds) for case in CASES}
        for case, found in all_found.items():
            plain = all_found[case.replace("secure", "plain")]
            ratios = [f"{own / other:.2f}" for own, other in zip(found, plain, strict=True)]
            figures = [f"{found[0]:.2f}", f"{found[1]:.0f}", f"{found[2]:.0f}"]
            rows.append((case, str(clients), *(cell for pair in zip(figures, ratios, strict=True) for cell in pair)))
    show(rows)


if __name__ == "__main__":
    main()
