"""Settings of the Trainer that a federation cannot honour are refused before the first round."""

from typing import Any

import lightning.pytorch as pl
import pytest
from federation import Fit
from lightning.pytorch.callbacks import BatchSizeFinder, LearningRateFinder, ModelPruning
from lightning.pytorch.tuner.tuning import Tuner

import lightning_spectral as ls


@pytest.mark.parametrize(
    ("callback", "remedy"),
    [
        (BatchSizeFinder(), r"set FederatedDataModule\(batch_size="),
        (LearningRateFinder(), "set that of clients in `configure_optimizers`"),
        (ModelPruning("l1_unstructured", amount=0.5), "prune the trained module after the fit"),
    ],
)
def test_a_callback_that_cannot_be_honoured(callback: Any, remedy: str, lit: Any, data: Any, fit: Fit) -> None:
    with pytest.raises(ValueError, match=f"`{type(callback).__name__}` cannot be used with a federation: .*{remedy}"):
        fit(lit, data, callbacks=[callback])


def test_the_tuner_is_refused_as_the_callback_that_it_adds(lit: Any, data: Any, quiet: Any) -> None:
    tuner = Tuner(pl.Trainer(max_epochs=1, **quiet))
    with pytest.raises(ValueError, match="`BatchSizeFinder` cannot be used with a federation"):
        tuner.scale_batch_size(ls.FederatedModule(lit, clients_per_round=2), datamodule=data)


@pytest.mark.parametrize("number", [-1.5, 1.5, "2"])
def test_a_number_of_rounds_that_is_no_int(number: Any, lit: Any, data: Any, fit: Fit) -> None:
    with pytest.raises(TypeError, match=f"`max_epochs` must be an int, the number of rounds, .* got {number!r}"):
        fit(lit, data, max_epochs=number)
