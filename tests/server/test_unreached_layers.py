"""Layers that not every client needs may be sharded; one that no client needs is named after the first rounds."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from federation import Fit, said_during, seeded
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import lightning_spectral as ls
from lightning_spectral.client.device import WATCHED_ROUNDS

Use = Callable[[Any, int], list[int]]  # from the module and the class of a batch to the experts that it uses
EVERY_LAYER = ls.LayerChoices(keep_first_and_last_dense=False)


def of_class(lit: Any, label: int) -> list[int]:
    return [label]


def at_random(lit: Any, label: int) -> list[int]:
    return [expert for expert in range(3) if torch.rand(()) < 0.5]


def unfrozen(lit: Any, label: int) -> list[int]:
    return list(range(min(lit.current_epoch + 1, 3)))


def but_the_last(lit: Any, label: int) -> list[int]:
    return [0, 1]


def with_experts(lit_mlp: Any, use: Use) -> Any:
    """A module with three layers of its own before its network; a client uses some of them."""

    class LitExperts(lit_mlp):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList([nn.Linear(6, 6) for _ in range(3)])

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x, y = batch
            for expert in use(self, int(y[0])):
                x = x + self.experts[expert](x)
            return super().training_step((x, y), batch_idx)

    return seeded(LitExperts)


@pytest.fixture
def by_class(toy: TensorDataset) -> ls.FederatedDataModule:
    """Three clients, each with the examples of one class."""
    return ls.FederatedDataModule(toy, ls.NaturalPartitioner(toy.tensors[1]), batch_size=40)


@pytest.fixture
def fit(fit: Fit, by_class: ls.FederatedDataModule) -> Any:
    """Fits of one client a round."""
    sharding = ls.SpectralSharding(keep_ratio=0.5, layers=EVERY_LAYER)
    return partial(fit, data=by_class, algorithm=sharding, clients_per_round=1)


@pytest.mark.parametrize("use", [of_class, at_random, unfrozen])
def test_layers_that_some_client_trains_are_no_concern(use: Use, lit_mlp: Any, fit: Any) -> None:
    lit = with_experts(lit_mlp, use)
    before = [expert.weight.clone() for expert in lit.experts]
    assert said_during(lambda: fit(lit, max_epochs=WATCHED_ROUNDS)) == []
    assert not any(torch.equal(expert.weight, w) for expert, w in zip(lit.experts, before, strict=True))


@pytest.mark.parametrize(("num_rounds", "last"), [(1, 0), (WATCHED_ROUNDS, 9), (WATCHED_ROUNDS + 1, 9)])
def test_a_layer_that_no_client_trains_is_named_once(num_rounds: int, last: int, lit_mlp: Any, fit: Any) -> None:
    (said,) = said_during(lambda: fit(with_experts(lit_mlp, but_the_last), max_epochs=num_rounds))
    assert said.startswith(f"Round {last}: no client has given a gradient to these sharded layers: experts.2. If `tr")
    assert "SpectralSharding(exclude=[...])" in said


class KeepOf(ls.RoundCallback):
    """Saves a checkpoint at the end of a round."""

    def __init__(self, path: Path, round_idx: int) -> None:
        self.path, self.round_idx = path, round_idx

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        if trainer.current_epoch == self.round_idx:
            trainer.save_checkpoint(self.path)


@pytest.mark.parametrize("saved", [2, WATCHED_ROUNDS - 1])
def test_a_resumed_run_knows_who_had_a_gradient_before(saved: int, lit_mlp: Any, fit: Any, tmp_path: Path) -> None:
    """After the checkpoint no client uses the first two layers; the last is used then, or the first rounds are over."""
    path = tmp_path / "saved.ckpt"
    first = with_experts(lit_mlp, but_the_last)
    before = said_during(lambda: fit(first, max_epochs=saved + 1, callbacks=[KeepOf(path, saved)]))
    assert len(before) == 1
    again = with_experts(lit_mlp, lambda lit, label: [2])
    assert said_during(lambda: fit(again, max_epochs=WATCHED_ROUNDS + 1, ckpt_path=path)) == []


def test_a_resumed_run_still_names_a_layer_that_nobody_trains(lit_mlp: Any, fit: Any, tmp_path: Path) -> None:
    path, lit = tmp_path / "saved.ckpt", partial(with_experts, lit_mlp, but_the_last)
    said_during(lambda: fit(lit(), max_epochs=3, callbacks=[KeepOf(path, 2)]))
    (said,) = said_during(lambda: fit(lit(), max_epochs=WATCHED_ROUNDS, ckpt_path=path))
    assert "layers: experts.2." in said
