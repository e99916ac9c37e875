"""Fixtures for tests that train several models."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from federation import resume

import lightning_spectral as ls


@pytest.fixture
def run(quiet: dict[str, Any]) -> Callable[..., tuple[pl.Trainer, ls.RoundHistory, ls.CommunicationLedger]]:
    def run(
        model: ls.MultiModelModule, data: Any, rounds: int = 1, ckpt: Path | None = None, **options: Any
    ) -> tuple[pl.Trainer, ls.RoundHistory, ls.CommunicationLedger]:
        history, ledger = ls.RoundHistory(), ls.CommunicationLedger()
        callbacks = [history, ledger, *options.pop("callbacks", [])]
        trainer = pl.Trainer(**{**quiet, "num_sanity_val_steps": 0, **options}, max_epochs=rounds, callbacks=callbacks)
        resume(trainer, model, data, ckpt)
        return trainer, history, ledger

    return run
