"""Models of other libraries, with random weights: planned, trained for a round, loaded back where they came from."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from federation import Fit
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from toy_models import LitNet, variant

import lightning_spectral as ls
from lightning_spectral.nn.cost import count_pass


def with_logits(model: nn.Module, logits: Callable[[nn.Module, Tensor], Tensor], example: Tensor) -> LitNet:
    """Any model, and how to get logits from it."""
    return variant(LitNet, forward=lambda self, x: logits(self.net, x))(model, example=example)


def tokens() -> TensorDataset:
    x = torch.randint(20, (24, 9), generator=torch.Generator().manual_seed(0))
    return TensorDataset(x[:, :-1], x[:, 1:])


def images() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(24, 3, 8, 8, generator=generator), torch.randint(3, (24,), generator=generator))


def transformers() -> Any:
    return pytest.importorskip("transformers", reason="comes with the `test` extra")


def timm() -> Any:
    return pytest.importorskip("timm", reason="timm needs torchvision, which has no build for a CPU-only torch").models


def gpt2() -> Any:
    sizes = {"vocab_size": 20, "n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 2}
    return transformers().GPT2LMHeadModel(transformers().GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))


def vit() -> Any:
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    config = transformers().ViTConfig(**sizes, image_size=8, patch_size=4, num_labels=3)
    return transformers().ViTForImageClassification(config)


def timm_vit() -> Any:
    sizes = {"img_size": 8, "patch_size": 4, "embed_dim": 16, "depth": 2, "num_heads": 2}
    return timm().VisionTransformer(**sizes, num_classes=3)


def timm_resnext() -> Any:
    sizes = {"num_classes": 3, "cardinality": 4, "base_width": 16, "channels": (8, 16, 16, 16)}
    return timm().ResNet(timm().resnet.Bottleneck, (1, 1, 1, 1), **sizes)


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module, Tensor], Tensor], Any, dict[str, int], int]] = {
    "transformers GPT-2": (gpt2, lambda model, x: model(input_ids=x).logits, tokens, {"*.c_attn": 3}, 12),
    "transformers ViT": (vit, lambda model, x: model(pixel_values=x).logits, images, {}, 12),
    "timm ViT": (timm_vit, lambda model, x: model(x), images, {"*.qkv": 3}, 12),
    "timm ResNeXt": (timm_resnext, lambda model, x: model(x), images, {}, 28),
}


@pytest.mark.parametrize("case", CASES)
def test_a_round_trains_it_and_its_own_class_loads_the_result(case: str, fit: Fit) -> None:
    make, logits, dataset, split, num_blocks = CASES[case]
    lit = with_logits(make(), logits, dataset().tensors[0][:2])
    plan = ls.validate(lit, layers=ls.LayerChoices(split=split))
    assert len(plan.blocks) == num_blocks
    assert not plan.problems
    algorithm = ls.SpectralSharding(keep_ratio=0.5, layers=plan)
    before = {name: lit.state_dict()[name].clone() for name in plan.sharded_weights}
    data = ls.FederatedDataModule(dataset(), ls.IIDPartitioner(num_clients=4), batch_size=4)
    fit(lit, data, algorithm=algorithm, clients_per_round=3)
    assert not [name for name, weight in before.items() if torch.equal(weight, lit.state_dict()[name])]

    plain = make()
    plain.load_state_dict(lit.net.state_dict(), strict=True)
    x = dataset().tensors[0][:4]
    with torch.no_grad():
        torch.testing.assert_close(logits(plain.eval(), x), lit.eval()(x))


def test_a_model_with_autograd_functions_of_its_own_has_a_cost_table() -> None:
    sizes = {"vocab_size": 50, "hidden_size": 32, "num_attention_heads": 2, "attention_head_size": 16}
    axes = {"axial_pos_shape": (4, 8), "axial_pos_embds_dim": (16, 16)}
    local = {"attn_layers": ["local"], "feed_forward_size": 64, "local_attn_chunk_length": 8}
    model = transformers().ReformerModel(transformers().ReformerConfig(**sizes, **axes, **local))
    assert "0.5" in str(ls.cost_table(model, ls.SpectralSharding(), [0.5], {"input_ids": torch.randint(50, (2, 32))}))


def test_attention_is_masked_as_in_training_where_costs_are_counted() -> None:
    """Given fake tensors, transformers would build a mask that it leaves out if nothing is padded."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    model = transformers().LlamaForCausalLM(transformers().LlamaConfig(vocab_size=50, **sizes))
    example = {"input_ids": torch.randint(50, (2, 16)), "attention_mask": torch.ones(2, 16, dtype=torch.long)}
    assert ls.cost_table(model, ls.FedAvg(), [1], example).full.kept_bytes == count_pass(model, example).kept_bytes
