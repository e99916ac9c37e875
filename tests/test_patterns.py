"""Patterns that match nothing are refused before the first round, whichever algorithm they are given to."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from federation import Fit, seeded
from toy_models import LitSmall

import lightning_spectral as ls

ALGORITHMS: dict[str, Callable[..., Any]] = {
    **{cls.__name__: cls for cls in (ls.FedAvg, ls.Scaffold, ls.StaleUpdates, ls.FIARSE, ls.WidthSharding)},
    "LoRA": partial(ls.LoRA, 2),
    "Zampling": partial(ls.Zampling, 8, degree=2),
    "SpectralSharding": lambda **choices: ls.SpectralSharding(keep_ratio=0.5, layers=ls.LayerChoices(**choices)),
}
EXCLUDING = ("FIARSE", "Zampling", "WidthSharding", "SpectralSharding")
BUFFER = r"`buffers` pattern 'nope' matches no buffer; known names: net\.1\.running_mean, "


def bind(algorithm: Any) -> None:
    """Do what is done before the first round."""
    server = seeded(LitSmall)
    algorithm.check(server)
    algorithm.bind(server, algorithm.new_state(server, 0))


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_pattern_that_matches_nothing_is_refused_also_next_to_one_that_does(name: str) -> None:
    make, server = ALGORITHMS[name], "server"
    for buffers in ({"nope": server}, {"net.1.*": server, "nope": server}):
        with pytest.raises(ValueError, match=BUFFER):
            bind(make(buffers=buffers))
    bind(make(buffers={"net.1.*": server}))
    if name in EXCLUDING:
        what = "parameter" if name in ("FIARSE", "Zampling") else "layer"
        for exclude in (["nope"], ["net.0*", "nope"]):
            with pytest.raises(ValueError, match=f"`exclude` pattern 'nope' matches no {what}"):
                bind(make(exclude=exclude))
        bind(make(exclude=["net.0*"]))


def test_a_fit_and_tables_of_costs_refuse_them_too(data: Any, fit: Fit) -> None:
    with pytest.raises(ValueError, match=BUFFER):
        fit(seeded(LitSmall), data, algorithm=ls.FedAvg(buffers={"nope": "server"}))
    for algorithm in (ls.Zampling(degree=2, buffers={"nope": "server"}), ls.LoRA(buffers={"nope": "server"})):
        with pytest.raises(ValueError, match=BUFFER):
            ls.cost_table(seeded(LitSmall), algorithm, [2])
