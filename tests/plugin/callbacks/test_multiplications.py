"""The multiplications of a round, counted by hand, and what happens if they cannot be counted."""

from __future__ import annotations

from typing import Any

import pytest
from federation import Fit, same_state, seeded
from torch import nn
from toy_models import LitMLP, LitNet, toy_examples

import lightning_spectral as ls
from lightning_spectral.plugin.callbacks import Multiplications

SHARDING = ls.SpectralSharding(keep_ratio={0.25: 0.5, 0.5: 0.5})
WIDTH = 12
TERMS = {0.25: 3, 0.5: 6}


def by_hand(keep_ratio: float) -> int:
    """Of one example: the first and last layers are whole, and the middle one has two factors."""
    middle = WIDTH * WIDTH if keep_ratio == 1 else TERMS[keep_ratio] * 2 * WIDTH
    return 6 * WIDTH + middle + WIDTH * 3


@pytest.mark.parametrize("algorithm", [ls.FedAvg(), SHARDING], ids=["whole", "sharded"])
def test_training_takes_three_forward_passes_of_every_clients_sub_model(fit: Fit, algorithm: Any) -> None:
    data = ls.FederatedDataModule(toy_examples(60), ls.DirichletPartitioner(num_clients=8, alpha=1.0), batch_size=4)
    options: dict[str, Any] = {"algorithm": algorithm, "local_epochs": 2, "max_epochs": 3}
    counted = fit(LitMLP(), data, callbacks=[Multiplications()], **options)
    for round_idx, row in enumerate(counted.history.rows):
        turns = [turn for turn in counted.ledger.rows if turn.round_idx == round_idx]
        sizes = data.partition.sizes
        expected = sum(3 * 2 * int(sizes[turn.client_id]) * by_hand(turn.keep_ratio) for turn in turns)
        assert row["fl/multiplications"] == expected
    assert len(counted.history.rows) == 3


def test_counting_changes_no_bit_of_a_run(fit: Fit, data: Any) -> None:
    options: dict[str, Any] = {"algorithm": SHARDING, "max_epochs": 2}
    one, other = (fit(seeded(LitMLP), data, callbacks=own, **options) for own in ([Multiplications()], []))
    assert same_state(one.state, other.state)


class LitPair(LitNet):
    """Its network takes what its examples do not have."""

    def forward(self, x: Any, mask: Any) -> Any:
        return self.net(x * mask)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return nn.functional.cross_entropy(self(batch[0], 1.0), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.training_step(batch, batch_idx))


def test_what_cannot_be_counted_is_warned_of_once_and_trains(fit: Fit, data: Any) -> None:
    with pytest.warns(
        ls.SpectralWarning, match="Multiplications are not counted.*missing 1 required.*`example_input"
    ) as told:
        fitted = fit(LitPair(nn.Linear(6, 3)), data, callbacks=[Multiplications()], max_epochs=2)
    assert len([one for one in told if "Multiplications" in str(one.message)]) == 1
    assert "fl/multiplications" not in fitted.history.rows[-1]
