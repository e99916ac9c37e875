"""What is particular to one model, or to the attention that several have."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_spectral import models
from lightning_spectral.models import SelfAttention
from lightning_spectral.models.language import GPT2Block
from lightning_spectral.models.vision import BasicBlock, CCTBlock, DropPath


def attention_by_loops(layer: SelfAttention, x: Tensor) -> Tensor:
    """Vaswani et al. (2017), equation (1), one head and one position at a time."""
    batch, length, width = x.shape
    size = width // layer.num_heads
    gathered = torch.zeros_like(x)
    for b in range(batch):
        for h in range(layer.num_heads):
            part = slice(h * size, (h + 1) * size)
            query, key, value = (linear(x[b])[:, part] for linear in (layer.query, layer.key, layer.value))
            for t in range(length):
                seen = t + 1 if layer.causal else length
                shares = (key[:seen] @ query[t] / math.sqrt(size)).softmax(0)
                gathered[b, t, part] = shares @ value[:seen]
    return layer.out(gathered)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("num_heads", [1, 2, 6])
def test_attention_is_the_formula(num_heads: int, causal: bool) -> None:
    layer, x = SelfAttention(6, num_heads, causal=causal).double(), torch.randn(2, 5, 6, dtype=torch.float64)
    torch.testing.assert_close(layer(x), attention_by_loops(layer, x), rtol=1e-12, atol=1e-12)


def test_bias_of_queries_keys_and_values_is_optional() -> None:
    with_bias, without = (SelfAttention(6, 2, qkv_bias=bias) for bias in (True, False))
    names = {name for name, _ in with_bias.named_parameters()} - {name for name, _ in without.named_parameters()}
    assert names == {"query.bias", "key.bias", "value.bias"}


def test_dropout_drops_only_while_training() -> None:
    layer, x = SelfAttention(6, 2, dropout=0.5), torch.ones(1, 8, 6)
    plain = SelfAttention(6, 2)
    plain.load_state_dict(layer.state_dict())
    assert not torch.equal(layer(x), plain(x))
    assert torch.equal(layer.eval()(x), plain(x))


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def scrambled(module: Any) -> Any:
    """``module`` in float64 with random parameters: a bias of zero, say, would hide mistakes."""
    generator = seeded(1)
    for parameter in module.double().parameters():
        parameter.data = torch.randn(parameter.shape, dtype=torch.float64, generator=generator)
    return module


def layer_norm(x: Tensor, layer: nn.LayerNorm) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt() * layer.weight + layer.bias


def from_transformers(theirs: Any) -> dict[str, Tensor]:
    """The weights of a ``GPT2LMHeadModel`` by the names of a `CharTransformer`; theirs are transposed and packed."""
    weights = {
        "characters.weight": theirs.transformer.wte.weight,
        "positions.weight": theirs.transformer.wpe.weight,
        "norm.weight": theirs.transformer.ln_f.weight,
        "norm.bias": theirs.transformer.ln_f.bias,
        "head.weight": theirs.lm_head.weight,
    }
    for i, block in enumerate(theirs.transformer.h):
        packed = zip(block.attn.c_attn.weight.chunk(3, 1), block.attn.c_attn.bias.chunk(3), strict=True)
        layers = dict(zip(("attention.query", "attention.key", "attention.value"), packed, strict=True))
        plain = {"attention.out": block.attn.c_proj, "expand": block.mlp.c_fc, "contract": block.mlp.c_proj}
        layers |= {name: (layer.weight, layer.bias) for name, layer in plain.items()}
        for name, (weight, bias) in layers.items():
            weights |= {f"blocks.{i}.{name}.weight": weight.T, f"blocks.{i}.{name}.bias": bias}
        for name, norm in (("norm1", block.ln_1), ("norm2", block.ln_2)):
            weights |= {f"blocks.{i}.{name}.weight": norm.weight, f"blocks.{i}.{name}.bias": norm.bias}
    return weights


class TestCharTransformer:
    def test_a_block_is_that_of_gpt_2(self) -> None:
        block = scrambled(GPT2Block(width=8, num_heads=2, dropout=0.1)).eval()
        x = torch.randn(2, 5, 8, dtype=torch.float64, generator=seeded())
        after = x + block.attention(layer_norm(x, block.norm1))
        wide = block.expand(layer_norm(after, block.norm2))
        # openai/gpt-2, src/model.py, `gelu`
        active = 0.5 * wide * (1 + torch.tanh(math.sqrt(2 / math.pi) * (wide + 0.044715 * wide**3)))
        torch.testing.assert_close(block(x), after + block.contract(active), rtol=1e-12, atol=1e-12)

    def test_a_later_character_changes_no_earlier_logits(self) -> None:
        model = models.CharTransformer(vocab_size=9, context_length=12, width=16, num_heads=2).eval()
        characters = torch.randint(9, (2, 12), generator=seeded())
        changed = characters.clone()
        changed[:, 7] = (changed[:, 7] + 1) % 9
        before, after = model(characters), model(changed)
        assert torch.equal(before[:, :7], after[:, :7])
        assert (before[:, 7:] != after[:, 7:]).any(2).all()

    def test_the_logits_are_those_of_transformers_gpt_2(self) -> None:
        transformers = pytest.importorskip("transformers", reason="needed only as an oracle")
        sizes = {"vocab_size": 11, "n_positions": 7, "n_embd": 16, "n_layer": 3, "n_head": 2}
        theirs = scrambled(transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes))).eval()
        ours = models.CharTransformer(11, context_length=7, width=16, num_heads=2).double().eval()
        ours.load_state_dict(from_transformers(theirs))
        characters = torch.randint(11, (3, 7), generator=seeded())
        torch.testing.assert_close(ours(characters), theirs(characters).logits, rtol=1e-12, atol=1e-12)

    def test_initial_weights_have_the_spread_of_gpt_2(self) -> None:
        model = models.CharTransformer(num_layers=3)
        branch = 0.02 / math.sqrt(6)  # two branches in each of three blocks
        expected = {"characters": 0.02, "positions": 0.01, "head": 0.02}
        for i in range(3):
            expected |= {f"blocks.{i}.attention.{name}": 0.02 for name in ("query", "key", "value")}
            expected |= {f"blocks.{i}.expand": 0.02}
            expected |= {f"blocks.{i}.attention.out": branch, f"blocks.{i}.contract": branch}
        for name, std in expected.items():
            weight = model.get_parameter(f"{name}.weight")
            # the standard deviation of N normal numbers itself has a standard deviation of std / sqrt(2 N)
            assert abs(weight.std().item() - std) < 5 * std / math.sqrt(2 * weight.numel()), name
        biases = [p for name, p in model.named_parameters() if name.endswith("bias")]
        assert not any(bias.any() for bias in biases)


class TestLSTMClassifier:
    def test_padding_is_not_read(self) -> None:
        model = models.LSTMClassifier(vocab_size=9, embedding_dim=8, hidden_size=8)
        words = torch.randint(1, 9, (3, 6), generator=seeded())
        words[1, 4:] = 0
        torch.testing.assert_close(model(torch.cat([words, torch.zeros(3, 20, dtype=torch.long)], dim=1)), model(words))
        torch.testing.assert_close(model(words[1:2, :4]), model(words[1:2]))

    def test_every_word_is_read(self) -> None:
        model = models.LSTMClassifier(vocab_size=9, embedding_dim=8, hidden_size=8)
        words = torch.randint(1, 9, (1, 5), generator=seeded())
        for position in range(5):
            changed = words.clone()
            changed[0, position] = changed[0, position] % 8 + 1
            assert not torch.equal(model(changed), model(words))

    def test_an_empty_text_has_logits(self) -> None:
        model = models.LSTMClassifier(vocab_size=9, embedding_dim=8, hidden_size=8)
        assert model(torch.zeros(2, 4, dtype=torch.long)).isfinite().all()

    @pytest.mark.parametrize("padding_idx", [0, 3])
    def test_the_example_has_no_padding(self, padding_idx: int) -> None:
        assert (models.LSTMClassifier(vocab_size=9, padding_idx=padding_idx).example_input() != padding_idx).all()


class TestCCT:
    def test_a_block_equals_the_authors_code(self) -> None:
        block = scrambled(CCTBlock(width=8, num_heads=2, mlp_ratio=2, attention_dropout=0.1, drop_path=0.1)).eval()
        x = torch.randn(2, 5, 8, dtype=torch.float64, generator=seeded())
        # SHI-Labs/Compact-Transformers, src/utils/transformers.py: the shortcut carries the normalised tokens
        after = layer_norm(x + block.attention(layer_norm(x, block.norm1)), block.norm2)
        wide = block.expand(after)
        active = wide * (1 + torch.erf(wide / math.sqrt(2))) / 2
        torch.testing.assert_close(block(x), after + block.contract(active), rtol=1e-12, atol=1e-12)

    def test_sequence_pooling_is_a_mean_weighted_by_a_softmax_over_tokens(self) -> None:
        model = scrambled(models.CCT(image_size=8, width=8, num_layers=1)).eval()
        tokens: list[Tensor] = []
        model.norm.register_forward_hook(lambda layer, args, output: tokens.append(output))
        logits = model(torch.randn(1, 3, 8, 8, dtype=torch.float64, generator=seeded()))
        scores = [math.exp(model.pool_weights(token).item()) for token in tokens[0][0]]
        pooled = sum(score * token for score, token in zip(scores, tokens[0][0], strict=True)) / sum(scores)
        torch.testing.assert_close(logits[0], model.head(pooled), rtol=1e-12, atol=1e-12)

    @pytest.mark.parametrize("image_size", [8, 9, 10, 11, 32])
    def test_there_is_a_position_for_each_token(self, image_size: int) -> None:
        model = models.CCT(image_size=image_size, width=8, num_layers=1)
        assert model(model.example_input()).shape == (1, 10)

    def test_stochastic_depth_rises_from_zero(self) -> None:
        rates = [module.p for module in models.CCT(width=8, num_layers=6).modules() if isinstance(module, DropPath)]
        assert rates == pytest.approx([0, 0.02, 0.04, 0.06, 0.08, 0.1])

    def test_a_branch_is_dropped_for_whole_examples_and_right_on_average(self) -> None:
        drop, num_examples, p = DropPath(0.25), 4000, 0.25
        kept = drop(torch.ones(num_examples, 3, 2)).flatten(1)
        assert torch.equal(kept.amin(1), kept.amax(1))
        assert kept.unique().tolist() == pytest.approx([0, 1 / (1 - p)])
        # kept / (1 - p) has variance p / (1 - p)
        assert abs(kept.mean().item() - 1) < 5 * math.sqrt(p / (1 - p) / num_examples)
        branch = torch.ones(2, 3)
        assert drop.eval()(branch) is branch


class TestResNet18:
    @pytest.mark.parametrize(("channels", "stride"), [(4, 1), (8, 1), (8, 2)])
    def test_a_block_is_that_of_he_et_al(self, channels: int, stride: int) -> None:
        block = scrambled(BasicBlock(4, channels, stride, num_groups=2))
        x = torch.randn(2, 4, 6, 6, dtype=torch.float64, generator=seeded())
        residual = F.conv2d(x, block.conv1.weight, stride=stride, padding=1)
        residual = F.group_norm(residual, 2, block.norm1.weight, block.norm1.bias).clamp(min=0)
        residual = F.conv2d(residual, block.conv2.weight, padding=1)
        residual = F.group_norm(residual, 2, block.norm2.weight, block.norm2.bias)
        shortcut = x
        if (channels, stride) != (4, 1):  # option B: a projection where the shape changes
            conv, norm = block.shortcut
            shortcut = F.group_norm(F.conv2d(x, conv.weight, stride=stride), 2, norm.weight, norm.bias)
        torch.testing.assert_close(block(x), (residual + shortcut).clamp(min=0), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("hidden_features", [5, None])
def test_the_cnn_is_the_net_of_its_sources(hidden_features: int | None) -> None:
    model = scrambled(models.FEMNISTCNN(3, image_size=8, channels=(2, 4), hidden_features=hidden_features))
    x = images = torch.randn(2, 1, 8, 8, dtype=torch.float64, generator=seeded())
    for conv in (model.conv1, model.conv2):
        x = F.max_pool2d(F.conv2d(x, conv.weight, conv.bias, padding="same").clamp(min=0), 2)
    x = x.flatten(1)
    if hidden_features:
        x = F.linear(x, model.hidden.weight, model.hidden.bias).clamp(min=0)
    torch.testing.assert_close(model(images), F.linear(x, model.head.weight, model.head.bias), rtol=1e-12, atol=1e-12)


def test_the_mlp_has_relu_between_its_layers_and_none_after_the_last() -> None:
    model = scrambled(models.MLP(in_features=6, hidden_features=(5, 4), num_classes=3))
    x = inputs = torch.randn(2, 2, 3, dtype=torch.float64, generator=seeded())
    x = x.flatten(1)
    for layer in model.hidden:
        x = (x @ layer.weight.T + layer.bias).clamp(min=0)
    torch.testing.assert_close(model(inputs), x @ model.head.weight.T + model.head.bias, rtol=1e-12, atol=1e-12)


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "heads that do not divide the width": (
        lambda: SelfAttention(6, 4),
        "`num_heads` must divide `width`, got 4 heads for width 6",
    ),
    "groups that do not divide the width": (
        lambda: models.ResNet18(num_groups=3),
        "`num_groups` must divide `width`, got 3 groups of 64 channels",
    ),
    "images too small for two poolings": (
        lambda: models.FEMNISTCNN(image_size=3),
        "`image_size` must be at least 4, for two 2x2 poolings, got 3",
    ),
    "images of another size": (
        lambda: models.CCT(width=8, num_layers=1)(torch.zeros(1, 3, 64, 64)),
        r"Images must be of shape \(3, 32, 32\), got \(3, 64, 64\)",
    ),
    "a sequence longer than the context": (
        lambda: models.CharTransformer(9, context_length=4, width=16)(torch.zeros(1, 5, dtype=torch.long)),
        "not be longer than `context_length`=4, got 5; cut it",
    ),
}


@pytest.mark.parametrize("wrong", REFUSED)
def test_sizes_that_do_not_fit_are_refused(wrong: str) -> None:
    call, message = REFUSED[wrong]
    with pytest.raises(ValueError, match=message):
        call()
