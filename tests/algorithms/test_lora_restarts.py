"""Adapters that are merged into the base and start afresh: against runs built by hand, and what never changes."""

from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from federation import Fit, check_resumes, same_state, seeded
from toy_models import LitMLP

import lightning_spectral as ls
from lightning_spectral.algorithms.lora.aggregation import drawn_rows
from lightning_spectral.nn.adapters import adapted_layers

MIXED = {1: 0.5, 3: 0.5}


def merge_by_hand(folder: Path, num_rounds: int) -> Path:
    """A checkpoint in which the merged weights are the bases, B is zero, and A is drawn for that round."""
    checkpoint = torch.load(folder / "before.ckpt", weights_only=True)
    state = checkpoint["federation_state"][""]
    for index, layer in enumerate(adapted_layers(LitMLP(), ["*"], ())):
        own = f"adapters.{index}"
        state[f"{own}.base"] = checkpoint["state_dict"][layer.weight].clone()
        state[f"{own}.B"].zero_()
        state[f"{own}.A"] = drawn_rows(layer, 3, state[f"{own}.A"], 0, num_rounds)
    del checkpoint["federation_digest"]  # it is changed on purpose
    torch.save(checkpoint, folder / "merged.ckpt")
    return folder / "merged.ckpt"


@pytest.mark.parametrize("aggregation", [ls.SampledTerms(), ls.FrozenA(), ls.TruncatedProducts()], ids=repr)
def test_a_restart_is_a_run_that_begins_with_the_merged_weights(
    aggregation: Any, data: Any, fit: Fit, tmp_path: Path
) -> None:
    run = partial(fit, data=data, clients_per_round=12)
    restarting = ls.LoRA(MIXED, aggregation=aggregation, merge_every=2)
    ours = run(seeded(LitMLP), algorithm=restarting, max_epochs=3)
    keeping = ls.LoRA(MIXED, aggregation=aggregation)
    first = run(seeded(LitMLP), algorithm=keeping, max_epochs=2)
    first.trainer.save_checkpoint(tmp_path / "before.ckpt")
    changed = torch.load(merge_by_hand(tmp_path, 2), weights_only=True)
    by_hand = ls.FederatedModule(seeded(LitMLP), algorithm=keeping, clients_per_round=12)
    by_hand = run(by_hand, max_epochs=3, ckpt_path=tmp_path / "merged.ckpt")
    assert same_state(ours.state, by_hand.state)
    assert not same_state(ours.state, first.state)
    assert changed["federation_state"][""]["num_rounds"] == 2


def test_after_a_restart_the_base_travels_once_more(data: Any, fit: Fit) -> None:
    rows = fit(
        seeded(LitMLP), data, algorithm=ls.LoRA(2, merge_every=2), clients_per_round=12, max_epochs=5
    ).ledger.rows
    own = LitMLP()
    base, weights = (4 * sum(p.numel() for p in own.parameters() if p.dim() > least) for least in (0, 1))
    factors = 4 * 2 * sum(layer.in_features + layer.out_features for layer in adapted_layers(own, ["*"], ()))
    frozen = [{row.frozen_bytes for row in rows if row.round_idx == index} for index in range(5)]
    assert frozen == [{base}, {0}, {weights}, {0}, {weights}]
    assert {row.downlink_bytes - row.frozen_bytes for row in rows} == {factors}


@pytest.mark.parametrize("merge_every", [1, 2])
def test_a_restart_changes_no_weight_by_one_bit(merge_every: int, data: Any, fit: Fit) -> None:
    """Neither without training nor after it: the new base is the weight that the server has."""
    algorithm = ls.LoRA(2, merge_every=merge_every)
    idle = fit(seeded(LitMLP), data, algorithm=algorithm, local_epochs=0, max_epochs=3)
    assert same_state(idle.state, seeded(LitMLP).state_dict())
    trained = fit(seeded(LitMLP), data, algorithm=algorithm, max_epochs=2)
    for layer, adapter in zip(adapted_layers(LitMLP(), ["*"], ()), trained.model.state.adapters, strict=True):
        assert torch.equal(adapter.base, trained.state[layer.weight])
        assert not adapter.B.any()
    again = fit(trained.module, data, algorithm=algorithm, local_epochs=0, max_epochs=3)
    assert same_state(again.state, trained.state)
    assert not same_state(again.state, idle.state)


def test_a_run_with_restarts_resumes_as_the_uninterrupted_one(data: Any, fit: Fit, tmp_path: Path) -> None:
    check_resumes(fit, LitMLP, data, tmp_path, algorithm=ls.LoRA(MIXED, merge_every=2), clients_per_round=5)


class Restarts(pl.Callback):
    """Notes the rounds after which A is a new one, and those that averaged at least one client."""

    def __init__(self) -> None:
        self.merged: list[int] = []
        self.averaged: list[int] = []

    def on_train_epoch_start(self, trainer: Any, model: Any) -> None:
        self.before = model.state.adapters[0].A.clone()

    def on_train_epoch_end(self, trainer: Any, model: Any) -> None:
        now = trainer.current_epoch
        if not torch.equal(model.state.adapters[0].A, self.before):
            self.merged.append(now)
        if model.state.num_rounds == now + 1:
            self.averaged.append(now)


@pytest.mark.filterwarnings("ignore:Round .* no client is left")
def test_a_merge_that_is_due_in_a_round_without_clients_follows_in_the_next_that_has_some(data: Any, fit: Fit) -> None:
    noted, algorithm = Restarts(), ls.LoRA(2, aggregation=ls.FrozenA(), merge_every=3)
    options = {"clients_per_round": 1, "dropout": ls.ClientDropout(0.5), "seed": 5, "callbacks": [noted]}
    run = fit(seeded(LitMLP), data, algorithm=algorithm, max_epochs=12, **options)
    again = Restarts()
    fit(run.model, data, max_epochs=2, callbacks=[again])
    due = [min((now for now in noted.averaged if now >= last), default=12) for last in (2, 5, 8, 11)]
    assert noted.merged == sorted(set(due) - {12})
    assert len(set(noted.merged) - {2, 5, 8, 11}) > 0  # some merge was late
    assert again.merged == []  # rounds are counted anew in another fit
    assert len(again.averaged) > 0


def test_another_fit_merges_in_its_own_rounds(data: Any, fit: Fit) -> None:
    algorithm = ls.LoRA(2, aggregation=ls.FrozenA(), merge_every=1)
    run = fit(seeded(LitMLP), data, algorithm=algorithm, max_epochs=3)
    fit(run.model, data, max_epochs=1, callbacks=[again := Restarts()])
    assert again.merged == [0]


def test_each_restart_has_another_a(data: Any, fit: Fit) -> None:
    factors = [
        fit(seeded(LitMLP), data, algorithm=ls.LoRA(2, merge_every=1), max_epochs=rounds)
        .model.state.adapters[0]
        .A.detach()
        for rounds in (1, 2)
    ]
    assert not torch.equal(*factors)


def test_what_has_no_adapters_between_rounds_is_not_merged(data: Any, fit: Fit) -> None:
    with pytest.raises(ValueError, match=r"StackedProducts adds to the base in every round .* got 3"):
        ls.LoRA(2, aggregation=ls.StackedProducts(), merge_every=3)
    with pytest.raises(
        ValueError, match=r"With `merge_every=3` .* as ServerAdam would refer to .* leave `server_optimizer` or"
    ):
        fit(seeded(LitMLP), data, algorithm=ls.LoRA(2, merge_every=3), server_optimizer=ls.server.FedAdam())
