"""Callbacks that would do nothing, without rounds, without a logger or with an interval of 0, say so."""

from typing import Any

import lightning.pytorch as pl
import pytest
from federation import Fit, seeded
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader
from toy_models import LitMLP

import lightning_spectral as ls

INTERVALS = [ls.plugin.callbacks.SpectralDiagnostics, ls.plugin.callbacks.UpdateAlignment]
OF_ROUNDS = [ls.RoundHistory, ls.CommunicationLedger, ls.RoundDashboard, *INTERVALS]


@pytest.mark.filterwarnings("ignore:RoundDashboard shows:lightning_spectral.SpectralWarning")
@pytest.mark.parametrize("callback", OF_ROUNDS)
def test_callbacks_of_rounds_warn_where_nothing_is_federated(callback: Any, toy: Any, quiet: Any) -> None:
    trainer = pl.Trainer(max_epochs=1, limit_train_batches=1, callbacks=[callback()], log_every_n_steps=1, **quiet)
    with pytest.warns(ls.SpectralWarning, match=f"{callback.__name__} acts on federated rounds, but LitMLP trains"):
        trainer.fit(seeded(LitMLP), DataLoader(toy, batch_size=8), DataLoader(toy, batch_size=60))
    callback().setup(trainer, seeded(LitMLP), "test")  # no fit, no rounds to miss


def test_a_dashboard_without_a_logger_that_can_hold_it_says_so(lit: Any, data: Any, fit: Fit, tmp_path: Any) -> None:
    with pytest.warns(ls.SpectralWarning, match="RoundDashboard shows .* the Trainer has no logger"):
        fit(lit, data, callbacks=[ls.RoundDashboard()])
    fit(lit, data, callbacks=[ls.RoundDashboard()], trainer={"logger": CSVLogger(tmp_path)})
    fit(lit, data, callbacks=[ls.RoundDashboard()], trainer={"fast_dev_run": True, "logger": CSVLogger(tmp_path)})


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        *((kind, "every_n_rounds") for kind in (ls.RoundDashboard, ls.ClientEvaluation, *INTERVALS)),
        (ls.ClientEvaluation, "clients"),
        (ls.plugin.callbacks.BatchNormEstimation, "max_batches"),
        (ls.plugin.callbacks.SampledNetworks, "num_samples"),
        (ls.plugin.callbacks.SampledNetworks, "every_n_validations"),
    ],
)
def test_intervals_and_numbers_are_at_least_one(kind: Any, name: str) -> None:
    with pytest.raises(ValueError, match=f"`{name}` must be at least 1, (or None, )?got 0"):
        kind(**{name: 0})
