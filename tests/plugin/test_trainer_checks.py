"""Settings of the Trainer that a federation cannot honour are refused before the first round."""

from typing import Any

import lightning.pytorch as pl
import pytest
from federation import Fit
from lightning.pytorch.tuner.tuning import Tuner

import lightning_spectral as ls


def test_the_tuner_is_refused_as_the_callback_that_it_adds(lit: Any, data: Any, quiet: Any) -> None:
    tuner = Tuner(pl.Trainer(max_epochs=1, **quiet))
    with pytest.raises(ValueError, match="BatchSizeFinder cannot act on a federation"):
        tuner.scale_batch_size(ls.FederatedModule(lit, clients_per_round=2), datamodule=data)


@pytest.mark.parametrize("number", [-1.5, 1.5, "2"])
def test_a_number_of_rounds_that_is_no_int(number: Any, lit: Any, data: Any, fit: Fit) -> None:
    with pytest.raises(TypeError, match=f"`max_epochs` must be an int, the number of rounds, .* got {number!r}"):
        fit(lit, data, max_epochs=number)
