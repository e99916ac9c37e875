"""Federated LoRA in whole runs: against adapters that a user writes, in bytes, restarted, resumed, with wrong input."""

import math
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from aggregations import AGGREGATIONS
from federation import Fit, check_resumes, same_state, seeded
from one_client import client_of
from test_third_party_models import gpt2, tokens
from torch import Tensor, nn
from toy_models import LitMLP, LitNet, variant

import lightning_spectral as ls
from lightning_spectral.algorithms.lora.aggregation import Adapter, drawn_rows
from lightning_spectral.algorithms.lora.algorithm import write_merged
from lightning_spectral.nn.adapters import AdaptedLayer, adapted_layers

LAYERS = {"net.0": (12, 6), "net.2": (12, 12), "net.5": (3, 12)}
BASE = 4 * sum(out * into + out for out, into in LAYERS.values())
MIXED = {1: 0.5, 3: 0.5}


def factor_bytes(rank: int) -> int:
    return 4 * rank * sum(out + into for out, into in LAYERS.values())


class Adapted(nn.Module):
    """A layer with an adapter as a user would write it."""

    def __init__(self, layer: nn.Linear, B: Tensor, A: Tensor, scale: float) -> None:
        super().__init__()
        self.layer, self.scale = layer.requires_grad_(False), scale
        self.B, self.A = nn.Parameter(B.detach().clone()), nn.Parameter(A.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + nn.functional.linear(nn.functional.linear(x, self.A) * self.scale, self.B)


def adapted_by_hand(model: ls.FederatedModule, algorithm: ls.LoRA) -> LitMLP:
    """The module of a federation, with the factors that it starts from."""
    lit = seeded(LitMLP)
    for name, adapter in zip(LAYERS, model.state.adapters, strict=True):
        place = int(name.removeprefix("net."))
        lit.net[place] = Adapted(lit.net[place], adapter.B, adapter.A, algorithm.scale)
        if isinstance(algorithm.aggregation, ls.FrozenA):
            lit.net[place].A.requires_grad_(False)
    return lit


@pytest.mark.sampled(1)
@pytest.mark.parametrize("server_optimizer", [None, ls.FedAdam(lr=0.01)], ids=repr)
@pytest.mark.parametrize("aggregation", [ls.SampledTerms(), ls.PaddedFactors(), ls.FrozenA()], ids=repr)
def test_equal_ranks_are_a_users_own_adapters_under_fed_avg(
    aggregation: Any, server_optimizer: Any, data: Any, fit: Fit
) -> None:
    algorithm = ls.LoRA(2, aggregation=aggregation)
    model = ls.FederatedModule(
        seeded(LitMLP), algorithm=algorithm, clients_per_round=4, server_optimizer=server_optimizer
    )
    by_hand = adapted_by_hand(model, algorithm)
    expected = fit(by_hand, data, server_optimizer=server_optimizer, max_epochs=3)
    ours = fit(model, data, max_epochs=3)
    assert model.module.state_dict().keys() == LitMLP().state_dict().keys()
    for name, adapter in zip(LAYERS, model.state.adapters, strict=True):
        theirs = by_hand.get_submodule(name)
        assert torch.equal(adapter.B, theirs.B)
        assert torch.equal(adapter.A, theirs.A)
        assert adapter.B.any()
        product = theirs.scale * theirs.B.double() @ theirs.A.double()
        assert torch.equal(model.module.get_submodule(name).weight, (theirs.layer.weight.double() + product).float())
    assert [row["train_loss"] for row in ours.rows] == [row["train_loss"] for row in expected.rows]
    assert ours.rows[-1]["val_loss"] == pytest.approx(expected.rows[-1]["val_loss"], rel=1e-5)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("rank", [2, MIXED], ids=["equal", "mixed"])
@pytest.mark.parametrize("aggregation", AGGREGATIONS, ids=repr)
def test_nobody_trains_and_nothing_changes(aggregation: Any, rank: Any, data: Any, fit: Fit) -> None:
    algorithm = ls.LoRA(rank, aggregation=aggregation)
    before = seeded(LitMLP).state_dict()
    with pytest.warns(ls.SpectralWarning, match="no client is left"):
        gone = fit(seeded(LitMLP), data, algorithm=algorithm, dropout=ls.ClientDropout(1.0), max_epochs=2)
    idle = fit(seeded(LitMLP), data, algorithm=algorithm, local_epochs=0, max_epochs=2)
    assert same_state(gone.state, before)
    assert same_state(idle.state, before)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("aggregation", AGGREGATIONS, ids=repr)
def test_the_base_travels_once_and_then_factors_alone(aggregation: Any, data: Any, fit: Fit) -> None:
    algorithm = ls.LoRA(MIXED, aggregation=aggregation)
    rows = fit(seeded(LitMLP), data, algorithm=algorithm, clients_per_round=12, max_epochs=2).ledger.rows
    assert sorted(row.keep_ratio for row in rows) == 12 * [1 / 3] + 12 * [1.0]  # exact shares
    again = 4 * sum(out * into for out, into in LAYERS.values()) if isinstance(aggregation, ls.StackedProducts) else 0
    for row in rows:
        rank = round(3 * row.keep_ratio)
        omega = 4 * rank * len(LAYERS) * aggregation.has_multipliers
        up = {part: 4 * rank * sum(shape[part == "A"] for shape in LAYERS.values()) for part in ("A", "B")}
        assert row.frozen_bytes == (again if row.round_idx else BASE)
        assert row.downlink_bytes == row.frozen_bytes + factor_bytes(3 if aggregation.folds else rank) + omega
        assert row.uplink_bytes == sum(up[part] for part in aggregation.trained(row.round_idx))


def test_a_frozen_factor_travels_once_too(data: Any, fit: Fit) -> None:
    algorithm = ls.LoRA(2, aggregation=ls.FrozenA())
    rows = fit(seeded(LitMLP), data, algorithm=algorithm, clients_per_round=12, max_epochs=2).ledger.rows
    only_b = 4 * 2 * sum(out for out, _ in LAYERS.values())
    assert {row.downlink_bytes for row in rows if row.round_idx == 0} == {BASE + factor_bytes(2)}
    assert {row.downlink_bytes for row in rows if row.round_idx == 1} == {only_b}


@pytest.mark.parametrize("aggregation", [ls.SampledTerms(), ls.StackedProducts()], ids=repr)
def test_weights_that_are_loaded_before_the_fit_are_the_base(aggregation: Any, data: Any, fit: Fit) -> None:
    algorithm, pretrained = ls.LoRA(2, aggregation=aggregation), LitMLP()
    ours = ls.FederatedModule(seeded(LitMLP), algorithm=algorithm, clients_per_round=4)
    ours.module.load_state_dict(pretrained.state_dict())
    theirs = ls.FederatedModule(pretrained, algorithm=algorithm, clients_per_round=4)
    for model in (ours, theirs):
        fit(model, data, max_epochs=2)
    assert same_state(ours.state_dict(), theirs.state_dict())


@pytest.mark.filterwarnings("ignore:Round 0. the running averages of:lightning_spectral.SpectralWarning")
def test_what_train_names_is_averaged_and_all_else_rests(data: Any, fit: Fit) -> None:
    options = {"layers": ["net.0"], "train": ["net.1", "net.6.bias"]}
    lit = seeded(LitMLP, dropout=0.0, norm=True)
    before = {name: tensor.clone() for name, tensor in lit.state_dict().items()}
    fitted = fit(lit, data, algorithm=ls.LoRA(2, **options), clients_per_round=12, max_epochs=2)
    after = fitted.state
    moved = {name for name, tensor in after.items() if not torch.equal(tensor, before[name])}
    trained = {f"net.1.{own}" for own in ("weight", "bias", "running_mean", "running_var")} | {"net.6.bias"}
    assert moved == {"net.0.weight"} | trained
    again = 4 * (2 * (6 + 12) + sum(after[name].numel() for name in trained))  # what travels in every round
    sent = {(row.downlink_bytes, row.frozen_bytes) for row in fitted.ledger.rows if row.round_idx == 1}
    assert sent == {(again, 0)}
    rules = {"*.running_*": "server"}
    kept = fit(seeded(LitMLP, dropout=0.0, norm=True), data, algorithm=ls.LoRA(2, **options), buffers=rules).state
    assert torch.equal(kept["net.1.running_mean"], before["net.1.running_mean"])


def first_changes(rank: int, max_rank: int, x: Tensor) -> Tensor:
    """Change of the first layer's left factor in one step of SGD, for a client of some rank."""
    algorithm = ls.LoRA([rank, max_rank], alpha=3.0, aggregation=ls.PaddedFactors(), layers=["net.0"])
    lit = seeded(LitMLP, momentum=0.0, dropout=0.0)
    state = algorithm.new_state(lit, 0)
    client = client_of(algorithm.bind(lit, state).client_side, lit, rank / max_rank)
    with torch.no_grad():
        client.net[0].lora_A.copy_(state.adapters[0].A[:rank])
    client.net(x).square().sum().backward()
    return -client.net[0].lora_B.grad


def test_a_rank_is_a_capacity_and_not_a_learning_rate() -> None:
    """A term's first step does not depend on its holder, nor the weight's expected first step on the largest rank."""
    x = torch.randn(5, 6, generator=torch.Generator().manual_seed(1))
    few, all_ = (first_changes(rank, 6, x) for rank in (2, 6))
    assert torch.allclose(few, all_[:, :2], rtol=1e-6)
    lit = seeded(LitMLP)
    for rank in (1, 6):
        algorithm, num_draws = ls.LoRA(rank, alpha=3.0, layers=["net.0"]), 500
        drawn = [algorithm.new_state(lit, seed).adapters[0].A.detach() for seed in range(num_draws)]
        step = torch.stack([algorithm.scale**2 * A.T @ A for A in drawn]).mean(0)  # times -G, the gradient of W
        # entries of A have the variance 1 / (3 c_in), and one of A^T A has at most the square root of R times that
        sigma = algorithm.scale**2 * math.sqrt(rank) / (3 * 6)
        assert float((step - 3.0**2 / (3 * 6) * torch.eye(6)).abs().max()) <= 5 * sigma / math.sqrt(num_draws)


class LitTokens(LitNet):
    """Its embeddings are as large as trained ones, since small frozen ones would leave the logits little room."""

    def __init__(self) -> None:
        optimizer, example = partial(torch.optim.AdamW, lr=0.03), torch.zeros(1, 8, dtype=torch.long)
        super().__init__(gpt2(), optimizer=optimizer, example=example)
        with torch.no_grad():
            self.net.transformer.wte.weight.mul_(25)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(input_ids=x).logits

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.training_step(batch, batch_idx))


@pytest.mark.parametrize("multiplied", [False, True])
@pytest.mark.parametrize("make", [LitMLP, LitTokens])
def test_an_adapter_on_a_device_is_the_servers_merged_weight(make: Any, multiplied: bool) -> None:
    lit = seeded(make).eval()
    x = lit.example_input_array if make is LitTokens else torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    algorithm = ls.LoRA([2, 3], layers=["*.c_*" if make is LitTokens else "*"])
    state, before = algorithm.new_state(lit, 0), lit(x)
    half = algorithm.bind(lit, state)
    client = client_of(half.client_side, lit, 1.0).eval()
    for layer, adapter in zip(algorithm.adapted(lit), state.adapters, strict=True):
        nn.init.normal_(adapter.B, std=0.1, generator=torch.Generator().manual_seed(1))
        own = client.get_submodule(layer.name)
        own.lora_omega.fill_(2.0 if multiplied else 1.0)
        with torch.no_grad():
            own.lora_A.copy_(adapter.A)
            own.lora_B.copy_(adapter.B)
            adapter.B.mul_(2.0 if multiplied else 1.0)
    half.settle()
    assert torch.allclose(client(x), lit(x), rtol=1e-4, atol=1e-5)
    assert not torch.allclose(before, lit(x), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("rows", [5, 2 * 2**16 // 4 + 1], ids=["one block", "three blocks"])
def test_a_merge_is_computed_in_float64_and_leaves_the_base(rows: int, dtype: torch.dtype, transposed: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    base, B, A = (torch.randn(shape, generator=generator, dtype=dtype) for shape in ((rows, 4), (rows, 2), (2, 4)))
    B[3] = 0.0
    adapter = Adapter(base.T.clone() if transposed else base.clone(), B, A)
    weight = torch.empty_like(adapter.get_parameter("base"))
    write_merged(AdaptedLayer("layer", rows, 4, transposed, scale=0.3), adapter, weight)
    weight, kept = (tensor.T if transposed else tensor for tensor in (weight, adapter.base))
    expected = base.double() + 0.3 * (B.double() @ A.double())
    assert torch.allclose(weight.double(), expected, rtol=torch.finfo(dtype).eps, atol=1e-14)  # rounded once
    assert torch.equal(weight[3], base[3])
    assert torch.equal(kept, base)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")
def test_a_transformer_learns(fit: Fit) -> None:
    data = ls.FederatedDataModule(tokens(), ls.IIDPartitioner(num_clients=4), val=tokens(), batch_size=6)
    algorithm = ls.LoRA({2: 0.5, 4: 0.5}, layers=["*.c_attn", "*.c_proj", "*.c_fc"], train=["*.ln_*"])
    lit = seeded(LitTokens)
    before = {name: tensor.clone() for name, tensor in lit.state_dict().items()}
    fitted = fit(lit, data, algorithm=algorithm, max_epochs=5, local_epochs=2)
    assert fitted.rows[-1]["val_loss"] < 0.9 * fitted.rows[0]["val_loss"]
    moved = {name for name, tensor in fitted.state.items() if not torch.equal(tensor, before[name])}
    adapted = {layer.weight for layer in adapted_layers(lit, algorithm.layers, ())}
    assert len(adapted) == 8
    assert moved == adapted | {name for name in before if ".ln_" in name}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("aggregation", AGGREGATIONS, ids=repr)
def test_a_network_learns_with_mixed_ranks(aggregation: Any, data: Any, fit: Fit) -> None:
    algorithm = ls.LoRA(MIXED, alpha=8.0, aggregation=aggregation, train=["net.5"])
    lit = seeded(LitMLP, dropout=0.0)
    rows = fit(lit, data, algorithm=algorithm, clients_per_round=6, max_epochs=5, local_epochs=2).rows
    assert rows[-1]["val_loss"] < 0.85 * rows[0]["val_loss"]


class Odd(pl.LightningModule):
    """Layers that can have no adapter, for different reasons, and one that can."""

    def __init__(self) -> None:
        super().__init__()
        self.plain = nn.Linear(6, 4)
        self.conv = nn.Conv2d(2, 2, 1)
        self.attention = nn.MultiheadAttention(4, 2)
        self.embedding = nn.Embedding(5, 4)
        self.tied = nn.Linear(4, 5)
        self.tied.weight = self.embedding.weight
        self.computed = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
        self.whole = nn.Linear(4, 4)
        self.whole._parameters["weight"] = nn.Parameter(torch.zeros(4, 4, dtype=torch.int8), requires_grad=False)

    def training_step(self, batch: Any, batch_idx: int) -> Any: ...


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rank": 5}, r"`rank` must be at most 4 for the layer 'plain', which has 6 inputs and 4 outputs, got 5"),
        ({"layers": ["conv"]}, r"`layers`: 'conv' matches no linear layer .*: 'conv' is a Conv2d. Give .* 'plain'"),
        ({"layers": ["tied"]}, r"'tied' shares its weight with 'embedding'"),
        ({"layers": ["attention.*"]}, r"'attention.out_proj' is never called: an attention reads its weight"),
        ({"layers": ["computed"]}, r"'computed' (is a Parametrized|has a computed)"),
        ({"layers": ["whole"]}, r"'whole' has a weight of type torch.int8"),
        ({"layers": ["head"]}, r"`layers`: 'head' matches no linear layer that can have an adapter. Give"),
        ({"layers": ["plain"], "train": ["plain"]}, r"`layers`: 'plain' .*: 'plain' is trained whole, by `train`\."),
        ({"train": ["plain"]}, r"`layers`: '\*' matches no linear layer that can have an adapter: "),
        ({"train": ["head"]}, r"`train`: 'head' matches no trainable parameter of Odd"),
    ],
    ids=str,
)
def test_what_cannot_be_adapted_is_refused_with_its_name(options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ls.FederatedModule(Odd(), algorithm=ls.LoRA(**{"rank": 2, **options}), clients_per_round=1)


def test_an_optimizer_without_the_weights_is_refused(data: Any, fit: Fit) -> None:
    lit = variant(LitMLP, configure_optimizers=lambda self: torch.optim.SGD(self.net[5].parameters(), lr=0.1))()
    with pytest.raises(ValueError, match=r"your optimizer, which lacks net\.0\.weight, net\.2\.weight\. Give your SGD"):
        fit(lit, data, algorithm=ls.LoRA(2))


@pytest.mark.parametrize("aggregation", [ls.SampledTerms(), ls.TruncatedProducts()], ids=repr)
def test_a_server_optimizer_that_would_step_along_lost_terms_is_refused(aggregation: Any, data: Any, fit: Fit) -> None:
    algorithm = ls.LoRA(MIXED, aggregation=aggregation)
    for optimizer in (ls.FedAdam(), ls.FedAvgM(momentum=0.9)):
        with pytest.raises(
            ValueError, match=rf"{type(aggregation).__name__} factorises .* leave `server_optimizer` out"
        ):
            fit(seeded(LitMLP), data, algorithm=algorithm, server_optimizer=optimizer)
    fit(seeded(LitMLP), data, algorithm=algorithm, server_optimizer=ls.FedAvgM(momentum=0.0))


def merge_by_hand(folder: Path, num_rounds: int) -> Path:
    """A checkpoint in which the merged weights are the bases, B is zero, and A is drawn for that round."""
    checkpoint = torch.load(folder / "before.ckpt", weights_only=True)
    state = checkpoint["federation_lasting"]["models"][""]["algorithm"]
    for index, layer in enumerate(adapted_layers(LitMLP(), ["*"], ())):
        own = f"adapters.{index}"
        state[f"{own}.base"] = checkpoint["state_dict"][layer.weight].clone()
        state[f"{own}.B"].zero_()
        state[f"{own}.A"] = drawn_rows(layer, 3, state[f"{own}.A"], 0, num_rounds)
    del checkpoint["federation_digest"]  # it is changed on purpose
    torch.save(checkpoint, folder / "merged.ckpt")
    return folder / "merged.ckpt"


@pytest.mark.sampled(1)
@pytest.mark.parametrize("aggregation", [ls.SampledTerms(), ls.FrozenA(), ls.TruncatedProducts()], ids=repr)
def test_a_restart_is_a_run_that_begins_with_the_merged_weights(
    aggregation: Any, data: Any, fit: Fit, tmp_path: Path
) -> None:
    run = partial(fit, data=data, clients_per_round=12)
    ours = run(seeded(LitMLP), algorithm=ls.LoRA(MIXED, aggregation=aggregation, merge_every=2), max_epochs=3)
    keeping = ls.LoRA(MIXED, aggregation=aggregation)
    first = run(seeded(LitMLP), algorithm=keeping, max_epochs=2)
    first.trainer.save_checkpoint(tmp_path / "before.ckpt")
    changed = torch.load(merge_by_hand(tmp_path, 2), weights_only=True)
    by_hand = ls.FederatedModule(seeded(LitMLP), algorithm=keeping, clients_per_round=12)
    by_hand = run(by_hand, max_epochs=3, ckpt_path=tmp_path / "merged.ckpt")
    assert same_state(ours.state, by_hand.state)
    assert not same_state(ours.state, first.state)
    assert changed["federation_lasting"]["models"][""]["algorithm"]["num_rounds"] == 2


@pytest.mark.slow
def test_after_a_restart_the_base_travels_once_more(data: Any, fit: Fit) -> None:
    algorithm = ls.LoRA(2, merge_every=2)
    rows = fit(seeded(LitMLP), data, algorithm=algorithm, clients_per_round=12, max_epochs=5).ledger.rows
    own = LitMLP()
    base, weights = (4 * sum(p.numel() for p in own.parameters() if p.dim() > least) for least in (0, 1))
    factors = 4 * 2 * sum(layer.in_features + layer.out_features for layer in adapted_layers(own, ["*"], ()))
    frozen = [{row.frozen_bytes for row in rows if row.round_idx == index} for index in range(5)]
    assert frozen == [{base}, {0}, {weights}, {0}, {weights}]
    assert {row.downlink_bytes - row.frozen_bytes for row in rows} == {factors}


@pytest.mark.sampled(1)
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


@pytest.mark.slow
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
    run = fit(seeded(LitMLP), data, algorithm=ls.LoRA(2, aggregation=ls.FrozenA(), merge_every=1), max_epochs=3)
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
        fit(seeded(LitMLP), data, algorithm=ls.LoRA(2, merge_every=3), server_optimizer=ls.FedAdam())
