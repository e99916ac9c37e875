"""What Zampling could save on the part of a model that spectral sharding leaves dense: first and last layers, biases.

    python studies/zampling/remainder.py     # prints a table

The bytes of an upload: all of them, the dense part, and the part of it that Zampling could compress, which excludes the
parameters of normalisation layers. The ViT is that of the package transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import product
from typing import NamedTuple

from torch import nn

import lightning_spectral as ls
from lightning_spectral.client.forms import Forms
from lightning_spectral.models import CCT, MLP, ResNet18
from lightning_spectral.nn.zampling import Compression
from lightning_spectral.protocol.exchange import travelling_tensors

KEEP_RATIOS = (0.1, 0.2)
FACTOR = 32
BYTES = 4  # per value


class Way(NamedTuple):
    """Bytes from a client to the server: all, those of dense tensors, and those that Zampling could compress."""

    all: int
    dense: int
    compressible: int


def way(net: nn.Module, keep_ratio: float, layers: ls.LayerChoices) -> Way:
    """Return the bytes of one way, for clients of one keep ratio."""
    sharding = ls.SpectralSharding(keep_ratio=keep_ratio, layers=layers)
    sharded = sharding.plan(net).sharded_weights
    weights = Compression(FACTOR).weights_of(net)
    dense = BYTES * sum(tensor.numel() for tensor in travelling_tensors(net, sharded).values())
    with Forms(net, sharding.bind(net).client_side.take_form).client(keep_ratio) as client:
        own = dict(client.named_parameters())
        factors = sum(parameter.numel() for name, parameter in own.items() if name.rpartition(".")[2] in ("u", "v"))
    compressible = BYTES * sum(weight.num_values for weight in weights if weight.name not in sharded)
    return Way(dense + BYTES * factors, dense, compressible)


def vit() -> nn.Module:
    """Return ViT-Ti with patches of 4 x 4 pixels, for images of 32 x 32."""
    import transformers  # not needed by the other networks

    config = transformers.ViTConfig(
        hidden_size=192,
        num_hidden_layers=12,
        num_attention_heads=3,
        intermediate_size=768,
        image_size=32,
        patch_size=4,
        num_labels=10,
    )
    net: nn.Module = transformers.ViTForImageClassification(config)
    return net


NETS: Mapping[str, Callable[[], nn.Module]] = {
    "ResNet-18": lambda: ResNet18(10),
    "ViT-Ti/4": vit,
    "CCT-6/3x2": lambda: CCT(10),
    "MLP, 784-200-200-10": lambda: MLP(784),
}


def main() -> None:
    print(f"| | keep ratio | kilobytes one way | of them dense | saved by Zampling, m/n = {FACTOR} | by sharding all |")
    print("| --- " * 6 + "|")
    for (name, make), keep_ratio in product(NETS.items(), KEEP_RATIOS):
        net = make()
        found = way(net, keep_ratio, ls.LayerChoices())
        all_sharded = way(net, keep_ratio, ls.LayerChoices(keep_first_and_last_dense=False))
        saved = found.compressible * (1 - 1 / (8 * BYTES * FACTOR))  # one bit per FACTOR values
        shares = (found.dense, saved, found.all - all_sharded.all)
        cells = (f"{100 * share / found.all:.1f} %" for share in shares)
        print(f"| {name} | {keep_ratio} | {found.all / 1e3:,.0f} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
