"""Local Zampling on MNIST: the paper's experiments without federation.

    python studies/zampling/local.py     # 15 minutes on one core; continues where it stopped
    python studies/zampling/local.py --scale paper     # days
    python studies/zampling/local_report.py

``figure3`` varies the compression and the degree (section 3.1), ``zhou`` compares with supermasks (appendix B.1),
``sensitivity`` perturbs trained probabilities (section 3.3), ``integrality`` trains without sampling, starting from
Beta-distributed probabilities (appendix A). The paper does not state the compression and degree of the last two; here
they are 1 and 10. Its early stopping needs a loss to monitor, here the mean training loss of an epoch. The small scale
trains for three or six epochs instead of up to 100, with a learning rate of 0.01 instead of 0.001.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise, product
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import torch
from digits import mnist
from torch import Tensor, nn

sys.path.append(str(Path(__file__).parents[1]))  # code that the studies share
from records import restore, train_once

import lightning_spectral as ls
from lightning_spectral.nn.zampling import local_weights, sampled_networks

OUTPUT = Path("outputs/zampling_local")
BATCH_SIZE, PATIENCE, MIN_DELTA = 128, 10, 1e-4
TAUS, NUM_PERTURBATIONS, NUM_PERTURBED_SAMPLES = (0.01, 0.1, 0.2, 0.3, 0.4, 0.5), 10, 10
SMALL_NET, MNIST_FC = (784, 20, 20, 10), (784, 300, 100, 10)
METHODS: dict[str, dict[str, Any]] = {
    "sampled": {"init": "paper"},
    "continuous": {"init": "paper", "sampled": False},
    "supermask": {"link": ls.functional.zampling.Sigmoid()},
}


@dataclass(frozen=True)
class Spec:
    """One run.

    Attributes:
        experiment: Name of the plan.
        method: Name of the method.
        widths: Widths of the network's layers.
        compression: Number of weights for each probability.
        degree: Number of probabilities for each weight; ``None`` for a diagonal matrix.
        lr: Learning rate of Adam.
        beta: Both parameters of the Beta distribution of the initial probabilities; 1 is uniform.
        num_images: Number of training images, the first of 60,000.
        epochs: Maximum number of passes over them; early stopping may end training sooner.
        num_samples: Number of sampled networks.
        seed: Seed of Q, the initial probabilities and every other draw.
    """

    experiment: str
    method: str
    widths: tuple[int, ...]
    compression: int
    degree: int | None
    lr: float
    beta: float
    num_images: int
    epochs: int
    num_samples: int
    seed: int

    @property
    def path(self) -> Path:
        """The path of the result."""
        parts = [
            "-".join(map(str, value)) if isinstance(value, tuple) else str(value) for value in asdict(self).values()
        ]
        return OUTPUT / f"{'_'.join(parts)}.json"


def figure3(small: bool) -> Iterator[Spec]:
    """Compressions and degrees; a row of Q cannot have more entries than columns, which leaves some out."""
    num_weights = sum((a + 1) * b for a, b in pairwise(SMALL_NET))
    compressions = (1, 2, 4, 8, 16, 32, 256) if small else tuple(2**i for i in range(11))
    degrees = (1, 5, 10, 50) if small else (1, 5, 10, 50, 100)
    lr, *scale = (0.01, 60_000, 3, 100) if small else (0.001, 60_000, 100, 100)
    for seed, compression, degree in product(range(2 if small else 5), compressions, degrees):
        if degree <= -(-num_weights // compression):
            yield Spec("figure3", "sampled", SMALL_NET, compression, degree, lr, 1.0, *scale, seed)


def zhou(small: bool) -> Iterator[Spec]:
    """Degrees without compression, and supermasks, whose sigmoid needs scores to move further than clipping does."""
    degrees = (2, 4, 16) if small else (2, 4, 16, 256)
    rates = (0.01, 0.1) if small else (0.001, 0.01, 0.1)
    scale = (10_000, 6, 100) if small else (60_000, 100, 100)
    for seed, lr, degree in product(range(2 if small else 5), rates, (*degrees, None)):
        method = "sampled" if degree else "supermask"
        yield Spec("zhou", method, MNIST_FC, 1, degree, lr, 1.0, *scale, seed)


def sensitivity(small: bool) -> Iterator[Spec]:
    """Training with and without sampling."""
    lr, *scale = (0.01, 60_000, 3, 10) if small else (0.001, 60_000, 100, 10)
    for seed, method in product(range(2 if small else 5), ("sampled", "continuous")):
        yield Spec("sensitivity", method, SMALL_NET, 1, 10, lr, 1.0, *scale, seed)


def integrality(small: bool) -> Iterator[Spec]:
    """Initial probabilities from the ends of [0, 1] to its middle, without sampling; and one run with sampling."""
    scale = (10_000, 3, 30) if small else (60_000, 100, 100)
    betas = (0.1, 0.3, 1.0, 3.0, 10.0) if small else (0.1, 0.2, 0.3, 0.5, 1.0, 2.0, 3.0, 5.0, 10.0)
    for seed in range(2 if small else 3):
        for beta in betas:
            yield Spec("integrality", "continuous", MNIST_FC, 1, 10, 0.01, beta, *scale, seed)
        yield Spec("integrality", "sampled", MNIST_FC, 1, 10, 0.01, 1.0, *scale, seed)


PLANS = {plan.__name__: plan for plan in (figure3, zhou, sensitivity, integrality)}


def network(spec: Spec) -> nn.Module:
    """Return the network with randomly drawn scores."""
    layers = [layer for a, b in pairwise(spec.widths) for layer in (nn.Linear(a, b), nn.ReLU())]
    net = nn.Sequential(*layers[:-1])
    ls.nn.zample(net, spec.compression, spec.degree, seed=spec.seed, memory=2**31, **METHODS[spec.method])
    if spec.beta != 1.0:
        weights = local_weights(net)
        draws = np.random.default_rng(spec.seed).beta(spec.beta, spec.beta, len(weights.scores))
        weights.set_probs(torch.from_numpy(draws))
    return net


def train(spec: Spec, net: nn.Module, x: Tensor, y: Tensor) -> list[float]:
    """Train the network, and return the mean training loss of each epoch."""
    x, y = x[: spec.num_images], y[: spec.num_images]
    adam = torch.optim.Adam(net.parameters(), lr=spec.lr)
    order = torch.Generator().manual_seed(spec.seed)
    losses: list[float] = []
    for _ in range(spec.epochs):
        batches = []
        for chosen in torch.randperm(len(x), generator=order).split(BATCH_SIZE):
            adam.zero_grad()
            loss = nn.functional.cross_entropy(net(x[chosen]), y[chosen])
            loss.backward()
            adam.step()
            batches.append(loss.item())
        losses.append(mean(batches))
        if len(losses) > PATIENCE and min(losses[:-PATIENCE]) - min(losses[-PATIENCE:]) < MIN_DELTA:
            break
    net.eval()
    return losses


@torch.no_grad()
def accuracy(net: nn.Module, x: Tensor, y: Tensor) -> float:
    return float((net(x).argmax(1) == y).float().mean())


@torch.no_grad()
def at_probs(net: nn.Module, probs: Tensor, x: Tensor, y: Tensor, num_samples: int, seed: int) -> float:
    """Return mean accuracy at given probabilities: of sampled networks, or the expected one if ``num_samples`` is 0."""
    weights = local_weights(net)
    kept = weights.scores.clone()
    weights.set_probs(probs)
    found = [accuracy(net, x, y)] if num_samples == 0 else sampled(net, x, y, num_samples, seed)
    weights.scores.copy_(kept)
    return mean(found)


def sampled(net: nn.Module, x: Tensor, y: Tensor, num_samples: int, seed: int) -> list[float]:
    """Return the accuracies of sampled networks."""
    return [accuracy(each, x, y) for each in sampled_networks(net, num_samples, torch.Generator().manual_seed(seed))]


def perturbed(spec: Spec, net: nn.Module, x: Tensor, y: Tensor) -> list[dict[str, Any]]:
    """Return accuracies after N(0, 1) is added to some probabilities, which are then clipped to [0, 1].

    ``inside`` are those between tau and 1 - tau, as printed; ``outside`` are the others. The paper says that with
    tau = 0.5 all are perturbed, which agrees with the second reading, not with the first.
    """
    probs, rows = local_weights(net).probs, []
    num_samples = NUM_PERTURBED_SAMPLES if spec.method == "sampled" else 0
    before = at_probs(net, probs, x, y, num_samples, seed=0)
    for where, tau in product(("inside", "outside"), TAUS):
        chosen = (tau <= probs) & (probs <= 1 - tau)
        chosen = chosen if where == "inside" else ~chosen
        generator = torch.Generator().manual_seed(spec.seed)
        noises = [torch.randn(len(probs), generator=generator) * chosen for _ in range(NUM_PERTURBATIONS)]
        after = [
            at_probs(net, (probs + noise).clamp(0, 1), x, y, num_samples, seed=i) for i, noise in enumerate(noises)
        ]
        row = {"where": where, "tau": tau, "share": float(chosen.float().mean()), "before": before, "after": after}
        rows.append({**row, "norms": [float(noise.norm()) for noise in noises]})
    return rows


def run(spec: Spec, data: tuple[Tensor, Tensor, Tensor, Tensor]) -> dict[str, Any]:
    """Train, and return test accuracies of the expected network, of the rounded one and of sampled ones."""
    begun = time.perf_counter()
    net = network(spec)
    x, y, test_x, test_y = data
    losses = train(spec, net, x, y)
    probs = local_weights(net).probs
    result = {
        **asdict(spec),
        "losses": losses,
        "expected": accuracy(net, test_x, test_y),
        "rounded": at_probs(net, probs.round(), test_x, test_y, num_samples=0, seed=0),
        "sampled": sampled(net, test_x, test_y, spec.num_samples, seed=spec.seed),
        "uncertainty": float((probs * (1 - probs)).mean()),
    }
    if spec.experiment == "sensitivity":
        result["perturbed"] = perturbed(spec, net, test_x, test_y)
    return {**result, "seconds": round(time.perf_counter() - begun, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description="Local Zampling on MNIST.")
    parser.add_argument("plans", nargs="*", default=list(PLANS), help=f"which runs: {', '.join(PLANS)} (all)")
    parser.add_argument("--scale", choices=["small", "paper"], default="small")
    args = parser.parse_args()
    torch.set_num_threads(1)
    restore(OUTPUT)
    data = mnist()
    for spec in (spec for plan in args.plans for spec in PLANS[plan](args.scale == "small")):
        result = train_once(spec.path, partial(run, spec, data))
        if result is None:
            continue
        accuracies = f"expected {result['expected']:.2%}, sampled {mean(result['sampled']):.2%}"
        print(f"{spec.path.stem}: {accuracies} ({result['seconds']:.0f} s)", flush=True)


if __name__ == "__main__":
    main()
