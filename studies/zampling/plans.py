"""The runs of the federated study."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))  # code that the studies share
from records import read_runs

import lightning_spectral as ls

OUTPUT = Path("outputs/zampling")
MAIN_TASK, STOPPING, FEW_IMAGES = "MNISTFC", "MNISTFC, early stopping", "MNISTFC, 5,000 images"
BEST = "continuous, gain 2, coordinated"

SETUPS: dict[str, dict[str, Any]] = {
    "published": {"init": "paper"},
    "He start": {},
    "He, smoothing 0.1": {"smoothing": 0.1},
    "He, smoothing 1": {"smoothing": 1.0},
    "He, not absorbing": {"link": ls.functional.zampling.Clip(absorbing=False)},
    "sigmoid": {"link": ls.functional.zampling.Sigmoid()},
    "continuous": {"sampled": False},
    "gain 2": {"gain": 2.0},
    "gain 3": {"gain": 3.0},
    "continuous, gain 2": {"sampled": False, "gain": 2.0},
    "8 bits down": {"downlink_bits": 8},
    "4 bits down": {"downlink_bits": 4},
    "2 bits down": {"downlink_bits": 2},
    "gain 2, 4 bits down": {"gain": 2.0, "downlink_bits": 4},
    "published, coordinated": {"init": "paper", "coordinated": True},
    "gain 2, coordinated": {"gain": 2.0, "coordinated": True},
    "continuous, coordinated": {"sampled": False, "coordinated": True},
    BEST: {"sampled": False, "gain": 2.0, "coordinated": True},
}

FEDPM: dict[str, ls.Zampling] = {
    "FedPM": ls.Zampling.fed_pm(),
    "FedPM, smoothing 1": replace(ls.Zampling.fed_pm(), smoothing=1.0),
    "FedPM, posterior mean": ls.Zampling.fed_pm_posterior_mean(),
}


@dataclass(frozen=True)
class Spec:
    """One run.

    Attributes:
        setup: Name of the setup or of a variant of FedPM, or ``"FedAvg"``.
        compression: Number of weights for each probability; 0 for federated averaging.
        lr: Learning rate of Adam.
        decay: Whether the learning rate falls to zero over the rounds, along a cosine.
        server_lr: Learning rate of the server: how far p moves towards the mean of the bits.
        momentum: The server's momentum.
        local_epochs: Passes over a client's images in a round.
        num_rounds: Number of rounds.
        seed: Seed of Q, the initial probabilities and every other draw.
        task: Name of the task.
    """

    setup: str
    compression: int
    lr: float = 0.1
    decay: bool = False
    server_lr: float = 1.0
    momentum: float = 0.0
    local_epochs: int = 1
    num_rounds: int = 40
    seed: int = 0
    task: str = MAIN_TASK

    @property
    def algorithm(self) -> ls.Algorithm:
        """The algorithm of the run."""
        if self.setup == "FedAvg":
            return ls.FedAvg()
        if self.setup in FEDPM:
            return FEDPM[self.setup]
        return ls.Zampling(self.compression, **SETUPS[self.setup])

    @property
    def path(self) -> Path:
        """The path of the result; the main task is not part of the name."""
        values = asdict(self)
        if self.task == MAIN_TASK:
            del values["task"]
        name = "_".join(str(value) for value in values.values())
        return OUTPUT / f"{''.join(c if c.isalnum() or c in '._-' else '-' for c in name)}.json"


def table1() -> Iterator[Spec]:
    """The paper's three compressions as published with three seeds, one of them for all 100 rounds, and FedAvg."""
    yield Spec("published", 32, num_rounds=100)
    yield Spec("FedAvg", 0, lr=0.001)
    for compression, seed in product((32, 8, 1), range(3)):  # the last one takes a quarter of an hour a run
        yield Spec("published", compression, seed=seed)


def choices() -> Iterator[Spec]:
    """The effect of the choices, at compression 32, in 20 rounds."""
    for setup in SETUPS:
        yield Spec(setup, 32, num_rounds=20)
    short = {"compression": 32, "num_rounds": 20}
    for lr, server_lr in product((0.1, 0.03, 0.01), (1.0, 0.3)):
        yield Spec("published", lr=lr, server_lr=server_lr, **short)
    for setup in ("He start", "He, not absorbing", "He, smoothing 0.1"):
        yield Spec(setup, lr=0.03, server_lr=0.3, **short)
    yield Spec("published", momentum=0.5, **short)
    yield Spec("published", local_epochs=3, **short)
    yield Spec("published", decay=True, **short)


def downlink() -> Iterator[Spec]:
    """Probabilities sent down with fewer bits, and as floats, at compression 32, in 20 rounds."""
    for setup in ("He start", "8 bits down", "4 bits down", "2 bits down", "gain 2", "gain 2, 4 bits down"):
        yield Spec(setup, 32, num_rounds=20)


def best() -> Iterator[Spec]:
    """The best setup found: a wider Q, training of probabilities, and bits that clients draw jointly."""
    for compression in (32, 8):
        yield Spec(BEST, compression, lr=0.03, local_epochs=2, num_rounds=20)


def bits() -> Iterator[Spec]:
    """The effect of drawing bits jointly, and of a server that moves only half of the way."""
    for setup in ("published", "published, coordinated", "gain 2", "gain 2, coordinated"):
        yield Spec(setup, 32, num_rounds=20)
    for setup in ("continuous, gain 2", BEST):
        yield Spec(setup, 8, lr=0.03, local_epochs=2, num_rounds=10)
    yield Spec("gain 2", 32, server_lr=0.5, local_epochs=5)
    yield Spec("gain 2", 8, server_lr=0.5, local_epochs=5, num_rounds=60)


def seeds() -> Iterator[Spec]:
    """Two more seeds of the best setup."""
    for seed, spec in product((1, 2), best()):
        yield replace(spec, seed=seed)


def fedpm() -> Iterator[Spec]:
    """FedPM's network with a twelfth of the images and ten rounds, compared with FedAvg and FedPM itself."""
    small: dict[str, Any] = {"task": "Conv-4", "local_epochs": 2, "num_rounds": 10}
    for compression in (32, 8, 128):
        yield Spec("continuous, coordinated", compression, lr=0.03, **small)
    yield Spec("FedAvg", 0, lr=0.001, **small)
    yield Spec("FedPM", 1, **small)
    yield Spec("FedPM, posterior mean", 1, **small)


def posteriors() -> Iterator[Spec]:
    """FedPM and its relatives on the main network, with a twelfth of the images, three seeds."""
    for seed, setup in product(range(3), FEDPM):
        yield Spec(setup, 1, task=FEW_IMAGES, local_epochs=3, num_rounds=20, seed=seed)


def stopped() -> Iterator[Spec]:
    """The first rounds of Table 1 with the local training that the paper states: 100 epochs with early stopping."""
    for compression in (32, 8):
        yield Spec("published", compression, task=STOPPING, local_epochs=100, num_rounds=2)


PLANS = {plan.__name__: plan for plan in (table1, choices, downlink, best, bits, seeds, fedpm, posteriors, stopped)}


def results() -> list[dict[str, Any]]:
    """Return all finished runs."""
    return [{"task": MAIN_TASK} | run for run in read_runs(OUTPUT)]  # early runs do not store the task
