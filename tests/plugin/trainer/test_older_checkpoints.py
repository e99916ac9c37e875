"""Checkpoints of an earlier version are resumed.

The files were written by the version at commit f47c3b8, after two rounds of the federations below.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from client_parallel_runs import uneven_data
from federation import HARDLY_MOVED, Fit, seeded
from torch import nn
from toy_models import LitMLP

import lightning_spectral as ls

FILES = Path(__file__).parents[2] / "fixtures" / "checkpoints"
HALF = {0.4: 0.5, 0.8: 0.5}
ALGORITHMS: dict[str, Any] = {
    "FedAvg": ls.FedAvg(),
    "Collective": ls.SpectralSharding(keep_ratio=HALF),
    "Zampling": ls.Zampling(compression=2, degree=3),
    "Prefix": ls.WidthSharding(keep_ratio=HALF),
    "LoRA": ls.LoRA({1: 0.5, 3: 0.5}, train=["net.1.*"]),
    "FIARSE": ls.FIARSE(keep_ratio=HALF),
    "StaleUpdates": ls.StaleUpdates(),
    "Scaffold": ls.Scaffold(),
}


class LitSmall(LitMLP):
    example_input_array = torch.zeros(2, 6)

    def __init__(self, momentum: float = 0.9) -> None:
        super().__init__(momentum=momentum, dropout=0.1)
        self.net.insert(1, nn.BatchNorm1d(12))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if len(batch[0]) == 1:
            return None
        x, y = batch
        loss = nn.functional.cross_entropy(self(x), y)
        self.log("train_loss", loss)
        return loss


pytestmark = [
    pytest.mark.filterwarnings(HARDLY_MOVED),
    pytest.mark.filterwarnings("ignore:Round 0. sub-models of keep ratio:lightning_spectral.SpectralWarning"),
    pytest.mark.filterwarnings("ignore:The loaded checkpoint was produced with Lightning"),  # where Lightning is older
]


def run(name: str, fit: Fit, rounds: int, ckpt_path: Path | None = None) -> dict[str, Any]:
    lit = seeded(LitSmall, momentum=0.0 if name == "Scaffold" else 0.9)
    algorithm = ALGORITHMS[name]
    if name == "Collective" and ckpt_path is None:
        # as it was; the file says so to a resumed run
        algorithm = replace(algorithm, server_momentum=0.0, aggregation=ls.algorithms.TermMeans())
    options: dict[str, Any] = {"seed": 3, "max_epochs": rounds, "ckpt_path": ckpt_path}
    return fit(lit, uneven_data(), algorithm=algorithm, **options).model.state_dict()


def with_products(state: dict[str, Any]) -> dict[str, Any]:
    """The same state with the product of each adapter's factors in their place."""
    products = {key: value @ state[f"{key[:-1]}A"] for key, value in state.items() if key.endswith(".B")}
    return {key: products.get(key, value) for key, value in state.items() if not key.endswith(".A")}


@pytest.mark.skipif(not torch.__version__.startswith("2.13."), reason="other releases of torch draw other numbers")
@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_run_goes_on_as_if_it_had_not_been_interrupted(name: str, fit: Fit) -> None:
    whole, resumed, start = run(name, fit, 3), run(name, fit, 3, FILES / f"{name}.ckpt"), run(name, fit, 2)
    assert list(resumed) == list(whole)
    whole, resumed, start = map(with_products, (whole, resumed, start))
    for key, value in whole.items():
        # another machine wrote the file: its rounding differs, and so may the signs of singular vectors
        torch.testing.assert_close(resumed[key], value, rtol=1e-4, atol=1e-5)
    assert any(not torch.allclose(start[key], value, rtol=1e-3, atol=1e-4) for key, value in whole.items())


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_run_begins_with_what_the_file_holds(name: str, fit: Fit) -> None:
    """Whatever release of torch reads it; no round is left to run."""
    held = torch.load(FILES / f"{name}.ckpt", weights_only=True)["state_dict"]
    resumed = run(name, fit, 2, FILES / f"{name}.ckpt")
    assert set(held) <= set(resumed)
    assert all(torch.equal(resumed[key], value) for key, value in held.items())
