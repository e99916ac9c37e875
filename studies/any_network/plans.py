"""The runs of the study: a first plan that chooses learning rates, and others that use them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from statistics import mean
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))  # code that the studies share
from records import read_runs
from setups import ONLY_ON, OTHER_SYSTEMS, SETUPS, KeepRatio

OUTPUT = Path("outputs/any_network")
NUM_ROUNDS = 100
NETS = ("plain, GroupNorm", "MLP", "plain, BatchNorm", "residual", "residual, zero init", "transformer")
RATES = {net: (0.1, 0.2) if net in ("MLP", "transformer") else (0.1, 0.05) for net in NETS}  # of clients in round 0
PLAIN = "start, Collective"  # the default without momentum at the server
WHOLE_ATTENTION = "default, attention whole"
MAIN = ("FedAvg", "default", "Collective", "TopN", PLAIN)  # setups whose learning rates are chosen
NEAR_IID, SKEWED, EXTREME = "Dir(10 p)", "Dir(1 p)", "Dir(0.3 p)"
CHANCE = 0.15  # accuracy that a network may have which has learned nothing

BestRates = Mapping[tuple[str, str, str, KeepRatio], float]  # learning rate by split, network, setup and keep ratio


@dataclass(frozen=True)
class Spec:
    """One run.

    Attributes:
        data: Name of the data set.
        split: How the data are dealt.
        net: Name of the network.
        setup: Name of the setup.
        keep_ratio: Share of the terms, ``"mixed"``, or 1 for the whole model.
        lr: The clients' learning rate in the first round.
        seed: Seed of weights, split and draws.
        num_rounds: Number of rounds.
    """

    data: str
    split: str
    net: str
    setup: str
    keep_ratio: KeepRatio
    lr: float
    seed: int
    num_rounds: int = NUM_ROUNDS

    @property
    def path(self) -> Path:
        """Where the result is written."""
        name = "_".join(str(value) for value in asdict(self).values())
        return OUTPUT / f"{''.join(c if c.isalnum() or c in '._-' else '-' for c in name)}.json"


def rates(best: BestRates) -> Iterator[Spec]:
    """The main setups at two learning rates: MNIST, nearly IID, r = 0.1, one seed."""
    for i, setup, net in product(range(2), MAIN, NETS):
        yield Spec("MNIST", NEAR_IID, net, setup, ratio(setup, 0.1), RATES[net][i], seed=0)


def half(best: BestRates) -> Iterator[Spec]:
    """Keep ratio 0.2; the default again at two learning rates, since larger sub-models need different ones."""
    for i, net in product(range(2), NETS):
        yield Spec("MNIST", NEAR_IID, net, MAIN[1], 0.2, RATES[net][i], seed=0)
    for setup, net in product(MAIN[2:], NETS):
        yield chosen(best, "MNIST", NEAR_IID, net, setup, 0.2, 0)


def skewed_rates(best: BestRates) -> Iterator[Spec]:
    """FedAvg and the default at two learning rates where clients' labels differ, one seed."""
    for split, i, setup, net in product((SKEWED, EXTREME), range(2), MAIN[:2], NETS):
        yield Spec("MNIST", split, net, setup, ratio(setup, 0.1), RATES[net][i], seed=0)


def skew(best: BestRates) -> Iterator[Spec]:
    """Clients whose labels differ more."""
    for split, setup, net in product((SKEWED, EXTREME), (*MAIN, "start, TopN"), NETS):
        yield chosen(best, "MNIST", split, net, setup, 0.1, 0)


def fashion(best: BestRates) -> Iterator[Spec]:
    """The other data set."""
    for setup, net in product(MAIN, NETS):
        yield chosen(best, "Fashion", NEAR_IID, net, setup, 0.1, 0)


def seeds(best: BestRates) -> Iterator[Spec]:
    """Two more seeds."""
    for seed, keep_ratio, setup, net in product((1, 2), (0.1, 0.2), MAIN, NETS):
        yield chosen(best, "MNIST", NEAR_IID, net, setup, keep_ratio, seed)


def more_seeds(best: BestRates) -> Iterator[Spec]:
    """Two more seeds of the default and of FedAvg, for the more skewed splits and for the other data set."""
    settings = (("MNIST", SKEWED), ("MNIST", EXTREME), ("Fashion", NEAR_IID))
    for seed, (data, split), setup, net in product((1, 2), settings, MAIN[:2], NETS):
        yield chosen(best, data, split, net, setup, 0.1, seed)


def others(best: BestRates) -> Iterator[Spec]:
    """All other setups, on the networks with the most and the least trouble; neither has BatchNorm or attention."""
    names = [name for name, setup in SETUPS.items() if setup.system is None and not setup.estimated]
    for net, setup in product(NETS[:2], names):
        if net in ONLY_ON.get(setup, NETS):
            yield chosen(best, "MNIST", NEAR_IID, net, setup, 0.1, 0)


def systems(best: BestRates) -> Iterator[Spec]:
    """Other systems at the same share of the parameters."""
    for setup in OTHER_SYSTEMS:
        for net in ONLY_ON.get(setup, NETS):
            yield chosen(best, "MNIST", NEAR_IID, net, setup, 0.1, 0)


def matrices(best: BestRates) -> Iterator[Spec]:
    """Means of the clients' matrices instead of means of their terms, after a spectral start."""
    for setup, net in product(("start, Collective, matrices", "start, TopN, matrices"), NETS):
        yield chosen(best, "MNIST", NEAR_IID, net, setup, 0.1, 0)


def momentum(best: BestRates) -> Iterator[Spec]:
    """Momentum at the server, with and without sharding."""
    for setup, net in product(("start, Collective, momentum", "FedAvg, momentum"), NETS):
        yield chosen(best, "MNIST", NEAR_IID, net, setup, 0.1, 0)


def averages(best: BestRates) -> Iterator[Spec]:
    """BatchNorm's averages estimated on all data, instead of averaged over clients; three seeds."""
    where = ((NEAR_IID, 0.1), (NEAR_IID, 0.2), (SKEWED, 0.1), (EXTREME, 0.1))
    for seed, (split, keep_ratio), setup in product(
        range(3), where, ("start, Collective, estimated", "FedAvg, estimated")
    ):
        yield chosen(best, "MNIST", split, "plain, BatchNorm", setup, keep_ratio, seed)


def attention(best: BestRates) -> Iterator[Spec]:
    """The transformer with its attention whole; three seeds."""
    for seed, split in product(range(3), (NEAR_IID, SKEWED, EXTREME)):
        yield chosen(best, "MNIST", split, "transformer", WHOLE_ATTENTION, 0.1, seed)


def ratios(best: BestRates) -> Iterator[Spec]:
    """Keep ratio 0.05 and mixed ones."""
    for keep_ratio, setup, net in product((0.05, "mixed"), MAIN[1:], NETS):
        yield chosen(best, "MNIST", NEAR_IID, net, setup, keep_ratio, 0)


def long(best: BestRates) -> Iterator[Spec]:
    """Three times as many rounds, on the network with the most trouble."""
    for setup in MAIN:
        yield chosen(best, "MNIST", NEAR_IID, NETS[0], setup, 0.1, 0, 300)


PLANS: dict[str, Callable[[BestRates], Iterator[Spec]]] = {
    plan.__name__: plan
    for plan in (
        rates,
        half,
        skewed_rates,
        skew,
        fashion,
        seeds,
        more_seeds,
        others,
        matrices,
        momentum,
        averages,
        attention,
        ratios,
        long,
        systems,
    )
}


def ratio(setup: str, keep_ratio: KeepRatio) -> KeepRatio:
    """Return the keep ratio of a run: 1 for FedAvg, whose runs are the same for all keep ratios."""
    return 1.0 if setup.startswith("FedAvg") else keep_ratio


def chosen(
    best: BestRates,
    data: str,
    split: str,
    net: str,
    setup: str,
    keep_ratio: KeepRatio,
    seed: int,
    rounds: int = NUM_ROUNDS,
) -> Spec:
    """Return a run at the learning rate chosen for its setup."""
    lr = rate(best, split, net, setup, keep_ratio)
    return Spec(data, split, net, setup, ratio(setup, keep_ratio), lr, seed, rounds)


def rate(best: BestRates, split: str, net: str, setup: str, keep_ratio: KeepRatio) -> float:
    """Return the learning rate that was best for a setup; else for the main setup most like it, at keep ratio 0.1.

    Where none was tried on clients with that split, it is the one for nearly IID clients.
    """
    like = _most_like(setup)
    keys = [(where, net, like, ratio(like, 0.1)) for where in (split, NEAR_IID)]
    if setup in MAIN:
        keys.insert(0, (split, net, setup, ratio(setup, keep_ratio)))
    return next((best[key] for key in keys if key in best), RATES[net][0])


def _most_like(setup: str) -> str:
    """Return the main setup whose learning rates suit another one."""
    if setup in MAIN:
        return setup
    if "FedAvg" in setup or setup in (*OTHER_SYSTEMS, WHOLE_ATTENTION):
        return "FedAvg"
    if "default" in setup:
        return "default"
    return PLAIN if "start" in setup or "dense" in setup else "Collective"


def results() -> list[dict[str, Any]]:
    """Return all finished runs."""
    return read_runs(OUTPUT)


def best_rates() -> BestRates:
    """Return the best learning rates by validation accuracy on MNIST with seed 0, as far as runs are done.

    Runs at chance say nothing of their rate, so they do not count.
    """
    best: dict[tuple[str, str, str, KeepRatio], tuple[float, float]] = {}
    for run in results():
        if (run["data"], run["seed"], run["num_rounds"]) == ("MNIST", 0, NUM_ROUNDS) and final(run, "val") > CHANCE:
            key = (run["split"], run["net"], run["setup"], run["keep_ratio"])
            found = (final(run, "val"), run["lr"])
            best[key] = max(best.get(key, found), found)
    return {key: lr for key, (_, lr) in best.items()}


def final(run: Mapping[str, Any], part: str) -> float:
    """Return the mean accuracy of the last three evaluations on one part of the images; 0 for a failed run."""
    return 0.0 if run["error"] or not run[part] else mean(run[part][-3:])
