"""The runs of the study: a ladder of learning rates for each contender.

For most, it is then climbed on the mean of two seeds, and its best rate has a third one; and so has half of that rate,
where it is too large for one of them.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from statistics import mean
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))  # code that the studies share
from records import read_runs
from setups import (
    ALLOCATED,
    CLIPPED,
    CONVOLUTIONAL,
    ESTIMATED,
    FEW_LABELS,
    LARGE,
    NARROW,
    ONLY_ON,
    OTHER_SYSTEMS,
    SETUPS,
    WIDTH_AND_TERMS,
    KeepRatio,
)
from tasks import TIED

OUTPUT = Path("outputs/any_network")
NUM_ROUNDS = 100
NETS = ("plain, GroupNorm", "MLP", "plain, BatchNorm", "residual", "residual, zero init", "transformer")
NEAR_IID, SKEWED, EXTREME = "Dir(10 p)", "Dir(1 p)", "Dir(0.3 p)"
MAIN = ("FedAvg", "sharding")
LAYOUTS = ("Tucker factors", NARROW, WIDTH_AND_TERMS)
ALL_CLIENTS = ("FedAvg", f"{LARGE}FedAvg", NARROW)  # one network for all clients, or for some
WITH_ESTIMATES = tuple(setup for setup in SETUPS if setup.startswith(ESTIMATED))
TWO_CAPACITIES = ("sharding", "FedHM", "HeteroFL", "FedRolex")
MATRIX_MEANS = ("FedHM, spectral start", "FedHM, Tucker factors")  # FedHM with one part changed
IN_TIED_CASE = (  # those last that are far behind, or run on one network alone
    *(NARROW, "sharding", *MATRIX_MEANS, "FedHM", "FedAvg", f"{LARGE}FedAvg", "HeteroFL", "FedRolex"),
    *(*WITH_ESTIMATES, "sharding, attention whole"),
)
ON_ALL = "momentum on all terms: "  # a setup at 560c9efc and before
WITHDRAWN = (
    *("within reach, sharding", "small steps, sharding", "small steps, Tucker factors"),  # at db2d3938 and before
    *(f"{ON_ALL}{setup}" for setup in ("sharding", "FedHM, spectral start", f"{FEW_LABELS}sharding")),
)
HOOKED = tuple(f"{FEW_LABELS}{setup}" for setup in ("FedHM", NARROW, "FedAvg", "sharding"))
BOTH = ("averaging", "momentum")  # steps of the server
PUBLISHED = ("Collective, published", "TopN, published")
FIRST_RATE, ADAMW_RATE = 0.1, 0.004  # the rung on which a ladder begins, for SGD and for AdamW
TWO_SEEDS = (0, 1)
RUNGS = 5  # a ladder ends this many factors of two from there
LEARNS = 0.3  # accuracy of whatever learns at all; a ladder on which nothing does is climbed to both ends
TOO_LARGE = 0.03  # a rate is too large for a seed that ends so far below the one for which it is best


@dataclass(frozen=True)
class Spec:
    """One run.

    Attributes:
        data: Name of the data set.
        split: How the data are dealt.
        net: Name of the network.
        setup: Name of the algorithm.
        server: Name of the server's step.
        keep_ratio: Share of the terms, that of each half of the clients, or 1 for the whole model.
        lr: The clients' learning rate in the first round.
        seed: Seed of weights, split and draws.
        num_rounds: Number of rounds.
    """

    data: str
    split: str
    net: str
    setup: str
    server: str
    keep_ratio: KeepRatio
    lr: float
    seed: int
    num_rounds: int = NUM_ROUNDS

    @property
    def path(self) -> Path:
        """Where the result is written."""
        name = "_".join(str(value) for value in asdict(self).values())
        return OUTPUT / f"{''.join(c if c.isalnum() or c in '._-' else '-' for c in name)}.json"


def begin(
    split: str, net: str, setup: str, server: str, keep_ratio: KeepRatio = 0.1, data: str = "MNIST"
) -> Spec | None:
    """Return the first run of a ladder; ``None`` if the setup is not run on this network."""
    if net not in ONLY_ON.get(setup, (net,)):
        return None
    rate = ADAMW_RATE if net == "transformer" else FIRST_RATE
    return Spec(data, split, net, setup, server, 1.0 if setup.endswith("FedAvg") else keep_ratio, rate, seed=0)


def main(split: str) -> Iterator[Spec | None]:
    """The default and FedAvg, both with both steps of the server."""
    for net, setup, server in product(NETS, MAIN, BOTH):
        yield begin(split, net, setup, server)


def near_iid() -> Iterator[Spec | None]:
    """The main comparison, clients nearly IID."""
    return main(NEAR_IID)


def extreme() -> Iterator[Spec | None]:
    """The same, most clients with one or two labels."""
    return main(EXTREME)


def skewed() -> Iterator[Spec | None]:
    """The same in between."""
    return main(SKEWED)


def fifth() -> Iterator[Spec | None]:
    """The default at a keep ratio of 0.2."""
    for split, net, server in product((NEAR_IID, EXTREME), NETS, BOTH):
        yield begin(split, net, "sharding", server, 0.2)


def steps() -> Iterator[Spec | None]:
    """Other steps of the server."""
    cells = (*product((NEAR_IID, EXTREME), NETS[:1]), (EXTREME, NETS[2]), *product((NEAR_IID, EXTREME), NETS[-1:]))
    for (split, net), setup, server in product(cells, MAIN, ("exponential mean", "momentum, own norms")):
        yield begin(split, net, setup, server)


def papers() -> Iterator[Spec | None]:
    """The papers' recipe, whose server averages."""
    for split, net, setup in product((NEAR_IID, EXTREME), NETS, PUBLISHED):
        yield begin(split, net, setup, "averaging")


def parts() -> Iterator[Spec | None]:
    """The default with one part changed, where there is most to lose or to gain."""
    changed = [name for name in SETUPS if name.startswith("sharding, ") and name not in ALLOCATED]
    for (split, net), setup in product(((EXTREME, NETS[0]), (EXTREME, NETS[2]), (NEAR_IID, NETS[-1])), changed):
        yield begin(split, net, setup, "momentum")


def allocation() -> Iterator[Spec | None]:
    """Other numbers of terms in each layer, for the same bytes."""
    for keep_ratio, setup, net in product((0.1, 0.2), ALLOCATED, NETS):
        yield begin(NEAR_IID, net, setup, "momentum", keep_ratio)


def fashion() -> Iterator[Spec | None]:
    """The other data set."""
    for net, setup, server in product(NETS, MAIN, BOTH):
        yield begin(NEAR_IID, net, setup, server, data="Fashion")


def systems() -> Iterator[Spec | None]:
    """Other systems at the same share of the parameters."""
    for net, setup in product(NETS, OTHER_SYSTEMS):
        yield begin(NEAR_IID, net, setup, "averaging")


def layouts() -> Iterator[Spec | None]:
    """Other layouts of a sub-model, and a narrow network for all, at the same bytes."""
    for setup, net in product(LAYOUTS, CONVOLUTIONAL):
        yield begin(NEAR_IID, net, setup, "momentum")


def few_labels() -> Iterator[Spec | None]:
    """The hooks for clients with few labels, where most have one or two."""
    for setup, net in product(("FedAvg", "sharding", *LAYOUTS), CONVOLUTIONAL):
        yield begin(EXTREME, net, f"{FEW_LABELS}{setup}", "momentum")
    yield begin(EXTREME, NETS[0], CLIPPED, "momentum")


def tied() -> Iterator[Spec | None]:
    """Clients of two capacities, with other labels each; beside whole models, and one small one for all."""
    for net in NETS:
        yield begin(TIED, net, "sharding", "momentum")
    for setup, net in product(IN_TIED_CASE, NETS):
        yield begin(TIED, net, setup, "momentum", "0.1 and 0.4")


def tied_hooks() -> Iterator[Spec | None]:
    """The same with the hooks for clients with few labels."""
    for setup, net in product(HOOKED, NETS):
        yield begin(TIED, net, setup, "momentum", "0.1 and 0.4")
    yield begin(TIED, NETS[0], CLIPPED, "momentum", "0.1 and 0.4")


def untied() -> Iterator[Spec | None]:
    """The same where capacity does not go with labels."""
    for split, setup, net in product((NEAR_IID, EXTREME), (*ALL_CLIENTS, *TWO_CAPACITIES), NETS):
        yield begin(split, net, setup, "momentum", "0.1 and 0.4")


PLANS: dict[str, Callable[[], Iterator[Spec | None]]] = {
    plan.__name__: plan
    for plan in (
        near_iid,
        extreme,
        skewed,
        fifth,
        layouts,
        few_labels,
        steps,
        allocation,
        parts,
        papers,
        fashion,
        systems,
        tied,
        tied_hooks,
        untied,
    )
}
# plans whose ladders are of two seeds, and whose best rates have one more
THREE_SEEDS = ("tied", "tied_hooks", "near_iid", "extreme", "skewed", "fifth", "layouts", "few_labels")


def missing(plan: str) -> Iterator[Spec]:
    """Yield the runs of a plan that have no result, each when those before it have one."""
    starts = [start for start in PLANS[plan]() if start is not None]
    for start in starts:
        yield from climb(start)
    if plan in THREE_SEEDS:
        for start in starts:
            yield from climb(start, TWO_SEEDS)
            yield from further_seeds(start)


def further_seeds(start: Spec) -> Iterator[Spec]:
    """Yield a third seed at the best rate of a ladder, and at half of it where that is too large for one of them."""
    best = replace(start, lr=best_rate(start, TWO_SEEDS))
    others = [replace(best, seed=seed) for seed in (1, 2)]
    yield from (spec for spec in others if not spec.path.exists())
    ends = [final(run, "val") for spec in (best, *others) if (run := result(spec)) is not None]
    if ends and min(ends) < ends[0] - TOO_LARGE:
        halves = [replace(spec, lr=best.lr / 2) for spec in others]
        yield from (spec for spec in halves if not spec.path.exists())


def climb(start: Spec, seeds: Sequence[int] = (0,)) -> Iterator[Spec]:
    """Yield rungs of a ladder until both neighbours of the best one are worse in the mean of some seeds."""

    def missing_runs() -> Iterator[Spec]:
        rungs = rungs_to_try(start, seeds)
        return (run for rung in rungs for seed in seeds if not (run := replace(rung, seed=seed)).path.exists())

    while (run := next(missing_runs(), None)) is not None:
        yield run
        if not run.path.exists():  # another process trains it
            return


def rungs_to_try(start: Spec, seeds: Sequence[int] = (0,)) -> list[Spec]:
    """Return the best rung so far and its neighbours; all of them if that has learned nothing."""
    rungs, best = ladder(start), best_rate(start, seeds)
    run = result(replace(start, lr=best))
    if run is not None and final(run, "val") < LEARNS:
        return rungs
    return [rung for rate in (best, 2 * best, best / 2) for rung in rungs if rung.lr == rate]


def ladder(start: Spec) -> list[Spec]:
    """Return all rungs of a ladder, from the first one upwards and then downwards."""
    return [replace(start, lr=start.lr * 2.0**step) for step in (*range(RUNGS + 1), *range(-1, -RUNGS - 1, -1))]


def best_rate(start: Spec, seeds: Sequence[int] = (0,)) -> float:
    """Return the best learning rate of a ladder by the mean validation accuracy of seeds, so far as it was climbed."""
    found: dict[float, float] = {}
    for rung in ladder(start):
        runs = [run for seed in seeds if (run := result(replace(rung, seed=seed))) is not None]
        if len(runs) == len(seeds):
            found[rung.lr] = mean(final(run, "val") for run in runs)
    if not found and len(seeds) > 1:  # no rung has all seeds yet
        return best_rate(start, seeds[:1])
    return max(found, key=lambda rate: (found[rate], -abs(rate - start.lr)), default=start.lr)


def result(spec: Spec) -> dict[str, Any] | None:
    """Return the result of a run, if it has one."""
    return json.loads(spec.path.read_text()) if spec.path.exists() else None


def results() -> list[dict[str, Any]]:
    """Return all finished runs."""
    return read_runs(OUTPUT)


def reported(runs: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the runs at the best rate of their contender, if its ladder was climbed to its end."""
    by_contender: dict[tuple[Any, ...], list[Mapping[str, Any]]] = defaultdict(list)
    for run in runs:
        by_contender[contender(run)].append(run)
    return [run for one, own in by_contender.items() for run in at_best_rate(one, own)]


def at_best_rate(one: tuple[Any, ...], runs: Iterable[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """Return a contender's runs at its best rate, or at another one that is better in the mean of as many seeds."""
    data, split, net, setup, server, keep_ratio, num_rounds = one
    first = begin(split, net, setup, server, keep_ratio, data)
    if first is None or next(climb(start := replace(first, num_rounds=num_rounds)), None):
        return []
    at: dict[float, list[Mapping[str, Any]]] = defaultdict(list)
    for run in runs:
        at[run["lr"]].append(run)
    seeds = (0,) if next(climb(start, TWO_SEEDS), None) else TWO_SEEDS
    as_many = [own for own in at.values() if len(own) == len(at[best_rate(start, seeds)])]
    return max(as_many, key=lambda own: mean(final(run, "val") for run in own))


def contender(run: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return all that is the same on the rungs of a ladder."""
    return tuple(run[name] for name in ("data", "split", "net", "setup", "server", "keep_ratio", "num_rounds"))


def final(run: Mapping[str, Any], part: str) -> float:
    """Return the mean accuracy of the last three evaluations on one part of the images; 0 for a failed run."""
    return 0.0 if run["error"] or not run[part] else mean(run[part][-3:])
