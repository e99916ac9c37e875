"""Layers whose initial weights lack rank, in a fit: they learn, and a resumed run holds them as the first one did."""

from pathlib import Path
from typing import Any

import pytest
import torch
from federation import Fit, Fitted, same_state, seeded
from torch import nn
from toy_models import LitMLP

import lightning_spectral as ls


class LitDeep(LitMLP):
    """Two layers between the first and the last, of which one starts with a constant weight."""

    def __init__(self, value: float | None = None) -> None:
        super().__init__()
        self.net.insert(2, nn.Linear(12, 12))
        if value is not None:
            nn.init.constant_(self.net[2].weight, value)


SHARDING = ls.SpectralSharding(keep_ratio=0.5)


def rank(weight: torch.Tensor) -> int:
    return int(torch.linalg.matrix_rank(weight.detach().double(), rtol=1e-5))


@pytest.mark.parametrize("value", [0.0, 0.05])
def test_they_are_trained_whole_and_gain_rank(value: float, data: Any, fit: Fit) -> None:
    fitted = fit(seeded(LitDeep, value), data, algorithm=SHARDING, max_epochs=2)
    assert rank(fitted.module.net[2].weight) > 2
    plan = SHARDING.plan(seeded(LitDeep, value))
    assert list(plan.missing_rank) == ["net.2"]
    assert list(plan.sharded) == ["net.3"]


@pytest.mark.parametrize("value", [0.0, 0.05, None])
def test_a_resumed_run_keeps_the_same_layers_whole(value: float | None, data: Any, fit: Fit, tmp_path: Path) -> None:
    """By then they have rank."""

    def rounds(max_epochs: int, ckpt_path: Path | None = None) -> Fitted:
        return fit(seeded(LitDeep, value), data, algorithm=SHARDING, max_epochs=max_epochs, ckpt_path=ckpt_path)

    whole = rounds(3)
    for stop_after, path in enumerate([tmp_path / "1.ckpt", tmp_path / "2.ckpt"], start=1):
        before = tmp_path / f"{stop_after - 1}.ckpt" if stop_after > 1 else None
        rounds(stop_after, before).trainer.save_checkpoint(path)
        saved = torch.load(path, weights_only=True)
        assert ("federation_decisions" in saved) == (value is not None)
    resumed = rounds(3, tmp_path / "2.ckpt")
    assert same_state(resumed.state, whole.state)
    assert [row.uplink_bytes for row in resumed.ledger.rows] == [row.uplink_bytes for row in whole.ledger.rows]


def test_clients_that_would_hold_empty_terms_are_warned_of_by_name(data: Any, fit: Fit) -> None:
    def of_rank(rows: int) -> LitDeep:
        lit = seeded(LitDeep)
        with torch.no_grad():
            lit.net[2].weight[rows:] = 0.0
        return lit

    message = r"net\.2 \(rank 3 of 12; clients hold at least 6 terms\)\. Their rank never grows"
    with pytest.warns(ls.SpectralWarning, match=message):
        fit(of_rank(3), data, algorithm=SHARDING)
    fit(of_rank(6), data, algorithm=SHARDING)
    fit(seeded(LitDeep), data, algorithm=ls.SpectralSharding(spectral_start=ls.algorithms.SpectralStart(tail=0.0)))
