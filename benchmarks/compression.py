"""What compressed uploads cost in accuracy, beside sharding at the same bytes.

    python benchmarks/compression.py

trains an MLP of 85,002 weights on scikit-learn's digits: 20 clients of about 75 images, dealt by Dir(1), of which 5
take part in each of 40 rounds with 2 local epochs of SGD with momentum 0.9, in batches of 20, at a rate that falls to 0
by a cosine; plain averaging. Every contender is tried at rates in factors of two, with three seeds, which also change
the split; the table has its best rate, by the mean over seeds. Sharding, which diverges at 0.8, cuts all layers but the
last, at the keep ratios whose uploads are as small. Takes about five minutes on one CPU core.
"""

import argparse
import sys
from pathlib import Path
from statistics import mean, stdev

import torch
from page import show
from torch import nn

import lightning_spectral as ls
from lightning_spectral.models import LitClassifier
from lightning_spectral.plugin.trainer import silence, silent_trainer

sys.path.append(str(Path(__file__).parents[1] / "examples"))
from digits import pen_digits

BUT_THE_LAST = ls.LayerChoices(keep_first_and_last_dense=False, exclude=["*4"])
PACKED = {"whole": [], "Int8()": [ls.Int8()], "TopK(0.1)": [ls.TopK(0.1)], "TopK(0.01)": [ls.TopK(0.01)]}


def network():
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))


def cost(algorithm, capacity=1.0, filters=()):
    return ls.cost_table(network(), algorithm, [capacity], torch.zeros(20, 64), filters=filters).at[capacity]


def contenders():
    """Algorithms, filters, and what a client of each costs."""
    for name, filters in PACKED.items():
        yield f"FedAvg, {name}", ls.FedAvg(), filters, cost(ls.FedAvg(), filters=filters)
    for name in ("Int8()", "TopK(0.1)"):
        budget = cost(ls.FedAvg(), filters=PACKED[name]).uplink_bytes
        sharding = ls.SpectralSharding(layers=BUT_THE_LAST)
        keep_ratio = ls.largest_that_fits(network(), sharding, budget_uplink_bytes=budget)
        algorithm = ls.SpectralSharding(keep_ratio=keep_ratio, layers=BUT_THE_LAST)
        yield f"sharding, r = {keep_ratio:.3f}", algorithm, [], cost(sharding, keep_ratio)


def accuracy(algorithm, filters, rate, seed, rounds):
    torch.manual_seed(seed)
    module = LitClassifier(network(), num_classes=10, lr=rate)
    partitioner = ls.DirichletPartitioner(num_clients=20, alpha=1.0)
    data = ls.FederatedDataModule(pen_digits(), partitioner, val=pen_digits(test=True), batch_size=20, seed=seed)
    choices = {"algorithm": algorithm, "filters": filters, "local_epochs": 2, "seed": seed}
    model = ls.FederatedModule(module, clients_per_round=5, **choices)
    with silence():
        trainer = silent_trainer(max_epochs=rounds, check_val_every_n_epoch=rounds, accelerator="cpu", devices=1)
        trainer.fit(model, data)
    return 100 * float(trainer.callback_metrics["val_accuracy"])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", type=float, nargs="+", default=[0.025, 0.05, 0.1, 0.2, 0.4])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--rounds", type=int, default=40)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = [("", "KB up", "of FedAvg", "KB down", "rate", "accuracy")]
    for name, *contender, own in contenders():
        found = {
            rate: [accuracy(*contender, rate, seed, options.rounds) for seed in options.seeds] for rate in options.rates
        }
        rate = max(found, key=lambda rate: mean(found[rate]))
        spread = f" ± {stdev(found[rate]):.1f}" if len(options.seeds) > 1 else ""
        share = own.uplink_bytes / cost(ls.FedAvg()).uplink_bytes
        sizes = f"{own.uplink_bytes / 1000:.1f}", f"{share:.1%}", f"{own.downlink_bytes / 1000:.1f}"
        rows.append((name, *sizes, f"{rate:g}", f"{mean(found[rate]):.1f}{spread}"))
        print(name, {rate: [round(one, 1) for one in all_seeds] for rate, all_seeds in found.items()}, file=sys.stderr)
    show(rows)


if __name__ == "__main__":
    main()
