"""Trains a single client on all images, where momentum has time to build up, to show what the bound on steps does.

    python studies/any_network/one_client.py

prints test accuracy after 1,500 steps at learning rate 0.1: for the dense network, and for its sub-model with the first
tenth of the terms after a spectral start, with several values of ``clip_weight_lr``. All networks are trained with SGD.
Takes about four minutes on one core.
"""

from __future__ import annotations

import math

import torch
from plans import NETS as NAMES
from tasks import BATCH_SIZE, IMAGES, MOMENTUM, NETS, NUM_TRAIN
from torch import nn

import lightning_spectral as ls
from lightning_spectral.nn.optimizer_hooks import TermRates

KEEP_RATIO, LEARNING_RATE, NUM_STEPS = 0.1, 0.1, 1_500
BOUNDS = (math.inf, 10.0, 2.0, 1.0)


def accuracy(net: nn.Module, bound: float) -> float:
    """Train with SGD, momentum and a cosine schedule, and return the test accuracy."""
    images, labels = IMAGES["MNIST"]()
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    train, test = order[:NUM_TRAIN], order[NUM_TRAIN:]
    optimizer = torch.optim.SGD(net.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, NUM_STEPS)
    rates = TermRates(net, clip_tau=10.0, clip_weight_lr=bound)
    rates.register(optimizer)
    rates.start_client()
    generator = torch.Generator().manual_seed(1)
    for _ in range(NUM_STEPS):
        batch = train[torch.randint(NUM_TRAIN, (BATCH_SIZE,), generator=generator)]
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(images[batch]), labels[batch]).backward()
        optimizer.step()
        schedule.step()
    with torch.no_grad():
        return float((net.eval()(images[test]).argmax(1) == labels[test]).float().mean())


def network(name: str, sharded: bool) -> nn.Module:
    """Return a network with its random weights, or a sub-model of it after a spectral start."""
    torch.manual_seed(0)
    net = NETS[name]()
    if not sharded:
        return net
    ls.algorithms.spectral_start(net, KEEP_RATIO)
    return ls.replace_layers(net, KEEP_RATIO)


def main() -> None:
    torch.set_num_threads(1)
    print("| | dense | " + " | ".join(f"{bound:g}" for bound in BOUNDS) + " |")
    print("| --- " * (len(BOUNDS) + 2) + "|")
    for name in NAMES:
        found = [accuracy(network(name, sharded=False), math.inf)]
        found += [accuracy(network(name, sharded=True), bound) for bound in BOUNDS]
        print(f"| {name} | " + " | ".join(f"{100 * value:.1f}" for value in found) + " |", flush=True)


if __name__ == "__main__":
    main()
