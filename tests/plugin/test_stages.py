import copy
from functools import partial
from typing import Any

import pytest
from federation import Fit, same_state
from lightning.pytorch.profilers import PyTorchProfiler, SimpleProfiler
from toy_models import variant

import lightning_spectral as ls
from lightning_spectral.plugin.trainer import STAGE
from lightning_spectral.protocol.records import STAGES

ROUNDS, COHORT = 3, 4
PROFILED = ("plan", *STAGES, "validate")


@pytest.fixture
def fit(fit: Fit) -> Fit:
    return partial(fit, algorithm=ls.SpectralSharding(keep_ratio=0.5), clients_per_round=COHORT, max_epochs=ROUNDS)


def test_the_profiler_has_every_stage_by_name(lit: Any, data: Any, fit: Fit) -> None:
    profiler = SimpleProfiler()
    history = fit(lit, data, trainer={"profiler": profiler, "num_sanity_val_steps": 2}).history
    durations = {stage: profiler.recorded_durations[STAGE(stage)] for stage in PROFILED}
    assert {stage: len(of_stage) for stage, of_stage in durations.items() if stage != "plan"} == {
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


@pytest.mark.sampled(1)
@pytest.mark.parametrize("profiler", ["simple", "advanced"])
def test_profilers_by_name(profiler: str, lit: Any, data: Any, fit: Fit, caplog: pytest.LogCaptureFixture) -> None:
    fit(lit, data, trainer={"profiler": profiler})
    assert [stage for stage in PROFILED if STAGE(stage) not in caplog.text] == []


def test_a_profiler_still_works_after_a_failed_validation(lit_mlp: Any, data: Any, fit: Fit) -> None:
    def validation_step(self: Any, batch: Any, batch_idx: int) -> None:
        raise KeyError("no such metric")

    profiler = SimpleProfiler()
    with pytest.raises(KeyError, match="no such metric"):
        fit(variant(lit_mlp, validation_step=validation_step)(), data, trainer={"profiler": profiler})
    fit(lit_mlp(), data, trainer={"profiler": profiler})
    assert len(profiler.recorded_durations[STAGE("validate")]) == 1 + ROUNDS


@pytest.mark.filterwarnings("ignore:.*[pP]rofiler")
def test_torchs_profiler_records_a_federation(lit: Any, data: Any, fit: Fit, capfd: Any, tmp_path: Any) -> None:
    profiler = PyTorchProfiler(tmp_path, export_to_chrome=False, record_module_names=True)
    options = {"profiler": profiler, "num_sanity_val_steps": 1}
    short: dict[str, Any] = {"max_epochs": 1, "clients_per_round": 2}
    assert same_state(fit(copy.deepcopy(lit), data, trainer=options, **short).state, fit(lit, data, **short).state)
