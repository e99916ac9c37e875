"""Patterns that match nothing are refused before the first round, whichever algorithm they are given to."""

from typing import Any

import pytest
from federation import Fit, seeded
from toy_models import LitSmall

import lightning_spectral as ls

BUFFER = r"`buffers` pattern 'nope' matches no buffer; known names: net\.1\.running_mean, "
PARAMETER = r"`exclude` pattern 'nope' matches no parameter"
UNMATCHED: dict[str, tuple[Any, str]] = {
    "FedAvg, buffers": (lambda *nope: ls.FedAvg(buffers=dict.fromkeys(nope, "server")), BUFFER),
    "Scaffold, buffers": (lambda *nope: ls.Scaffold(buffers=dict.fromkeys(nope, "server")), BUFFER),
    "StaleUpdates, buffers": (lambda *nope: ls.StaleUpdates(buffers=dict.fromkeys(nope, "server")), BUFFER),
    "FIARSE, buffers": (lambda *nope: ls.FIARSE(buffers=dict.fromkeys(nope, "server")), BUFFER),
    "LoRA, buffers": (lambda *nope: ls.LoRA(2, buffers=dict.fromkeys(nope, "server")), BUFFER),
    "WidthSharding, buffers": (lambda *nope: ls.WidthSharding(buffers=dict.fromkeys(nope, "server")), BUFFER),
    "Zampling, buffers": (lambda *nope: ls.Zampling(8, degree=2, buffers=dict.fromkeys(nope, "server")), BUFFER),
    "SpectralSharding, buffers": (
        lambda *nope: ls.SpectralSharding(
            layers=ls.LayerChoices(buffers=dict.fromkeys(nope, "server")), keep_ratio=0.5
        ),
        BUFFER,
    ),
    "FIARSE, exclude": (lambda *nope: ls.FIARSE(exclude=nope), PARAMETER),
    "Zampling, exclude": (lambda *nope: ls.Zampling(8, degree=2, exclude=nope), PARAMETER),
    "WidthSharding, exclude": (lambda *nope: ls.WidthSharding(exclude=nope), "`exclude` pattern 'nope' matches no"),
    "SpectralSharding, exclude": (lambda *nope: ls.SpectralSharding(exclude=nope), "`exclude` pattern 'nope'"),
}
# One that matches next to one that does not: each counts on its own.
MATCHING = {"buffers": "net.1.*", "exclude": "net.0*"}


@pytest.mark.parametrize("name", UNMATCHED)
def test_a_pattern_that_matches_nothing_is_refused(name: str) -> None:
    make, message = UNMATCHED[name]
    matching = MATCHING[name.partition(", ")[2]]
    for patterns in (["nope"], [matching, "nope"]):
        with pytest.raises(ValueError, match=message):
            bind(make(*patterns))
    bind(make(matching))


def bind(algorithm: Any) -> None:
    """Do what is done before the first round."""
    server = seeded(LitSmall)
    algorithm.check(server)
    algorithm.bind(server, algorithm.new_state(server, 0))


def test_a_fit_is_refused_before_its_first_round(data: Any, fit: Fit) -> None:
    with pytest.raises(ValueError, match=BUFFER):
        fit(seeded(LitSmall), data, algorithm=ls.FedAvg(buffers={"nope": "server"}))


def test_tables_of_costs_refuse_them_too() -> None:
    for table in (
        lambda: ls.cost_table(seeded(LitSmall), ls.Zampling(degree=2, buffers={"nope": "server"}), [2]),
        lambda: ls.cost_table(seeded(LitSmall), ls.LoRA(buffers={"nope": "server"}), [2]),
    ):
        with pytest.raises(ValueError, match=BUFFER):
            table()
