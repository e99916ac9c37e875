"""The same federation with both engines: clients train in a plain loop, or in a Trainer of their own."""

import copy
from dataclasses import replace
from typing import Any

import lightning.pytorch as pl
import torch
from federation import Fit, Fitted

import lightning_spectral as ls

MIXED = ls.SpectralSharding(ls.Unbiased(), keep_ratio={0.3: 0.5, 0.6: 0.5}, clip_tau=1.2, frobenius_decay=0.01)
UNCLIPPED = replace(MIXED, clip_tau=float("inf"))  # Adam undoes the clip
DENSE = ls.FedAvg()


def with_both_engines(fit: Fit, module: pl.LightningModule, data: Any, **options: Any) -> list[Fitted]:
    """The same federation twice, from the same weights: clients train in the loop, then in Trainers."""
    return [fit(copy.deepcopy(module), data, client_engine=engine, **options) for engine in ("loop", "trainer")]


def assert_same_run(one: Fitted, two: Fitted) -> None:
    for name, value in one.state.items():
        assert torch.equal(value, two.state[name]), name
    assert one.rows == two.rows
