"""What is counted of a forward pass is what torch's counter and the allocator say, of whole models and sub-models."""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from federation import seeded
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode
from toy_models import Net

import lightning_spectral as ls
from lightning_spectral.nn.cost import count_pass
from lightning_spectral.nn.trace import run_example

# Torch says that its own LSTM has a slower kernel for projections.
pytestmark = pytest.mark.filterwarnings("ignore:LSTM with projections")


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def twice() -> Net:
    """A layer that is called twice, and one in the middle that is never called."""
    layers = {name: nn.Linear(8, 8) for name in ("first", "middle", "unused", "last")}
    return Net(lambda net, x: net.last(net.middle(net.middle(net.first(x).relu()).relu())), **layers)


def attends(batch_first: bool, need_weights: bool) -> Net:
    """Cross-attention whose layout, masks and weights are options, between two linear layers."""

    def forward(net: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return net.after(net.attention(net.before(query), key=key, value=value, need_weights=need_weights)[0])

    attention = nn.MultiheadAttention(8, 2, dropout=0.1, kdim=6, vdim=4, batch_first=batch_first)
    return Net(forward, before=nn.Linear(8, 8), after=nn.Linear(8, 8), attention=attention)


class Block(nn.Module):
    """GPT-like: a packed qkv and torch's fused attention."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, width)
        self.norm, self.qkv, self.proj = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 32), nn.GELU(), nn.Dropout(0.1), nn.Linear(32, width))
        self.head = nn.Linear(width, 11)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        q, k, v = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(mixed.transpose(1, 2).flatten(2))
        return self.head(x + self.mlp(x))


def recurrent(layer: nn.Module, lengths: list[int] | None = None) -> Net:
    """A recurrent layer over an embedding, of packed sequences where lengths are given."""

    def forward(net: Any, x: Tensor) -> Tensor:
        x = net.before(x)
        states = net.layer(x if lengths is None else pack_padded_sequence(x, lengths, batch_first=True))[1]
        return net.after((states[0] if isinstance(states, tuple) else states)[-1])

    return Net(forward, before=nn.Linear(5, 6), layer=layer, after=nn.Linear(7, 2))


def vit() -> Net:
    """Patches, torch's encoder, mean pooling."""
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, norm_first=True, activation="gelu")
    return Net(
        lambda net, images: net.head(net.encoder(net.patches(images).flatten(2).transpose(1, 2)).mean(1)),
        patches=nn.Conv2d(3, 16, 4, stride=4),
        encoder=nn.TransformerEncoder(layer, 2, enable_nested_tensor=False),
        head=nn.Linear(16, 5),
    )


class Checkpointed(nn.Sequential):
    """Keeps nothing of its middle."""

    def forward(self, x: Tensor) -> Tensor:
        first, *middle, last = self
        return last(checkpoint(nn.Sequential(*middle), first(x), use_reentrant=False, preserve_rng_state=False))


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 24), nn.ReLU(), nn.Linear(24, 20), nn.Dropout(0.5), nn.Linear(20, 3))


def cnn() -> nn.Sequential:
    return nn.Sequential(
        *(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(2)),
        *(nn.Conv2d(8, 12, 3, stride=2, padding=1, padding_mode="reflect"), nn.GroupNorm(2, 12), nn.ReLU()),
        *(nn.Conv2d(12, 6, (2, 3), padding="same", dilation=2, bias=False), nn.Flatten(), nn.Linear(96, 4)),
    )


def grouped() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv1d(4, 8, 3), nn.ReLU(), nn.Conv1d(8, 12, 5, groups=2), nn.ReLU(), nn.Conv1d(12, 12, 1, groups=3),
        nn.Flatten(), nn.Linear(12 * 14, 2),
    )  # fmt: skip


ANY: dict[str, tuple[Callable[[], nn.Module], Any, dict[str, Any]]] = {
    "mlp": (mlp, normal(7, 6), {}),
    "cnn": (cnn, normal(5, 3, 18, 18), {}),
    "one image without a batch": (lambda: nn.Sequential(*(nn.Conv2d(3, 3, 3) for _ in range(3))), normal(3, 9, 9), {}),
    "cnn, outputs cut": (cnn, normal(5, 3, 18, 18), {"output_ratio": 0.3}),
    "cnn, spatial, ends sharded": (
        cnn, normal(5, 3, 18, 18), {"convolutions": "spatial", "keep_first_and_last_dense": False},
    ),
    "mlp, outputs cut": (mlp, normal(2000, 6), {"output_ratio": 0.5}),
    "vit, outputs cut": (vit, normal(3, 3, 8, 8), {"output_ratio": 0.4}),
    "grouped": (grouped, normal(4, 4, 20), {}),
    "three dimensions": (lambda: nn.Sequential(*(nn.Conv3d(2, 2, 2) for _ in range(3))), normal(2, 2, 5, 5, 5), {}),
    "twice": (twice, normal(9, 8), {}),
    "attention, sequence first": (
        lambda: attends(False, True), (normal(5, 3, 8), normal(7, 3, 6), normal(7, 3, 4)), {},
    ),
    "attention, by name": (
        lambda: attends(True, False), {"query": normal(3, 5, 8), "key": normal(3, 7, 6), "value": normal(3, 7, 4)}, {},
    ),
    "gpt": (Block, torch.arange(20).view(2, 10) % 11, {"split": {"qkv": 3}}),
    "vit": (vit, normal(3, 3, 8, 8), {}),
    "checkpointed": (lambda: Checkpointed(*mlp()), normal(7, 6), {}),
}  # fmt: skip
RECURRENT: dict[str, tuple[Callable[[], nn.Module], Any, dict[str, Any]]] = {
    "lstm": (lambda: recurrent(nn.LSTM(6, 7, num_layers=2, dropout=0.1)), normal(4, 3, 5), {}),
    "lstm, projected": (lambda: recurrent(nn.LSTM(6, 9, proj_size=7, bidirectional=True)), normal(4, 3, 5), {}),
    "gru, packed": (lambda: recurrent(nn.GRU(6, 7, batch_first=True), [4, 2, 1]), normal(3, 4, 5), {}),
    "gru, longer": (lambda: recurrent(nn.GRU(6, 7)), normal(9, 3, 5), {}),
    "rnn, dense": (lambda: nn.Sequential(nn.Linear(5, 5), recurrent(nn.RNN(6, 7))), normal(4, 3, 5), {}),
}
EVERY = {**ANY, **RECURRENT}


def models(name: str) -> Iterator[tuple[nn.Module, Any]]:
    """The whole module, and its sub-models, with the example."""
    make, example, options = EVERY[name]
    module = seeded(make)
    yield module, example
    for keep_ratio in (0.1, 0.5, 1.0):
        yield ls.replace_layers(module, keep_ratio, example, ls.LayerChoices(**options)), example


def flops(module: nn.Module, example: Any) -> int:
    """By torch's counter, with kernels that it can see into."""
    plain = (
        torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH),
        torch.backends.mkldnn.flags(enabled=False),
    )
    with plain[0], plain[1], FlopCounterMode(display=False) as counter:
        run_example(copy.deepcopy(module), example)
    return counter.get_total_flops()


def live_bytes(module: nn.Module, example: Any) -> int:
    """What a forward pass has allocated and not given back at its end, by torch's profiler; its output left out."""
    with torch.profiler.profile(profile_memory=True, activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        output = run_example(module, example)  # that of a linear layer, which autograd does not keep
    return sum(event.self_cpu_memory_usage for event in profiler.events()) - output.nbytes


@pytest.mark.sampled(3)
@pytest.mark.filterwarnings("ignore:TF32 acceleration on top of oneDNN")  # said by `torch.backends.mkldnn.flags`
@pytest.mark.parametrize("name", EVERY)
def test_multiplications_are_those_that_torch_counts(name: str) -> None:
    for model, example in models(name):
        assert 2 * count_pass(copy.deepcopy(model), example).macs == flops(model, example)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", [name for name in EVERY if "without a batch" not in name and "three" not in name])
def test_bytes_kept_are_those_that_the_allocator_keeps(name: str) -> None:
    for model, example in models(name):
        run_example(model, example)  # what is allocated once only
        counted = count_pass(copy.deepcopy(model), example)
        # A Python number that multiplies, here that of the scores, is kept as 8 bytes that hooks are not shown.
        unseen = 8 if name == "attention, sequence first" else 0
        assert counted.kept_bytes == live_bytes(model, example) - unseen


def test_counting_leaves_no_hook_and_no_random_state() -> None:
    module, state = recurrent(nn.LSTM(6, 7)), torch.get_rng_state()
    count_pass(module, normal(4, 3, 5))
    assert torch.equal(state, torch.get_rng_state())
    assert not [layer for layer in module.modules() if layer._forward_hooks or layer._forward_pre_hooks]
