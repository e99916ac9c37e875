"""The accuracy of systems at about the same share of the parameters, and their costs for a client."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from statistics import mean
from typing import Any

from plans import NETS, final
from setups import EXAMPLES, OTHER_SYSTEMS, OWN_ROUNDS, algorithm_of
from tasks import NETS as NETWORKS

import lightning_spectral as ls

ROWS = ("sharding", "TopN, published", *OTHER_SYSTEMS)
KEEP_RATIO = 0.1
Run = Mapping[str, Any]


def system_rows(runs: Sequence[Run], dense: Mapping[str, Run]) -> dict[str, list[str]]:
    """Return a row for each system, with a cell for each network; empty where it was not run.

    Args:
        runs: One run for each system and network.
        dense: The run of federated averaging on each network.
    """
    found = {(run["setup"], run["net"]): run for run in runs}
    cells = {setup: [_cell(found.get((setup, net)), dense.get(net)) for net in NETS] for setup in ROWS}
    return {setup: own for setup, own in cells.items() if any(own)}


def _cell(run: Run | None, dense: Run | None) -> str:
    """Format test accuracy (bytes of a turn, multiplications of a pass), both costs in per cent of FedAvg's."""
    if run is None or dense is None or run["error"]:
        return ""
    share = _turn(run) / _turn(dense)
    return f"{100 * final(run, 'test'):.1f} ({share:.0%}, {share_of_macs(run['net'], run['setup']):.0%})"


def _turn(run: Run) -> float:
    return mean(run["bytes_per_turn"].values())


@cache
def share_of_macs(net: str, setup: str) -> float:
    """Return the multiplications of one forward pass of a client's model, as a share of the whole model's."""
    module = NETWORKS[net]()
    algorithm: Any = ls.SpectralSharding(keep_ratio=2 * KEEP_RATIO)  # FeDLRT's augmented bases: twice the terms
    if setup not in OWN_ROUNDS:
        algorithm = algorithm_of(setup, KEEP_RATIO, module)
    capacity = algorithm.max_rank if isinstance(algorithm, ls.LoRA) else algorithm.keep_ratio
    table = ls.cost_table(module, algorithm, [capacity], EXAMPLES)
    (cost,) = table.at.values()
    return table.share("macs", cost)
