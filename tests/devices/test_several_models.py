"""Several models in one federation, on the device."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from federation import Fitted, seeded
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.utils.data import TensorDataset
from toy_models import LitSmall

import lightning_spectral as ls

PAIRS: dict[str, tuple[Any, Any]] = {
    "dense and spectral": (ls.FedAvg(), ls.SpectralSharding(keep_ratio=0.5, spectral_start=None)),
    "bits and width": (ls.Zampling(compression=2, degree=3), ls.WidthSharding()),
    "stale and SCAFFOLD": (ls.StaleUpdates(), ls.Scaffold()),
}
SAMPLERS = {
    "uniform": ls.Uniform(active=4),
    "by losses": ls.LossVarianceReduced(active=4),
    "by updates": ls.UpdateVarianceReduced(active=4),
}
Run = Callable[..., Fitted]


class FittedTogether(Fitted):
    """A fit of several models."""

    model: Any

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Those of every model."""
        members, rest = self.model.members, (self.trainer, self.history, self.ledger)
        of_models = {name: Fitted(one, *rest) for name, one in members.items()}
        return {f"{name}.{own}": tensor for name, one in of_models.items() for own, tensor in one.tensors.items()}


@pytest.fixture
def run(toy: TensorDataset, quiet: dict[str, Any]) -> Run:
    def run(algorithms: tuple[Any, Any], participation: Any, *callbacks: pl.Callback, **options: Any) -> Any:
        data = ls.FederatedDataModule(toy, ls.IIDPartitioner(num_clients=12), val=toy, batch_size=4)
        models = {
            name: ls.FederatedModule(seeded(LitSmall, momentum=0.0), algorithm=algorithm)
            for name, algorithm in zip(("words", "images"), algorithms, strict=True)
        }
        model, history = ls.MultiModelModule(models, participation=participation), ls.RoundHistory()
        trainer = pl.Trainer(
            **{**quiet, "num_sanity_val_steps": 0, **options}, max_epochs=2, callbacks=[history, *callbacks]
        )
        trainer.fit(model, ls.MultiModelDataModule({name: data for name in models}))
        return FittedTogether(model, trainer, history, ls.CommunicationLedger())

    return run


# bits have no norm
CASES = [case for case in itertools.product(PAIRS, SAMPLERS) if case != ("bits and width", "by updates")]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("pair", "sampler"), CASES)
def test_two_models_are_the_same(pair: str, sampler: str, run: Run, device: Any, agree: Any) -> None:
    agree(
        *(
            run(PAIRS[pair], SAMPLERS[sampler], **options)
            for options in ({}, {"accelerator": "auto", **device.trainer()})
        )
    )


@pytest.mark.slow
def test_what_is_kept_of_clients_of_every_model_is_on_the_cpu(run: Run, device: Any, tmp_path: Path) -> None:
    options = {"accelerator": "auto", **device.trainer(), "enable_checkpointing": True}
    run(PAIRS["stale and SCAFFOLD"], ls.Uniform(active=8), ModelCheckpoint(tmp_path, "last"), **options)
    saved = torch.load(tmp_path / "last.ckpt", weights_only=True)
    models = saved["federation_lasting"]["models"]
    kept = [*models["words"]["stored clients"]["entries"], *models["images"]["client states"]["entries"]]
    assert {entries["model"] for entries in kept} == {"words", "images"}
    assert {tensor.device.type for entries in kept for tensor in entries["tensors"].values()} == {"cpu"}
