import math

import pytest
import torch
from torch import Tensor

from lightning_spectral.models import SelfAttention


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
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layer = SelfAttention(6, num_heads, causal=causal).double()
        x = torch.randn(2, 5, 6, dtype=torch.float64)
    torch.testing.assert_close(layer(x), attention_by_loops(layer, x), rtol=1e-12, atol=1e-12)


def test_bias_of_queries_keys_and_values_is_optional() -> None:
    with_bias, without = (SelfAttention(6, 2, qkv_bias=bias) for bias in (True, False))
    names = {name for name, _ in with_bias.named_parameters()} - {name for name, _ in without.named_parameters()}
    assert names == {"query.bias", "key.bias", "value.bias"}


def test_dropout_drops_only_while_training() -> None:
    layer, x = SelfAttention(6, 2, dropout=0.5), torch.ones(1, 8, 6)
    plain = SelfAttention(6, 2)
    plain.load_state_dict(layer.state_dict())
    with torch.random.fork_rng():
        torch.manual_seed(0)
        assert not torch.equal(layer(x), plain(x))
        assert torch.equal(layer.eval()(x), plain(x))


def test_heads_must_divide_the_width() -> None:
    with pytest.raises(ValueError, match="`num_heads` must divide `width`, got 4 heads for width 6"):
        SelfAttention(6, 4)
