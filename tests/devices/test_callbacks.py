"""Callbacks and evaluation, with the module on the device."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from federation import Fit, seeded, without_seconds
from lightning.pytorch.loggers import CSVLogger
from slow_cases import slow_but
from torch.utils.data import TensorDataset
from toy_models import LitSmall

import lightning_spectral as ls
from lightning_spectral.report.runs import NAME, read_run

HALF = ls.SpectralSharding(keep_ratio={0.4: 0.5, 0.8: 0.5})
CALLBACKS: dict[str, tuple[ls.Algorithm, Callable[[], Sequence[pl.Callback]]]] = {
    "diagnostics and alignment": (
        HALF,
        lambda: [ls.plugin.callbacks.SpectralDiagnostics(), ls.plugin.callbacks.UpdateAlignment(every_n_rounds=1)],
    ),
    "alignment of whole models": (ls.FedAvg(), lambda: [ls.plugin.callbacks.UpdateAlignment(every_n_rounds=1)]),
    "client evaluation": (HALF, lambda: [ls.ClientEvaluation()]),
    "sampled networks": (
        ls.Zampling(compression=2, degree=3),
        lambda: [ls.plugin.callbacks.SampledNetworks(num_samples=2)],
    ),
    "batch norm estimation": (ls.WidthSharding(), lambda: [ls.plugin.callbacks.BatchNormEstimation()]),
    "lines": (HALF, lambda: [ls.plugin.callbacks.RoundLines()]),
}


@pytest.mark.parametrize("name", slow_but(CALLBACKS.keys() - {"alignment of whole models", "lines"}, CALLBACKS))
def test_callbacks_report_the_same(name: str, toy: TensorDataset, fit: Fit, there: Fit, agree: Any) -> None:
    algorithm, make = CALLBACKS[name]
    data = ls.FederatedDataModule(toy, ls.IIDPartitioner(6), val=toy, batch_size=4, client_val_fraction=0.2)
    agree(*(run(seeded(LitSmall), data, algorithm=algorithm, max_epochs=2, callbacks=make()) for run in (fit, there)))


def test_a_dashboard_writes_the_same_records(data: Any, fit: Fit, there: Fit, tmp_path: Path) -> None:
    for name, run in (("here", fit), ("there", there)):
        trainer = {"logger": CSVLogger(tmp_path, name=name, version=""), "log_every_n_steps": 1}
        dashboard = ls.RoundDashboard(every_n_rounds=1)
        run(seeded(LitSmall), data, algorithm=HALF, max_epochs=2, callbacks=[dashboard], trainer=trainer)
    here, there_ = (
        {name: sorted(by_round) for name, by_round in read_run(tmp_path / place / NAME).shown.items()}
        for place in ("here", "there")
    )
    assert here == there_ != {}


def test_evaluation_alone_is_the_same(data: Any, quiet: dict[str, Any], device: Any) -> None:
    model = ls.FederatedModule(seeded(LitSmall), algorithm=HALF, clients_per_round=4)
    options = {**quiet, "accelerator": "auto", **device.trainer()}
    for evaluate in ("validate", "test"):
        (here,) = getattr(pl.Trainer(**quiet), evaluate)(model, data, verbose=False)
        (there,) = getattr(pl.Trainer(**options), evaluate)(model, data, verbose=False)
        assert without_seconds(there) == pytest.approx(without_seconds(here), rel=1e-5)
