from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch.profilers import SimpleProfiler

import lightning_spectral as ls
from lightning_spectral.plugin.stages import PROFILED, action_name

ROUNDS, COHORT = 3, 4


def fit(lit: Any, data: Any, quiet: Any, profiler: Any, **options: Any) -> ls.RoundHistory:
    history = ls.RoundHistory()
    trainer = pl.Trainer(max_epochs=ROUNDS, callbacks=[history], profiler=profiler, **quiet, **options)
    model = ls.FederatedModule(lit, algorithm=ls.SpectralSharding(keep_ratio=0.5), clients_per_round=COHORT)
    trainer.fit(model, data)
    return history


def test_the_profiler_has_every_stage_by_name(lit: Any, data: Any, quiet: Any) -> None:
    profiler = SimpleProfiler()
    history = fit(lit, data, quiet, profiler)
    durations = {stage: profiler.recorded_durations[action_name(stage)] for stage in PROFILED}
    calls = {stage: len(of_stage) for stage, of_stage in durations.items() if stage != "plan"}
    assert calls == {
        "refresh": ROUNDS,
        **dict.fromkeys(("sample", "load", "train"), ROUNDS * COHORT),
        "aggregate": ROUNDS * (COHORT + 1),  # each client's update, then the sums of all processes
        "apply": 2 * ROUNDS,  # the mean, then the server's step
        "validate": ROUNDS,  # not the check before the first round
    }
    assert len(durations["plan"]) >= ROUNDS
    for stage in ("refresh", "sample", "load", "train", "aggregate"):  # the profiler is within the engine's own clock
        assert 0 < sum(durations[stage]) <= sum(history.column(f"fl/seconds_{stage}")), stage
        assert sum(durations[stage]) > 0.5 * sum(history.column(f"fl/seconds_{stage}")), stage
    assert "[Federated]validate" in profiler.summary()


@pytest.mark.parametrize("profiler", ["simple", "advanced"])
def test_profilers_by_name(profiler: str, lit: Any, data: Any, quiet: Any) -> None:
    fit(lit, data, quiet, profiler)


def test_a_profiler_goes_on_after_a_validation_that_failed(lit_mlp: Any, data: Any, quiet: Any) -> None:
    class Failing(lit_mlp):  # type: ignore[misc]
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            raise KeyError("no")

    profiler = SimpleProfiler()
    with pytest.raises(KeyError):
        fit(Failing(), data, quiet, profiler, num_sanity_val_steps=0)
    fit(lit_mlp(), data, quiet, profiler)
    assert len(profiler.recorded_durations[action_name("validate")]) == 1 + ROUNDS
