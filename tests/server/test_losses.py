"""A run from a random start whose loss stays flat says so, once, with what can be done; no other run does."""

import math
from collections.abc import Iterable
from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from federation import Fit, said_during, seeded
from torch import nn
from torch.utils.data import TensorDataset

import lightning_spectral as ls
from lightning_spectral.server.advice import Losses


class LitFlat(pl.LightningModule):
    """A network whose loss stays at 2, but falls to 0.1 after some rounds."""

    def __init__(self, learns_after: int = 1000) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 40), nn.Linear(40, 40), nn.Linear(40, 3))
        self.learns_after = learns_after

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        outputs = self.net(batch[0]).sum()
        return outputs - outputs.detach() + (0.1 if self.trainer.current_epoch >= self.learns_after else 2.0)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-6)


@pytest.fixture
def told(toy: TensorDataset, fit: Fit) -> Any:
    """What a fit says; of one client with one batch in each round."""
    data = ls.FederatedDataModule(toy, ls.IIDPartitioner(num_clients=12), batch_size=4)

    def run(module: Any, algorithm: ls.Algorithm, max_epochs: int = 31, **options: Any) -> list[str]:
        options = {"clients_per_round": 1, "local_epochs": 1, **options}
        return said_during(partial(fit, module, data, algorithm=algorithm, max_epochs=max_epochs, **options))

    return run


def test_it_is_told_after_thirty_rounds_with_the_figures_and_the_remedies(told: Any) -> None:
    (message,) = told(seeded(LitFlat), ls.SpectralSharding())
    assert message == (
        "Round 29: the training loss has hardly fallen since rounds 5 to 9: 2 now, 2 then. If the validation metrics "
        "do not improve either, see whether `FedAvg()` learns on the same clients; if it does, try twice "
        "and four times its learning rate, then a larger keep ratio."
    )
    assert told(seeded(LitFlat), ls.SpectralSharding(), max_epochs=29) == []


@pytest.mark.parametrize(
    "algorithm", [ls.FedAvg(), ls.SpectralSharding(spectral_start=None, keep_ratio=0.8)], ids=["FedAvg", "no start"]
)
def test_nothing_is_told_where_no_random_weights_were_started(algorithm: ls.Algorithm, told: Any) -> None:
    """Fine-tuning may have little left to learn."""
    assert not [text for text in told(seeded(LitFlat), algorithm) if "hardly fallen" in text]


def test_nothing_is_told_of_a_run_that_learns(told: Any) -> None:
    assert told(seeded(LitFlat, learns_after=20), ls.SpectralSharding()) == []


def said(losses: Iterable[tuple[int, float]]) -> dict[int, str]:
    """What is said of the losses of some rounds after a spectral start, by round."""
    half = ls.SpectralSharding().bind(seeded(LitFlat))
    half.started = frozenset(["net.1"])
    watch = Losses()
    return {r: text for r, loss in losses if not watch.is_over and (text := watch.note(half, loss, r))}


@pytest.mark.parametrize(
    ("losses", "flat"),
    [
        ([2.3] * 30, True),
        ([5.0] * 5 + [2.6] * 25, True),  # more than half of the first
        ([6.0] * 5 + [2.6] * 25, False),  # less: it may have converged
        ([2.3] * 10 + [2.1] * 20, True),
        ([2.3] * 10 + [2.0] * 20, False),
        ([2.3] * 25 + [1.0, 1.0, 2.3, 2.3, 2.3], False),  # the mean counts
        ([2.3] * 25 + [3.0] * 5, True),
        ([2.3] * 25 + [30.0] * 5, False),  # something else is wrong
        ([-2.3] * 30, False),
        ([0.0] * 30, False),
        ([math.nan] * 2 + [2.3] * 28, True),  # nobody trained in two rounds
        ([2.3] * 7 + [math.nan] + [2.3] * 22, True),
        ([2.3] * 29 + [math.inf], True),  # one bad round of 30
        ([math.nan] * 10 + [2.3] * 20, False),  # resumed after round 9
        ([2.3] * 25 + [math.nan] * 5, False),
        ([math.nan] * 30, False),
        ([2.3] * 25 + [math.inf, -math.inf] * 2 + [math.nan], False),
    ],
)
def test_flat_is_what_has_hardly_fallen_since_the_first_few_rounds(losses: list[float], flat: bool) -> None:
    assert list(said([*enumerate(losses), *enumerate(losses, 30)])) == ([29] if flat else [])


def test_a_model_that_idles_in_the_last_of_these_rounds_is_told_in_its_next() -> None:
    rounds = [0, 3, 6, 7, 8, 12, 20, 26, 28, 33, 34]  # those in which this model was trained
    assert list(said([(r, 2.3) for r in rounds])) == [33]


def test_a_run_that_exploded_is_not_called_flat_as_well() -> None:
    told = said(enumerate([1.0, *[4.0] * 40]))
    assert list(told) == [1]
    assert told[1].startswith("the training loss is 4, 4 times that of round 0 (1). Lower the learning rate")
