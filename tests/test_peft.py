"""Models with adapters of PEFT, unchanged: the base travels once, factors stay whole, and PEFT loads the result."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from federation import Fit, seeded
from test_third_party_models import gpt2, tokens
from torch import Tensor, nn
from toy_models import LitNet

import lightning_spectral as ls

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


@pytest.mark.parametrize(
    ("name", "algorithm"),
    [("LoRA", ls.FedAvg()), *((name, ls.SpectralSharding(keep_ratio=0.5)) for name in CONFIGS)],
    ids=lambda part: part if isinstance(part, str) else type(part).__name__,
)
def test_an_adapter_trains_and_peft_loads_it(name: str, algorithm: Any, fit: Fit, tmp_path: Path) -> None:
    lit = seeded(LitAdapted, name)
    plain = seeded(gpt2)
    before = {n: p.detach().clone() for n, p in lit.named_parameters()}
    data = ls.FederatedDataModule(tokens(), ls.IIDPartitioner(num_clients=4), batch_size=4)
    with warning_of(name, algorithm):
        ledger = fit(lit, data, algorithm=algorithm, max_epochs=2).ledger

    moved = {n for n, p in lit.named_parameters() if not torch.equal(p, before[n])}
    assert moved == {n for n, p in lit.named_parameters() if p.requires_grad}
    base = sum(4 * p.numel() for p in lit.parameters() if not p.requires_grad)
    assert [row.frozen_bytes for row in ledger.rows] == 4 * [base] + 4 * [0]
    assert all(row.downlink_bytes < base for row in ledger.rows[4:])

    lit.net.save_pretrained(tmp_path)
    loaded = peft.PeftModel.from_pretrained(plain, tmp_path).eval()
    x = tokens().tensors[0][:4]
    with torch.no_grad():
        torch.testing.assert_close(loaded(input_ids=x).logits, lit.eval()(x))


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
