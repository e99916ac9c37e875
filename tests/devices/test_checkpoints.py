"""Checkpoints written on the device: they resume there, load elsewhere, and what clients left does not fill a GPU."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from federation import Fit, same_state, seeded
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.utils._pytree import tree_leaves
from toy_models import LitSmall, Remembering

import lightning_spectral as ls

pytestmark = pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")
# with these, the server remembers clients
MEMORY: dict[str, Any] = {
    "store": Remembering(),
    "StaleUpdates": ls.StaleUpdates(),
    "StaleUpdates, terms": ls.StaleUpdates(num_terms=1),
    "Scaffold": ls.Scaffold(),
}
OTHERS: dict[str, Any] = {
    "SpectralSharding": ls.SpectralSharding(keep_ratio=0.5),
    "Zampling": ls.Zampling(compression=2, degree=3),
    "LoRA": ls.LoRA(2, train=["net.1.*"]),
    "FedBuff": ls.FedBuff(concurrency=3, max_staleness=2),
    "step widths": ls.WidthSharding(keep_ratio=0.8, step_widths=(0.4, 0.8), averages_per_width=True),
}


def lit() -> LitSmall:
    return seeded(LitSmall, momentum=0.0)


def every_round(folder: Path) -> ModelCheckpoint:
    return ModelCheckpoint(
        folder, "{epoch}", save_top_k=-1, auto_insert_metric_name=False, enable_version_counter=False
    )


SAVING = {"enable_checkpointing": True}


class Saved(pl.Callback):
    """Keeps what a checkpoint holds, before it is written."""

    def on_save_checkpoint(self, trainer: pl.Trainer, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        self.checkpoint = checkpoint


def ours(checkpoint: dict[str, Any]) -> Iterator[Tensor]:
    """The tensors that this package puts into a checkpoint, beside the algorithm's state, which is on the device."""
    own = {name: value for name, value in checkpoint.items() if name.startswith("federation")}
    lasting = own.pop("federation_lasting")
    models = [model.items() for model in lasting["models"].values()]
    parts = [value for parts in models for name, value in parts if name != "algorithm"]
    yield from (leaf for leaf in tree_leaves([own, parts, lasting["together"]]) if isinstance(leaf, Tensor))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", MEMORY)
def test_what_the_server_keeps_of_clients_is_on_the_cpu(
    name: str, data: Any, there: Fit, tmp_path: Path, device: Any
) -> None:
    saved = Saved()
    there(lit(), data, algorithm=MEMORY[name], callbacks=[saved, every_round(tmp_path)], trainer=SAVING)
    kept = list(ours(saved.checkpoint))
    assert len(kept) >= 3  # one for each client
    assert {tensor.device.type for tensor in kept} == {"cpu"}
    weights = saved.checkpoint["state_dict"]
    assert weights["net.0.weight"].device == device.torch  # or the test would show nothing


def test_what_a_sampler_knows_is_on_the_cpu(data: Any, there: Fit, tmp_path: Path) -> None:
    saved = Saved()
    model = ls.FederatedModule(lit(), participation=ls.LossVarianceReduced(active=4))
    there(model, data, callbacks=[saved, every_round(tmp_path)], trainer=SAVING)
    assert {tensor.device.type for tensor in ours(saved.checkpoint)} == {"cpu"}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", [*MEMORY, *OTHERS])
def test_a_resumed_run_is_the_uninterrupted_one(name: str, data: Any, there: Fit, tmp_path: Path) -> None:
    options = {"algorithm": {**MEMORY, **OTHERS}[name], "max_epochs": 3, "trainer": SAVING}
    whole = there(lit(), data, callbacks=[every_round(tmp_path)], **options)
    resumed = there(lit(), data, callbacks=[every_round(tmp_path)], ckpt_path=tmp_path / "0.ckpt", **options)
    assert same_state(resumed.tensors, whole.tensors)
    assert resumed.rows == whole.rows


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", [*MEMORY, *OTHERS])
def test_a_machine_without_the_device_goes_on(
    name: str, data: Any, fit: Fit, there: Fit, agree: Any, tmp_path: Path
) -> None:
    options = {"algorithm": {**MEMORY, **OTHERS}[name], "max_epochs": 2, "trainer": SAVING}
    whole = there(lit(), data, callbacks=[every_round(tmp_path)], **options)
    resumed = fit(lit(), data, callbacks=[every_round(tmp_path)], ckpt_path=tmp_path / "0.ckpt", **options)
    agree(resumed, whole)
    loaded = ls.plugin.load_user_module(tmp_path / "1.ckpt", LitSmall, map_location="cpu")
    assert same_state(loaded.state_dict(), resumed.state)  # which wrote the last round again
    assert torch.load(tmp_path / "1.ckpt", map_location="cpu", weights_only=True)["epoch"] == 1
