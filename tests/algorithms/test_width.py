"""Sub-models by width in whole runs: against plain averaging, in bytes, resumed, with wrong input."""

from typing import Any

import numpy as np
import pytest
import torch
from federation import Fit, same_state, seeded
from one_client import client_of
from test_third_party_models import gpt2, images, tokens, vit, with_logits
from toy_models import LitFrozenParts, LitMLP, LitSmall, variant
from width_norms import recorded_turns

import lightning_spectral as ls

MIXED = {0.25: 0.5, 0.75: 0.5}
CHANNELS = [ls.PrefixChannels(), ls.RollingChannels(), ls.RandomChannels()]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("absolute", [False, True])
@pytest.mark.parametrize("channels", CHANNELS, ids=repr)
def test_the_whole_width_is_fed_avg(channels: Any, absolute: bool, data: Any, fit: Fit) -> None:
    options = {"participation": ls.Uniform(4), "clients_per_round": None} if absolute else {}
    algorithm = ls.WidthSharding(channels, keep_ratio=1.0, scaler=True)
    ours = fit(seeded(LitSmall), data, algorithm=algorithm, max_epochs=3, **options)
    theirs = fit(seeded(LitSmall), data, algorithm=ls.FedAvg(), max_epochs=3, **options)
    if absolute:
        assert all(torch.allclose(ours.state[name], theirs.state[name], rtol=1e-5) for name in theirs.state)
    else:
        assert same_state(ours.state, theirs.state)
        assert [row["train_loss"] for row in ours.rows] == [row["train_loss"] for row in theirs.rows]
    assert ours.ledger.rows == theirs.ledger.rows


def test_small_models_travel_and_are_counted(data: Any, fit: Fit) -> None:
    algorithm = ls.WidthSharding(keep_ratio=MIXED)
    rows = fit(seeded(LitSmall), data, algorithm=algorithm, clients_per_round=12, max_epochs=1).ledger.rows
    assert sorted(row.keep_ratio for row in rows) == 6 * [0.25] + 6 * [0.75]
    for row in rows:
        n = round(12 * row.keep_ratio)
        values = (6 * n + n) + 4 * n + (n * n + n) + (n * 3 + 3)
        assert row.downlink_bytes == 4 * values + 8  # the count of batches
        assert row.uplink_bytes == 4 * values


def test_every_entry_averages_over_those_who_held_it(data: Any, fit: Fit, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against each client's own update, sliced and summed in a slow loop."""
    lit = seeded(LitSmall)
    before = {name: tensor.clone() for name, tensor in lit.state_dict().items()}
    turns = recorded_turns(monkeypatch)
    algorithm = ls.WidthSharding(ls.RandomChannels(), keep_ratio={0.25: 0.9, 0.5: 0.1})
    fitted = fit(lit, data, algorithm=algorithm, clients_per_round=3, max_epochs=1)
    rows = {"net.0": "net.0", "net.1": "net.0", "net.3": "net.3"}  # the group of each layer's outputs
    columns = {"net.3": "net.0", "net.6": "net.3"}
    for name in ("net.0.weight", "net.1.running_mean", "net.3.weight", "net.3.bias", "net.6.weight", "net.6.bias"):
        layer = name.rpartition(".")[0]
        total, weight = np.zeros(before[name].shape), np.zeros(before[name].shape)
        for receipt, tensors in turns:
            own = sorted(receipt.drawn[rows[layer]].tolist()) if layer in rows else range(3)
            inner = sorted(receipt.drawn[columns[layer]].tolist()) if layer in columns else range(6)
            for i, row in enumerate(own):
                for j, column in enumerate(inner if name.endswith(".weight") else [...]):
                    there, here = ((row, column), (i, j)) if name.endswith(".weight") else (row, i)
                    total[there] += receipt.unit.coefficient * float(tensors[name][here] - before[name][there])
                    weight[there] += receipt.unit.coefficient
        assert 0 < (weight == 0).mean() < 1 or name == "net.6.bias"
        mean = np.divide(total, weight, out=np.zeros_like(total), where=weight > 0)
        assert np.allclose(fitted.state[name], before[name] + torch.from_numpy(mean), atol=1e-6)
        unheld = torch.from_numpy(weight == 0)
        assert torch.equal(fitted.state[name][unheld], before[name][unheld])


@pytest.mark.slow
@pytest.mark.parametrize("channels", CHANNELS, ids=repr)
def test_a_network_learns_with_mixed_widths(channels: Any, data: Any, fit: Fit) -> None:
    algorithm = ls.WidthSharding(channels, keep_ratio={0.5: 0.5, 1.0: 0.5})
    fitted = fit(seeded(LitSmall), data, algorithm=algorithm, clients_per_round=12, max_epochs=8, local_epochs=2)
    assert fitted.rows[-1]["val_loss"] < 0.85 * fitted.rows[0]["val_loss"]
    assert [row["fl/entries_held"] for row in fitted.rows] == [1.0] * 8


def test_a_frozen_layer_is_cut_and_travels_anew(data: Any, fit: Fit) -> None:
    """Each round brings a client another part of it."""

    algorithm = ls.WidthSharding(ls.RollingChannels(), keep_ratio=0.5)
    lit = seeded(LitFrozenParts)
    before = {name: tensor.clone() for name, tensor in lit.state_dict().items()}
    fitted = fit(lit, data, algorithm=algorithm, clients_per_round=12, max_epochs=2)
    assert torch.equal(fitted.state["net.3.weight"], before["net.3.weight"])
    assert [row.frozen_bytes for row in fitted.ledger.rows] == 12 * [12] + 12 * [0]  # the last bias, once
    assert fitted.ledger.rows[-1].downlink_bytes == 4 * ((6 * 6 + 6) + 4 * 6 + (6 * 6 + 6) + 6 * 3) + 8


def test_a_scaler_before_averages_of_batch_norm_is_warned_of(data: Any, fit: Fit) -> None:
    scaled = ls.WidthSharding(keep_ratio=MIXED, scaler=True)
    with pytest.warns(ls.SpectralWarning, match=r"averages that net\.1 learned of the divided ones"):
        fit(seeded(LitSmall), data, algorithm=scaled)
    fit(ls.nn.use_batch_statistics(seeded(LitSmall)), data, algorithm=scaled)
    fit(seeded(LitSmall), data, algorithm=ls.WidthSharding(keep_ratio=1.0, scaler=True))


def test_the_scaler_divides_what_cut_layers_give_while_they_train() -> None:
    lit = seeded(LitSmall).eval()
    whole = ls.WidthSharding(keep_ratio=0.5).bind(lit).client_side
    divided = ls.WidthSharding(keep_ratio=0.5, scaler=True).bind(lit).client_side
    plain, scaled = client_of(whole, lit, 0.5), client_of(divided, lit, 0.5)
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    assert torch.equal(scaled.eval()(x), plain.eval()(x))
    scaled.net[3].train()
    assert torch.equal(scaled.net[3](x), 2 * plain.net[3](x))
    scaled.net[6].train()  # its outputs are the module's
    assert torch.equal(scaled.net[6](x), plain.net[6](x))


# Counts the channels of its hidden layers in code of its own.
LitCounts = variant(LitSmall, forward=lambda self, x: self.net[2:](self.net[:2](x).reshape(-1, 12)))


def test_what_the_module_counts_itself_stays_whole(data: Any, fit: Fit) -> None:
    plan = ls.nn.width_plan(LitCounts())
    assert [group.name for group in plan.groups] == ["net.3"]
    assert "net.0: 12 channels are held whole: the module does not run without some channels: RuntimeError" in str(plan)
    fit(seeded(LitCounts), data, algorithm=ls.WidthSharding(), max_epochs=1)


def test_excluded_layers_stay_whole() -> None:
    algorithm = ls.WidthSharding(exclude=["net.3"])
    module = LitSmall()
    assert algorithm.capacities.planned(module).plan.groups == ()
    with pytest.warns(ls.SpectralWarning, match=r"cuts no channel of LitSmall: clients train all of it"):
        ls.FederatedModule(module, algorithm=algorithm, clients_per_round=1)


def test_a_plan_can_be_given_to_a_module_without_an_example(data: Any, fit: Fit) -> None:
    plan = ls.nn.width_plan(LitMLP(), torch.zeros(2, 6))
    assert len(fit(seeded(LitMLP), data, algorithm=ls.WidthSharding(plan=plan)).ledger.rows) == 4


@pytest.mark.parametrize(
    ("options", "module", "message"),
    [
        ({}, LitMLP, r"channels of LitMLP belong together, .* set its `example_input_array`"),
        ({"exclude": ["head"]}, LitSmall, r"`exclude` pattern 'head' matches no layer; known names: net.0, "),
        (
            {"plan": ls.nn.width_plan(LitSmall())},
            LitMLP,
            r"`plan` is the plan of another module: there net.1.weight is",
        ),
    ],
    ids=["no example", "exclude", "plan"],
)
def test_what_cannot_be_cut_is_refused_at_once(options: Any, module: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ls.FederatedModule(module(), algorithm=ls.WidthSharding(**options), clients_per_round=1)


@pytest.mark.sampled(1)
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")
@pytest.mark.parametrize("name", ["GPT-2", "ViT"])
def test_a_transformer_of_others_trains_cut(name: str, fit: Fit) -> None:
    if name == "ViT":
        lit = with_logits(seeded(vit), lambda net, x: net(pixel_values=x).logits, torch.zeros(2, 3, 8, 8))
    else:
        lit = with_logits(seeded(gpt2), lambda net, x: net(input_ids=x).logits, torch.zeros(2, 8, dtype=torch.long))
    data = ls.FederatedDataModule(images() if name == "ViT" else tokens(), ls.IIDPartitioner(num_clients=4))
    before = {key: tensor.clone() for key, tensor in lit.state_dict().items()}
    fitted = fit(lit, data, algorithm=ls.WidthSharding(ls.RollingChannels(), {0.25: 0.5, 0.5: 0.5}), max_epochs=2)
    small, large = (min(r.uplink_bytes for r in fitted.ledger.rows if r.keep_ratio == ratio) for ratio in (0.25, 0.5))
    assert small < 0.6 * large < 0.4 * 4 * sum(parameter.numel() for parameter in lit.parameters())
    assert sum(not torch.equal(fitted.state[key], before[key]) for key in before) > 0.9 * len(list(lit.parameters()))
    assert fitted.rows[-1]["fl/loss"] < fitted.rows[0]["fl/loss"]
