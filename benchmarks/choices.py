"""What a choice adds to a round of FedAvg: CPU seconds, as a ratio.

    python benchmarks/choices.py --turns 5 --write

The small CNN of the other benchmarks, 100 clients of 100 examples, ten a round, five local steps each in the mean, on
one thread. In a turn every choice plays some rounds; its ratio is the median, over turns, of its round beside that of
FedAvg. `ExamplePrivacy` takes a pass for every example, and `ClientEvaluation` evaluates all clients after each round,
on a fifth of their examples: that is work, and no overhead.
"""

import argparse
import runpy
import statistics
import time
from collections import defaultdict
from importlib.metadata import version
from pathlib import Path

import torch
from page import show, write
from torch.utils.data import TensorDataset

import lightning_spectral as ls
from lightning_spectral.models import LitClassifier
from lightning_spectral.plugin.trainer import silence, silent_trainer

WORK = runpy.run_path(str(Path(__file__).parent / "contenders" / "workload.py"))
TWO_KINDS = {"local_steps": {3: 0.5, 7: 0.5}}
CHOICES = {
    "FedAvg": {},
    "local_steps=5": {"local_steps": 5},
    "local_steps={3: .5, 7: .5}": TWO_KINDS,
    "FedNova, as the last": {**TWO_KINDS, "filters": [ls.FedNova()]},
    "Robust(Median())": {"filters": [ls.Robust(ls.Median())]},
    "Robust(TrimmedMean(0.1))": {"filters": [ls.Robust(ls.TrimmedMean(0.1))]},
    "Robust(GeometricMedian())": {"filters": [ls.Robust(ls.GeometricMedian())]},
    "Robust(MultiKrum(2))": {"filters": [ls.Robust(ls.MultiKrum(2))]},
    "Attack": {"filters": [ls.Attack("scale", -1.0, clients=0.3)]},
    "FedBuff(concurrency=20)": {"algorithm": ls.FedBuff(concurrency=20)},
    "ExamplePrivacy": {"filters": [ls.ExamplePrivacy(clip=1.0, noise_multiplier=1.0, delta=1e-3)]},
    "ClientEvaluation": {},
}


class Ends(ls.RoundCallback):
    def __init__(self):
        self.at = []

    def on_train_epoch_end(self, trainer, pl_module):
        self.at.append(time.process_time())


def seconds(choice, train, rounds):
    """CPU seconds of each round but the first."""
    evaluates, ends = choice == "ClientEvaluation", Ends()
    data = ls.FederatedDataModule(
        train,
        ls.IIDPartitioner(100),
        batch_size=20,
        client_val_fraction=0.2 * evaluates,
        val=train if evaluates else None,
    )
    module = LitClassifier(WORK["make_model"]("cnn"), num_classes=10, lr=0.01)
    model = ls.FederatedModule(module, clients_per_round=10, **CHOICES[choice])
    callbacks = [ends, *[ls.ClientEvaluation()] * evaluates]
    with silence():
        silent_trainer(max_epochs=rounds + 1, callbacks=callbacks, limit_val_batches=1).fit(model, data)
    return [later - earlier for earlier, later in zip(ends.at, ends.at[1:], strict=False)]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=3, help="in a turn, of each choice")
    parser.add_argument("--write", action="store_true", help="write the table of the documentation")
    options = parser.parse_args()
    torch.set_num_threads(1)
    train, ratios, plain = TensorDataset(*WORK["tensors"]()), defaultdict(list), []
    for _ in range(options.turns):
        found = {choice: statistics.median(seconds(choice, train, options.rounds)) for choice in CHOICES}
        plain.append(found["FedAvg"])
        for choice, own in found.items():
            ratios[choice].append(own / found["FedAvg"])
    rows = [("choice", "a round, of FedAvg's", "smallest", "largest")]
    for choice, own in ratios.items():
        rows.append((choice, *(f"{one:.2f}" for one in (statistics.median(own), min(own), max(own)))))
    show(rows)
    print(f"A round of FedAvg takes {statistics.median(plain):.2f} CPU seconds.")
    if options.write:
        write("choices", {name: version(name) for name in ("torch", "lightning")}, rows)


if __name__ == "__main__":
    main()
