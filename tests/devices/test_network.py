"""Devices of a network that have an accelerator, of a server that has none."""

from typing import Any

import pytest
from fake_line import remote, toy_line
from federation import Fit, seeded
from toy_models import LitMLP

import lightning_spectral as ls
from lightning_spectral.network import workplace
from lightning_spectral.plugin.trainer import silent_trainer

ALGORITHMS: dict[str, Any] = {
    "FedAvg": ls.FedAvg(),
    "spectral": ls.SpectralSharding(keep_ratio=0.5),
    "SCAFFOLD": ls.Scaffold(),
    "LoRA": ls.LoRA(2),
    "Zampling": ls.Zampling(compression=2, degree=3),
    "stale updates": ls.StaleUpdates(beta=0.7),
}


def make() -> LitMLP:
    return LitMLP(momentum=0.0, dropout=0.0)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_devices_train_on_their_accelerators(
    name: str, fit: Fit, device: Any, agree: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"algorithm": ALGORITHMS[name], "max_epochs": 2, "seed": 3}
    theirs = fit(seeded(make), remote(toy_line(make)), **options)
    placed = []

    def there(kind: Any, **settings: Any) -> Any:
        settings = {name: value for name, value in settings.items() if name not in ("accelerator", "devices")}
        placed.append(silent_trainer(kind, **settings, **device.trainer()))
        return placed[-1]

    monkeypatch.setattr(workplace, "silent_trainer", there)
    ours = fit(seeded(make), remote(toy_line(make)), **options)
    assert placed
    assert {trainer.strategy.root_device for trainer in placed} == {device.torch}
    agree(theirs, ours)
