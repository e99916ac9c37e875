"""Five hundred rounds leave nothing behind: no tensor, no object, no open file, no growing memory."""

import gc
import os
from pathlib import Path
from typing import Any, NamedTuple

import lightning.pytorch as pl
import pytest
import torch
from observed_runs import acting
from torch import nn
from torch.utils.data import TensorDataset
from toy_models import LitNet, cross_entropy

import lightning_spectral as ls

ROUNDS, FROM = 500, 100  # sub-models and caches, built in the first rounds, are kept
FAST, SLOW = ls.simulation.DeviceProfile(1e6, 1e6, 1e9), ls.simulation.DeviceProfile(1.0, 1.0, 1.0)


def flaky() -> LitNet:
    """A module of about 130 kB; training fails if a feature is infinite."""

    def loss(lit: Any, batch: Any) -> Any:
        if bool(torch.isinf(batch[0]).any()):
            raise RuntimeError("the sensor is broken")
        lit.log("train_loss", value := cross_entropy(lit, batch))
        return value

    layers = nn.Linear(8, 128), nn.ReLU(), nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 2)
    return LitNet(nn.Sequential(*layers), lr=0.01, momentum=0.9, loss=loss)


class Held(NamedTuple):
    """What the process holds."""

    tensor_bytes: int
    num_objects: int
    open_files: int
    resident_bytes: int


def held() -> Held:
    gc.collect()
    objects = gc.get_objects()
    storages = {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in objects if type(t) is torch.Tensor
    }
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return Held(
        sum(storages.values()), len(objects), len(os.listdir("/proc/self/fd")), pages * os.sysconf("SC_PAGE_SIZE")
    )


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads the memory of a Linux process")
@pytest.mark.filterwarnings("ignore::lightning_spectral.SpectralWarning")  # one client fails whenever it takes part
def test_five_hundred_rounds_leave_nothing_behind(tmp_path: Path) -> None:
    seen: dict[int, Held] = {}

    def note(trainer: pl.Trainer, model: Any, summary: Any) -> None:
        if summary.round_idx + 1 in (FROM, ROUNDS):
            seen[summary.round_idx + 1] = held()

    x = torch.randn(160, 8)
    x[:16] = torch.inf  # the first client's
    data = ls.FederatedDataModule(
        TensorDataset(x, torch.arange(160) % 2), ls.NaturalPartitioner([i // 16 for i in range(160)]), batch_size=8
    )
    module = flaky()
    model = ls.FederatedModule(
        module,
        algorithm=ls.SpectralSharding(keep_ratio={0.1: 0.5, 0.2: 0.5}),
        clients_per_round=4,
        faults=ls.Faults(on_error=ls.LeaveOut()),
        dropout=ls.ClientDropout(0.2),
        clock=ls.VirtualClock({FAST: 0.8, SLOW: 0.2}, deadline=10.0, keep_first=3),
    )
    trainer = pl.Trainer(
        max_epochs=ROUNDS,
        accelerator="cpu",
        logger=False,
        default_root_dir=tmp_path,
        callbacks=[acting(on_round_end=note)],
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, data)
    early, late = seen[FROM], seen[ROUNDS]
    assert late.open_files == early.open_files
    model_bytes = sum(parameter.nbytes for parameter in module.parameters())
    # after a failure there is no sub-model of that ratio for a while: less than one model either way
    assert abs(late.tensor_bytes - early.tensor_bytes) < model_bytes
    # less than one object, and less than a tenth of a model, for each round that went by
    assert late.num_objects - early.num_objects < ROUNDS - FROM
    assert late.resident_bytes - early.resident_bytes < (ROUNDS - FROM) * model_bytes / 10
