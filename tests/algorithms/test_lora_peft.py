"""Adapters of PEFT, trained as they are or by `ls.LoRA`: the base travels once, and PEFT loads the result."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from aggregations import AGGREGATIONS
from federation import Fit, same_state, seeded
from one_client import client_of
from test_third_party_models import gpt2, tokens
from torch import Tensor, nn
from toy_models import LitNet, plain_sgd, variant

import lightning_spectral as ls
from lightning_spectral.nn.adapters import adapted_layers

peft = pytest.importorskip("peft", reason="comes with the `test` extra")
pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated"),  # PEFT asks transformers for it
    pytest.mark.filterwarnings("ignore:The PEFT config's `base_model_name_or_path`"),
]
LORA = {"r": 4, "lora_alpha": 8, "fan_in_fan_out": True}
CONFIGS = {
    "LoRA": peft.LoraConfig(target_modules=["c_attn", "c_proj"], **LORA),
    "DoRA": peft.LoraConfig(target_modules=["c_attn"], use_dora=True, **LORA),
    "LoRA and whole layers": peft.LoraConfig(target_modules=["c_attn"], modules_to_save=["c_fc"], **LORA),
    "IA3": peft.IA3Config(target_modules=["c_attn"], feedforward_modules=[], fan_in_fan_out=True),
    "VeRA": peft.VeraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True),
}
X = tokens().tensors[0][:4]


def federation() -> ls.FederatedDataModule:
    return ls.FederatedDataModule(tokens(), ls.IIDPartitioner(num_clients=4), batch_size=4)


class LitAdapted(LitNet):
    def __init__(self, name: str) -> None:
        super().__init__(peft.get_peft_model(gpt2(), CONFIGS[name]))
        self.shards = name == "LoRA and whole layers"

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.net(input_ids=x).logits
        return logits

    def configure_optimizers(self) -> Any:
        if self.shards:
            return torch.optim.SGD(self.parameters(), lr=0.1)
        return torch.optim.AdamW(self.parameters(), lr=0.01)  # with no sharded layer, nothing is clipped or decayed


@contextmanager
def warning_of(name: str, algorithm: Any) -> Iterator[None]:
    """Expect a warning that spectral sharding shards no layer, unless the user trains some layers whole."""
    if isinstance(algorithm, ls.FedAvg) or name == "LoRA and whole layers":
        yield
    else:
        with pytest.warns(ls.SpectralWarning, match="shards no layer of LitAdapted, so clients train"):
            yield


def check_peft_loads(lit: LitAdapted, folder: Path, **tolerance: float) -> None:
    """Fail unless PEFT, with the adapter that it loads and another base, computes what the module computes."""
    base = seeded(gpt2)
    lit.net.save_pretrained(folder)
    loaded = peft.PeftModel.from_pretrained(base, folder).eval()
    with torch.no_grad():
        torch.testing.assert_close(loaded(input_ids=X).logits, lit.eval()(X), **tolerance)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("name", "algorithm"),
    [("LoRA", ls.FedAvg()), *((name, ls.SpectralSharding(keep_ratio=0.5)) for name in CONFIGS)],
    ids=lambda part: part if isinstance(part, str) else type(part).__name__,
)
def test_an_adapter_trains_and_peft_loads_it(name: str, algorithm: Any, fit: Fit, tmp_path: Path) -> None:
    lit = seeded(LitAdapted, name)
    before = {n: p.detach().clone() for n, p in lit.named_parameters()}
    with warning_of(name, algorithm):
        ledger = fit(lit, federation(), algorithm=algorithm, max_epochs=2).ledger

    moved = {n for n, p in lit.named_parameters() if not torch.equal(p, before[n])}
    assert moved == {n for n, p in lit.named_parameters() if p.requires_grad}
    base = sum(4 * p.numel() for p in lit.parameters() if not p.requires_grad)
    assert [row.frozen_bytes for row in ledger.rows] == 4 * [base] + 4 * [0]
    assert all(row.downlink_bytes < base for row in ledger.rows[4:])
    check_peft_loads(lit, tmp_path)


@pytest.mark.parametrize("rank", [4, 32])
def test_the_plan_names_the_factors_of_lora(rank: int) -> None:
    net = peft.get_peft_model(gpt2(), peft.LoraConfig(target_modules=["c_attn"], **{**LORA, "r": rank}))
    plan = ls.nn.plan_layers(net)
    reasons = {layer.name.rpartition("c_attn.")[2]: layer.reason for layer in plan.layers if "c_attn" in layer.name}
    assert reasons == {"base_layer": "frozen", "lora_A.default": "low-rank factor", "lora_B.default": "low-rank factor"}
    assert not plan.problems


class Adapted(nn.Module):
    """LoRA as another library might write it, under other names."""

    def __init__(self, frozen: bool = True, rank: int = 2, out: int = 6) -> None:
        super().__init__()
        self.base = nn.Linear(8, 6).requires_grad_(not frozen)
        self.down = nn.ModuleList([nn.Linear(8, rank, bias=False)])
        self.up = nn.ModuleDict({"mine": nn.Linear(rank, out, bias=False)})


@pytest.mark.parametrize(
    ("adapted", "is_factor"),
    [(Adapted(), True), (Adapted(frozen=False), False), (Adapted(rank=6), False), (Adapted(out=5), False)],
    ids=["frozen base", "trained base", "full rank", "other width"],
)
def test_a_narrow_pair_beside_a_frozen_layer_of_its_ends_is_one_of_factors(adapted: Any, is_factor: bool) -> None:
    net = nn.Sequential(nn.Linear(8, 8), adapted, nn.Linear(6, 3))
    reasons = {layer.name: layer.reason for layer in ls.nn.plan_layers(net).layers}
    expected = "low-rank factor" if is_factor else "affine"
    assert (reasons["1.down.0"], reasons["1.up.mine"]) == (expected, expected)


def test_a_module_that_shards_nothing_has_costs_and_budgets() -> None:
    net = nn.Sequential(nn.Linear(8, 8).requires_grad_(False), nn.Linear(8, 8).requires_grad_(False), nn.Linear(8, 3))
    table = ls.cost_table(net, ls.SpectralSharding(), [0.5], torch.zeros(1, 8))
    assert table.at[0.5] == table.full
    assert table.full.frozen_bytes == 2 * 4 * 72
    assert table.full.downlink_bytes == table.full.uplink_bytes == 4 * 27
    assert "down once" in str(table)
    assert ls.largest_that_fits(net, ls.SpectralSharding(), torch.zeros(1, 8), budget_bytes=8 * 27) == 1.0
    with pytest.raises(ValueError, match="the smallest sub-model takes 216"):
        ls.largest_that_fits(net, ls.SpectralSharding(), torch.zeros(1, 8), budget_bytes=8 * 27 - 1)


def test_a_plan_made_before_a_layer_was_frozen_is_refused() -> None:
    net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 3))
    plan = ls.nn.plan_layers(net)
    net[1].requires_grad_(False)
    with pytest.raises(ValueError, match=r"1\.weight would be sharded but is frozen"):
        ls.cost_table(net, ls.SpectralSharding(layers=plan), [0.5], torch.zeros(1, 8))


MIXED = {2: 0.5, 4: 0.5}
KEPT = [aggregation for aggregation in AGGREGATIONS if not isinstance(aggregation, ls.StackedProducts)]


def trained(name: str = "LoRA") -> LitAdapted:
    """A module whose adapters, dropout aside, already do something."""
    lit = seeded(LitAdapted, name)
    for layer in adapted_layers(lit, ["*"], ()):
        up = lit.get_parameter(layer.parts["B"])
        nn.init.normal_(up, std=0.1, generator=torch.Generator().manual_seed(up.numel()))
    return lit


@pytest.mark.sampled(1)
@pytest.mark.parametrize("aggregation", [ls.SampledTerms(), ls.PaddedFactors()], ids=repr)
@pytest.mark.parametrize("name", ["LoRA", "LoRA and whole layers"])
def test_equal_ranks_are_fed_avg_of_the_model_of_peft(name: str, aggregation: Any, fit: Fit) -> None:
    run = partial(fit, data=federation(), max_epochs=2)
    ours = run(seeded(LitAdapted, name), algorithm=ls.LoRA(4, aggregation=aggregation))
    theirs = run(seeded(LitAdapted, name), algorithm=ls.FedAvg())
    assert same_state(ours.state, theirs.state)
    assert not same_state(ours.state, seeded(LitAdapted, name).state_dict())
    assert ours.ledger.rows == theirs.ledger.rows


@pytest.mark.sampled(1)
@pytest.mark.parametrize("aggregation", KEPT, ids=repr)
def test_mixed_ranks_train_and_peft_loads_the_adapter(aggregation: Any, fit: Fit, tmp_path: Path) -> None:
    lit = seeded(LitAdapted, "LoRA")
    before = {name: p.detach().clone() for name, p in lit.named_parameters()}
    ledger = fit(lit, federation(), algorithm=ls.LoRA(MIXED, aggregation=aggregation), max_epochs=2).ledger

    moved = {name for name, p in lit.named_parameters() if not torch.equal(p, before[name])}
    both = {name for name, p in lit.named_parameters() if p.requires_grad}
    assert moved == ({name for name in both if "lora_B" in name} if isinstance(aggregation, ls.FrozenA) else both)
    base = sum(4 * p.numel() for name, p in before.items() if name not in both)
    whole = sum(4 * before[name].numel() for name in both)
    assert [row.frozen_bytes for row in ledger.rows] == 4 * [base] + 4 * [0]
    for row in ledger.rows[4:]:
        omega = 4 * round(4 * row.keep_ratio) * len(adapted_layers(lit, ["*"], ())) * aggregation.has_multipliers
        assert row.downlink_bytes == (whole if aggregation.folds else row.keep_ratio * whole) + omega
    check_peft_loads(lit, tmp_path, rtol=0, atol=0)
    assert (tmp_path / "adapter_model.safetensors").exists()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("aggregation", [ls.SampledTerms(), ls.FrozenA(), ls.AlternatingFactors()], ids=repr)
def test_nobody_trains_and_a_trained_adapter_stays_to_the_last_bit(aggregation: Any, fit: Fit) -> None:
    lit = trained()
    before = {name: value.clone() for name, value in lit.state_dict().items()}
    after = fit(lit, federation(), algorithm=ls.LoRA(MIXED, aggregation=aggregation), max_epochs=2, local_epochs=0)
    assert same_state(after.state, before)


def test_an_adapter_that_is_loaded_before_the_fit_is_where_it_begins(fit: Fit) -> None:
    algorithm = ls.LoRA(MIXED)
    model = ls.FederatedModule(seeded(LitAdapted, "LoRA"), algorithm=algorithm, clients_per_round=4)
    model.module.load_state_dict(trained().state_dict())
    expected = fit(trained(), federation(), algorithm=algorithm)
    assert same_state(fit(model, federation()).state, expected.state)


@pytest.mark.parametrize("rslora", [False, True])
def test_a_client_computes_the_terms_that_it_has_with_the_scale_of_peft(rslora: bool) -> None:
    config = peft.LoraConfig(target_modules=["c_attn"], use_rslora=rslora, **LORA)
    lit = seeded(nn.ModuleDict, {"net": peft.get_peft_model(gpt2(), config)})
    kept = torch.tensor([0, 3])
    algorithm = ls.LoRA(MIXED)
    client = client_of(algorithm.bind(lit, algorithm.new_state(lit, 0)).client_side, lit, 0.5)
    for layer in adapted_layers(lit, ["*"], ()):
        a, b = (lit.get_parameter(layer.parts[part]).data for part in "AB")
        nn.init.normal_(b, std=0.1, generator=torch.Generator().manual_seed(1))
        client.get_parameter(layer.parts["A"]).data.copy_(a[kept])
        client.get_parameter(layer.parts["B"]).data.copy_(b[:, kept])
        client.get_buffer(layer.parts["omega"]).copy_(torch.tensor([1.0, 2.0]))
        b.mul_(torch.tensor([1.0, 0.0, 0.0, 2.0]))
    outputs: list[Tensor] = [net["net"].eval()(input_ids=X).logits for net in (lit, client)]
    torch.testing.assert_close(*outputs)


def as_it_is(net: Any) -> None:
    pass


def second_adapter(net: Any) -> None:
    net.add_adapter("other", CONFIG)
    net.base_model.set_adapter(["default", "other"])


def freeze(net: Any) -> None:
    for name, parameter in net.named_parameters():
        parameter.requires_grad_("lora_B" in name)


CONFIG = peft.LoraConfig(target_modules=["c_attn"], **LORA)
PROMPTS = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
FEDAVG = "Train the model as it is with `FedAvg`"
REFUSED: dict[str, tuple[Any, Any, dict[str, Any], str]] = {
    "IA3": (CONFIGS["IA3"], as_it_is, {}, f"adapters are of the kind IA3; .*c_attn' is a ia3.layer.Linear.*{FEDAVG}"),
    "VeRA": (CONFIGS["VeRA"], as_it_is, {}, f"of the kind VERA.*{FEDAVG}"),
    "prompts": (PROMPTS, as_it_is, {}, f"of the kind PROMPT_TUNING.*{FEDAVG}"),
    "DoRA": (CONFIGS["DoRA"], as_it_is, {}, f"has a variant of LoRA, such as DoRA.*{FEDAVG}"),
    "embedding": (
        peft.LoraConfig(target_modules=["wpe"], **LORA),
        as_it_is,
        {},
        rf"wpe' is a lora\.layer\.Embedding.*{FEDAVG}",
    ),
    "integers": (
        CONFIG,
        lambda net: net.get_submodule("base_model.model.transformer.h.0.attn.c_attn.base_layer")._parameters.update(
            weight=nn.Parameter(torch.zeros(32, 96, dtype=torch.int8), requires_grad=False)
        ),
        {},
        rf"h\.0\.attn\.c_attn' adapts a weight of type torch\.int8.*{FEDAVG}",
    ),
    "two at once": (CONFIG, second_adapter, {}, f"has 2 active adapters.*{FEDAVG}"),
    "merged": (CONFIG, lambda net: net.merge_adapter(), {}, f"has an adapter that is merged.*{FEDAVG}"),
    "another rank": (CONFIG, as_it_is, {"rank": 8}, r"largest `rank` must be .* 4 for '.*c_attn', got 8"),
    "layers": (CONFIG, as_it_is, {"layers": ["*.1.attn.c_attn"]}, r"`layers` leaves out '.*\.0\.attn\.c_attn'"),
    "alpha": (CONFIG, as_it_is, {"alpha": 8.0}, r"`alpha` must be None where PEFT .* got 8\.0; .*`lora_alpha`"),
    "stacked": (CONFIG, as_it_is, {"aggregation": ls.StackedProducts()}, "StackedProducts changes the base"),
    "merged every round": (CONFIG, as_it_is, {"merge_every": 2}, "`merge_every=2` changes the base"),
    "frozen": (CONFIG, freeze, {}, r"lora_A\.default\.weight is frozen, and SampledTerms trains it.*use FrozenA"),
    "train": (CONFIG, as_it_is, {"train": ["*.lora_A"]}, r"`train`: '\*\.lora_A' matches no trainable"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_plain_lora_is_refused_by_its_name(case: str) -> None:
    config, change, options, message = REFUSED[case]
    lit = seeded(LitAdapted, "LoRA")
    lit.net = peft.get_peft_model(gpt2(), config)
    change(lit.net)
    with pytest.raises(ValueError, match=message):
        ls.FederatedModule(lit, algorithm=ls.LoRA(**{"rank": 4, **options}), clients_per_round=1)


def test_a_frozen_a_trains_with_frozen_a(fit: Fit) -> None:
    lit = seeded(variant(LitAdapted, configure_optimizers=plain_sgd()), "LoRA")
    freeze(lit.net)
    before = {name: value.clone() for name, value in lit.state_dict().items()}
    after = fit(lit, federation(), algorithm=ls.LoRA(4, aggregation=ls.FrozenA())).state
    assert {name for name in after if not torch.equal(after[name], before[name])} == {n for n in after if "lora_B" in n}


def plain() -> LitNet:
    """The same model without PEFT, with an additional head."""
    lit: Any = variant(LitNet, forward=lambda self, x: self.scale * self.head(self.net(input_ids=x).logits))(
        gpt2(), lr=1.0
    )
    lit.head, lit.scale = nn.Linear(20, 20), nn.Parameter(torch.ones(()))
    return lit


@pytest.mark.sampled(1)
@pytest.mark.parametrize("train", [[], ["net.*.ln_*"]], ids=["adapters", "adapters and norms"])
@pytest.mark.parametrize("rank", [3, {1: 0.5, 3: 0.5}], ids=["equal", "mixed"])
def test_peft_computes_what_a_plain_module_has_learned(rank: Any, train: Any, fit: Fit, tmp_path: Path) -> None:
    lit, base = seeded(plain), seeded(gpt2)
    algorithm = ls.LoRA(rank, layers=["*.0.attn.c_attn", "*.1.mlp.c_*"], train=train)
    fitted = fit(lit, federation(), algorithm=algorithm, max_epochs=2)
    ls.algorithms.save_peft_adapter(fitted.model, tmp_path / "adapter", submodule="net")
    before = base(input_ids=X).logits
    loaded = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    expected = lit.eval().net(input_ids=X).logits
    torch.testing.assert_close(loaded(input_ids=X).logits, expected)
    assert not torch.allclose(before, expected, rtol=1e-2)
    assert len([name for name, _ in loaded.named_modules() if name.endswith("lora_A")]) == 3


@pytest.mark.parametrize(
    ("algorithm", "message"),
    [
        (ls.FedAvg(), "Only a federation with LoRA has an adapter, got FedAvg"),
        (ls.LoRA(2, aggregation=ls.StackedProducts(), layers=["net.*"]), "StackedProducts changes the base"),
        (ls.LoRA(2, merge_every=1, layers=["net.*"]), "`merge_every` changes the base"),
        (ls.LoRA(2, layers=["net.*", "head"]), "`submodule`: 'head' is trained but not part of 'net'"),
        (ls.LoRA(2, layers=["*.c_attn"], train=["scale"]), "`submodule`: '' is trained but not part of 'net'"),
        (ls.LoRA(2, layers=["*.c_attn"], train=["*.c_attn.bias"]), "cannot save .* since .*c_attn' has an adapter"),
    ],
    ids=lambda part: "" if isinstance(part, str) else repr(part),
)
def test_what_is_no_adapter_of_peft_is_not_saved_as_one(algorithm: Any, message: str, tmp_path: Path) -> None:
    model = ls.FederatedModule(plain(), algorithm=algorithm, clients_per_round=1)
    with pytest.raises(ValueError, match=message):
        ls.algorithms.save_peft_adapter(model, tmp_path, submodule="net")
    assert not list(tmp_path.iterdir())


def test_adapters_of_peft_are_saved_by_peft(tmp_path: Path) -> None:
    model = ls.FederatedModule(seeded(LitAdapted, "LoRA"), algorithm=ls.LoRA(4), clients_per_round=1)
    with pytest.raises(ValueError, match="save it with its own `save_pretrained`"):
        ls.algorithms.save_peft_adapter(model, tmp_path)
