"""Which private rounds count: all that a module's weights have had, however often it is wrapped, copied or saved."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from federation import Fit, seeded
from toy_models import LitMLP

import lightning_spectral as ls
from lightning_spectral.functional.privacy import epsilon

pytest.importorskip("dp_accounting", reason="epsilon needs the extra `privacy`")

OPTIONS: dict[str, Any] = {"participation": ls.Uniform(active=4), "clients_per_round": None}
RATE, DELTA = 4 / 12, 1e-3


def private(**options: Any) -> list[Any]:
    return [ls.ClientPrivacy(**{"clip": 0.5, "noise_multiplier": 1.0, "delta": DELTA, "noise_seed": 1, **options})]


def said(fitted: Any) -> float:
    return float(fitted.history.rows[-1]["fl/epsilon"])


@pytest.mark.slow
def test_a_module_that_is_wrapped_anew_goes_on_counting(data: Any, fit: Fit) -> None:
    lit = seeded(LitMLP)
    assert said(fit(lit, data, max_epochs=2, filters=private(), **OPTIONS)) == epsilon(RATE, 1.0, 2, DELTA)
    assert said(fit(lit, data, max_epochs=3, filters=private(), **OPTIONS)) == epsilon(RATE, 1.0, 5, DELTA)
    copied = copy.deepcopy(lit)
    assert said(fit(copied, data, max_epochs=1, filters=private(), **OPTIONS)) == epsilon(RATE, 1.0, 6, DELTA)
    # the noise that earlier rounds had is that of a budget for all; other clients' probability stays theirs
    few = ls.FederatedDataModule(data.train, ls.IIDPartitioner(8), batch_size=8)
    both = epsilon(4 / 8, 1.0, 1, DELTA, ((RATE, 1.0, 5),))
    assert said(fit(lit, few, max_epochs=1, filters=private(), **OPTIONS)) == both


def test_weights_of_an_earlier_run_bring_its_rounds(data: Any, fit: Fit, tmp_path: Path) -> None:
    path = tmp_path / "two.ckpt"
    fit(seeded(LitMLP), data, max_epochs=2, filters=private(), **OPTIONS).trainer.save_checkpoint(path)
    other = LitMLP()
    other.load_state_dict(torch.load(path, weights_only=True)["state_dict"])
    untold = fit(copy.deepcopy(other), data, filters=private(), **OPTIONS)
    told = fit(other, data, filters=private(after=str(path)), **OPTIONS)
    assert (said(untold), said(told)) == (epsilon(RATE, 1.0, 1, DELTA), epsilon(RATE, 1.0, 3, DELTA))
    loaded = ls.FederatedModule.load_from_checkpoint(
        path, module=LitMLP(), participation=OPTIONS["participation"], filters=private()
    )
    assert said(fit(loaded, data)) == epsilon(RATE, 1.0, 3, DELTA)


def test_a_resumed_run_needs_no_earlier_checkpoint(data: Any, fit: Fit, tmp_path: Path) -> None:
    """Its own has their rounds, so the earlier one may be gone."""
    first, second = tmp_path / "first.ckpt", tmp_path / "second.ckpt"
    lit = seeded(LitMLP)
    fit(lit, data, max_epochs=2, filters=private(), **OPTIONS).trainer.save_checkpoint(first)
    begun = LitMLP()
    begun.load_state_dict(lit.state_dict())
    fit(begun, data, max_epochs=1, filters=private(after=str(first)), **OPTIONS).trainer.save_checkpoint(second)
    first.unlink()
    resumed = fit(LitMLP(), data, max_epochs=2, ckpt_path=second, filters=private(), **OPTIONS)
    assert said(resumed) == epsilon(RATE, 1.0, 4, DELTA)


def test_a_budget_counts_them_too(data: Any, fit: Fit) -> None:
    lit = seeded(LitMLP)
    fit(lit, data, max_epochs=2, filters=private(), **OPTIONS)
    again = fit(lit, data, max_epochs=9, filters=private(target_epsilon=epsilon(RATE, 1.0, 3, DELTA)), **OPTIONS)
    assert len(again.history.rows) == 1


def test_a_checkpoint_without_private_rounds_is_refused(data: Any, fit: Fit, tmp_path: Path) -> None:
    path = str(tmp_path / "plain.ckpt")
    fit(seeded(LitMLP), data).trainer.save_checkpoint(path)
    with pytest.raises(ValueError, match="is no checkpoint of a run with ClientPrivacy"):
        fit(seeded(LitMLP), data, filters=private(after=path), **OPTIONS)
