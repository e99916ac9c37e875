"""A run without an example traces no pass: whoever was shown another plan is told, and so is the run's log."""

import logging
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from federation import Fit
from toy_models import Detour, LitSmall

import lightning_spectral as ls

X = torch.zeros(2, 3)
DENSE_ENDS = ls.LayerChoices(exclude=["head", "stem", "unused"])


def notes(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return [line for line in capsys.readouterr().out.splitlines() if line.startswith("NOTE")]


def test_validate_notes_that_a_run_would_make_another_plan(capsys: pytest.CaptureFixture[str]) -> None:
    module = Detour()
    plan = ls.validate(module, X)
    run = ls.SpectralSharding().plan(module)
    assert list(plan.sharded) == ["mid.0"]
    assert list(run.sharded) == ["mid.0", "unused"]
    (note,) = notes(capsys)
    assert "has no `example_input_array`, so a run traces no pass and would shard unused." in note
    assert "SpectralSharding(layers=plan)" in note
    assert ls.SpectralSharding(layers=plan).plan(module) is plan


def test_nothing_is_noted_where_a_run_makes_the_same_plan(capsys: pytest.CaptureFixture[str]) -> None:
    module = Detour()
    ls.validate(module)
    ls.validate(module, X, layers=DENSE_ENDS)
    ls.validate(module, layers=ls.validate(module, X, layers=DENSE_ENDS))
    module.example_input_array = X  # type: ignore[assignment]
    ls.validate(module)
    ls.validate(module, torch.ones(2, 3))
    assert notes(capsys) == []


def test_costs_are_those_of_the_plan_of_a_run() -> None:
    """Which knows no example but the module's own."""

    def parameters(**options: Any) -> int:
        return ls.cost_table(Detour(), ls.SpectralSharding(**options), [0.25], X).at[0.25].parameters

    assert parameters() == parameters(layers=ls.nn.plan_layers(Detour()))
    assert parameters() < parameters(layers=ls.validate(Detour(), X))  # in which the unused layer is dense


class TestInAFit:
    @pytest.fixture
    def planned(self, data: Any, fit: Fit, caplog: pytest.LogCaptureFixture) -> Any:
        caplog.set_level(logging.INFO)

        def planned(lit: pl.LightningModule, **options: Any) -> list[str]:
            caplog.clear()
            fit(lit, data, algorithm=ls.SpectralSharding(keep_ratio=0.5, **options))
            return [line.getMessage() for line in caplog.records if "planned" in line.getMessage()]

        return planned

    @pytest.mark.parametrize("start", [None, ls.algorithms.SpectralStart()])
    def test_the_log_says_what_a_plan_without_an_example_assumes(self, start: Any, lit: Any, planned: Any) -> None:
        assert planned(lit, spectral_start=start) == [
            "LitMLP has no `example_input_array`, so its layers were planned without a forward pass, as if all of them "
            "ran, in the order of registration; first and last, and so dense: net.0, net.5."
        ]

    def test_nothing_is_said_of_a_plan_with_an_example(self, lit: Any, planned: Any) -> None:
        assert planned(LitSmall()) == []
        assert planned(lit, layers=ls.validate(lit, torch.zeros(1, 6))) == []
