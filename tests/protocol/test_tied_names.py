"""A tensor of several names: a pattern that matches any of them means the tensor, wherever patterns are given."""

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from federation import Fit, seeded
from observed_runs import acting
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import lightning_spectral as ls
from lightning_spectral.algorithms.base import Known
from lightning_spectral.algorithms.filter import Plan
from lightning_spectral.protocol.buffer_rules import averaged_parameters, buffer_rules, check_averaged_parameters


class LitTied(pl.LightningModule):
    """A language model whose head has the weight of its embedding, and two layers that share a buffer."""

    example_input_array = torch.zeros(2, 5, dtype=torch.int64)

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.body, self.head = nn.Embedding(7, 4), nn.Linear(4, 4), nn.Linear(4, 7)
        self.head.weight = self.embed.weight
        self.body.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.head.register_buffer("count", self.body.count)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(self.embed(x))))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        (x,) = batch
        return nn.functional.cross_entropy(self(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.5)


def sentences() -> ls.FederatedDataModule:
    words = torch.randint(7, (40, 6), generator=torch.Generator().manual_seed(0))
    return ls.FederatedDataModule(TensorDataset(words), ls.IIDPartitioner(4), batch_size=5)


@pytest.mark.parametrize("pattern", ["head.*", "embed.*", "head.weight"])
def test_what_is_personal_by_any_of_its_names_never_leaves(pattern: str, fit: Fit) -> None:
    sent: list[set[str]] = []
    watch = acting(on_client_end=lambda trainer, model, turn: sent.append(set(turn.upload.tensors)))
    before = seeded(LitTied).state_dict()
    fitted = fit(seeded(LitTied), sentences(), filters=[ls.Personal([pattern])], max_epochs=2, callbacks=[watch])
    assert len(sent) == 8
    assert not any("embed.weight" in names for names in sent)
    assert torch.equal(fitted.module.embed.weight, before["embed.weight"])
    assert not torch.equal(fitted.module.body.weight, before["body.weight"])
    assert not torch.equal(fitted.model.own_model(0)["embed.weight"], before["embed.weight"])


@pytest.mark.parametrize("name", ["body.count", "head.count"])
def test_a_rule_for_any_name_of_a_buffer_holds(name: str) -> None:
    assert buffer_rules(LitTied(), {name: "max"}).limits.keys() == {"body.count"}


def test_rules_that_contradict_each_other_are_refused_with_both_names() -> None:
    rules: Any = {"body.*": "min", "head.*": "max"}
    with pytest.raises(ValueError, match=r"'min' to `body.count` and 'max' to `head.count`, which are one tensor"):
        buffer_rules(LitTied(), rules)


def test_averaged_parameters_are_found_by_any_name() -> None:
    lit = LitTied()
    lit.averaged_parameters = ["head.weight"]
    lit.embed.requires_grad_(False)
    check_averaged_parameters(lit)
    assert averaged_parameters(lit) == {"embed.weight"}


def test_what_is_excluded_by_any_name_is_sent_whole() -> None:
    assert ls.FIARSE(exclude=["head.*"]).masked_weights(LitTied()) == ("body.weight",)
    assert ls.FIARSE(exclude=["body.*"]).masked_weights(LitTied()) == ("embed.weight",)


def test_a_layer_that_is_excluded_from_the_cut_keeps_its_tied_weight() -> None:
    plan = ls.nn.width_plan(LitTied(), exclude=["head"])
    assert "embed.weight" not in {name for group in plan.groups for name in group.tensors}


def test_lora_trains_whole_what_it_is_told_by_any_name() -> None:
    algorithm = ls.LoRA(2, train=["head"])
    lit = LitTied()
    half = algorithm.bind(lit, algorithm.new_state(lit, 0), Known(Plan(lit, algorithm).rules()))
    assert {"embed.weight", "head.bias"} <= set(half.client_side.returned)
