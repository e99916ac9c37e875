"""Precisions, samplers, server optimizers, hooks, faults, callbacks and evaluation, each as on the CPU."""

import itertools
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import launched_run
import lightning.pytorch as pl
import pytest
import torch
from federation import Fit, same_state, seeded, without_seconds
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins import MixedPrecision
from torch import nn
from torch.utils.data import TensorDataset
from toy_models import LitNet, LitSmall, variant

import lightning_spectral as ls
from lightning_spectral.client import captured_loop
from lightning_spectral.report.runs import NAME, read_run

HALF = ls.SpectralSharding(keep_ratio=0.5)
BITS, NORM = ls.Zampling(compression=2, degree=3), ["net.1.*"]
SETTINGS: dict[str, dict[str, Any]] = {
    "FedAvgM": {"server_optimizer": ls.FedAvgM()},
    "FedAdam": {"server_optimizer": ls.FedAdam()},
    "FedYogi, spectral": {"server_optimizer": ls.FedYogi(), "algorithm": HALF},
    "FedAdagrad, bits": {"server_optimizer": ls.FedAdagrad(), "algorithm": BITS},
    "Uniform": {"participation": ls.Uniform(active=4)},
    "RoundRobin": {"participation": ls.RoundRobin(active=4)},
    "FullParticipation": {"participation": ls.FullParticipation(), "algorithm": HALF},
    "LossVarianceReduced": {"participation": ls.LossVarianceReduced(active=4)},
    "UpdateVarianceReduced": {"participation": ls.UpdateVarianceReduced(active=4), "algorithm": HALF},
    "StaleUpdateVarianceReduced": {
        "participation": ls.StaleUpdateVarianceReduced(active=4),
        "algorithm": ls.StaleUpdates(),
    },
    "ProximalTerm and GradientClip": {
        "local_hooks": [ls.ProximalTerm(0.1), ls.GradientClip(0.1)],
        "algorithm": HALF,
    },
    "MaskedLogits": {"local_hooks": [ls.MaskedLogits("net.6")], "algorithm": HALF},
    "ClientDropout": {"dropout": ls.ClientDropout(0.4)},
    "VirtualClock": {"clock": ls.VirtualClock(ls.simulation.DeviceProfile(1e6, 1e6, 1e6)), "algorithm": HALF},
    "no training": {"local_epochs": 0, "algorithm": HALF},
}
ALGORITHMS = {"dense": ls.FedAvg(), "spectral": HALF, "bits": BITS, "adapters": ls.LoRA(2, train=NORM)}


def options_of(name: str) -> dict[str, Any]:
    by_default = {} if "participation" in SETTINGS[name] else {"clients_per_round": 4}
    return {**by_default, **SETTINGS[name]}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", SETTINGS)
def test_a_setting_is_the_same(name: str, data: Any, fit: Fit, there: Fit, agree: Any) -> None:
    models = [ls.FederatedModule(seeded(LitSmall), **options_of(name)) for _ in range(2)]
    agree(*(run(model, data, max_epochs=2) for run, model in zip((fit, there), models, strict=True)))


PRECISIONS = list(itertools.product(["64-true", "bf16-true"], ALGORITHMS))


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("precision", "name"), PRECISIONS)
def test_a_precision_is_the_same(
    precision: str, name: str, data: Any, fit: Fit, there: Fit, agree: Any, device: Any
) -> None:
    if precision == "bf16-true" and not device.is_pretended:
        pytest.skip("a GPU rounds to bfloat16 elsewhere")
    options: dict[str, Any] = {"algorithm": ALGORITHMS[name], "trainer": {"precision": precision}}
    agree(*(run(seeded(LitSmall), data, **options) for run in (fit, there)))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["dense", "spectral", "adapters"])
def test_mixed_precision_trains(name: str, data: Any, there: Fit, device: Any) -> None:
    """On the CPU the numbers differ: autocast casts other operations there."""
    before = seeded(LitSmall).net[0].weight
    mixed = {"plugins": [MixedPrecision("bf16-mixed", device.torch.type)]}  # Lightning's own is for CPU and CUDA
    after = there(seeded(LitSmall), data, algorithm=ALGORITHMS[name], trainer=mixed).module.net[0].weight
    assert after.dtype == torch.float32
    assert bool(torch.isfinite(after).all())
    assert not torch.equal(after.cpu(), before)


RATIOS = ls.SpectralSharding(keep_ratio={0.4: 0.5, 0.8: 0.5})
CALLBACKS: dict[str, tuple[ls.Algorithm, Callable[[], Sequence[pl.Callback]]]] = {
    "diagnostics and alignment": (
        RATIOS,
        lambda: [ls.plugin.callbacks.SpectralDiagnostics(), ls.plugin.callbacks.UpdateAlignment(every_n_rounds=1)],
    ),
    "alignment of whole models": (ls.FedAvg(), lambda: [ls.plugin.callbacks.UpdateAlignment(every_n_rounds=1)]),
    "client evaluation": (RATIOS, lambda: [ls.ClientEvaluation()]),
    "sampled networks": (
        ls.Zampling(compression=2, degree=3),
        lambda: [ls.plugin.callbacks.SampledNetworks(num_samples=2)],
    ),
    "batch norm estimation": (ls.WidthSharding(), lambda: [ls.plugin.callbacks.BatchNormEstimation()]),
    "lines": (RATIOS, lambda: [ls.plugin.callbacks.RoundLines()]),
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", CALLBACKS)
def test_callbacks_report_the_same(name: str, toy: TensorDataset, fit: Fit, there: Fit, agree: Any) -> None:
    algorithm, make = CALLBACKS[name]
    data = ls.FederatedDataModule(toy, ls.IIDPartitioner(6), val=toy, batch_size=4, client_val_fraction=0.2)
    agree(*(run(seeded(LitSmall), data, algorithm=algorithm, max_epochs=2, callbacks=make()) for run in (fit, there)))


@pytest.mark.slow
def test_a_dashboard_writes_the_same_records(data: Any, fit: Fit, there: Fit, tmp_path: Path) -> None:
    for name, run in (("here", fit), ("there", there)):
        trainer = {"logger": CSVLogger(tmp_path, name=name, version=""), "log_every_n_steps": 1}
        dashboard = ls.RoundDashboard(every_n_rounds=1)
        run(seeded(LitSmall), data, algorithm=RATIOS, max_epochs=2, callbacks=[dashboard], trainer=trainer)
    here, there_ = (
        {name: sorted(by_round) for name, by_round in read_run(tmp_path / place / NAME).shown.items()}
        for place in ("here", "there")
    )
    assert here == there_ != {}


def test_evaluation_alone_is_the_same(data: Any, quiet: dict[str, Any], device: Any) -> None:
    model = ls.FederatedModule(seeded(LitSmall), algorithm=RATIOS, clients_per_round=4)
    options = {**quiet, "accelerator": "auto", **device.trainer()}
    for evaluate in ("validate", "test"):
        (here,) = getattr(pl.Trainer(**quiet), evaluate)(model, data, verbose=False)
        (there,) = getattr(pl.Trainer(**options), evaluate)(model, data, verbose=False)
        assert without_seconds(there) == pytest.approx(without_seconds(here), rel=1e-5)


@pytest.mark.parametrize("algorithm", [ls.FedAvg(), RATIOS, ls.LoRA(rank=2)], ids=repr)
def test_captured_passes_have_the_bits_of_passes(
    algorithm: Any, data: Any, there: Fit, device: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lit() -> Any:  # without metrics, which count in Python
        layers = nn.Linear(6, 12), nn.Dropout(0.2), nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 3)
        kind: Any = variant(LitNet, validation_step=lambda module, batch, batch_idx: None)
        return kind(nn.Sequential(*layers), momentum=0.9, example=torch.zeros(2, 6))

    def trained(capture: bool) -> Any:
        return there(seeded(lit), data, algorithm=algorithm, max_epochs=4, capture=capture)

    monkeypatch.setattr("lightning_spectral.client.device.WATCHED_ROUNDS", 1)
    if device.is_pretended:
        with pytest.raises(ValueError, match=r"`capture=True` replays kernels of a CUDA device .* got pretend;"):
            trained(capture=True)
        return
    graphs, cuda_graph = list[Any](), captured_loop.cuda_graph
    noted = staticmethod(lambda call: graphs.append(cuda_graph(call)) or graphs[-1])
    monkeypatch.setattr(captured_loop.CapturedLoop, "capture", noted)
    assert same_state(trained(capture=True).tensors, trained(capture=False).tensors)
    assert graphs


@pytest.mark.slow
def test_processes_that_share_a_device_train_as_one(device: Any, tmp_path: Path) -> None:
    name = "pretended" if device.is_pretended else "cuda"
    command = [sys.executable, launched_run.__file__, str(tmp_path / "weights"), "2", "1", "1", name]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    two = torch.load(tmp_path / "weights", weights_only=True)
    _, one = launched_run.trained(**device.trainer())
    assert one.keys() == two.keys()
    assert all(torch.equal(one[key], two[key]) for key in one)
