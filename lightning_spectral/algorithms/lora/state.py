"""What the server of federated LoRA holds between rounds: bases and factors, and how they get into its module."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from lightning_spectral.algorithms.lora.aggregation import Adapter, drawn_rows
from lightning_spectral.nn.adapters import AdaptedLayer
from lightning_spectral.protocol.exchange import load_tensors
from lightning_spectral.sums.exact_mean import rows_in_a_block


class LoRAState(nn.Module):
    """What the server holds between rounds.

    Attributes:
        layers: The adapted layers, found once for all rounds.
        adapters: One for each of them, in their order.
        has_begun: Whether a fit has begun; until then bases follow the weights, which a user may still load.
        num_rounds: Number of rounds up to the last one that was averaged.
        merge_is_due: Whether adapters are merged and restarted when this round is settled.
    """

    has_begun: Tensor
    num_rounds: Tensor

    def __init__(self, layers: Sequence[AdaptedLayer], adapters: Sequence[Adapter], seed: int) -> None:
        super().__init__()
        self.layers = tuple(layers)
        self.adapters = nn.ModuleList(adapters)
        self.seed = seed
        self.register_buffer("has_begun", torch.tensor(False))
        self.register_buffer("num_rounds", torch.tensor(0))
        self.merge_is_due = False

    @property
    def pairs(self) -> list[tuple[AdaptedLayer, Adapter]]:
        """Each adapted layer with what is held of it."""
        held = [adapter for adapter in self.adapters if isinstance(adapter, Adapter)]
        return list(zip(self.layers, held, strict=True))

    def note_round(self, round_idx: int, merge_every: int | None) -> None:
        """Note an averaged round; a merge is due if this round, or one without clients before it, calls for one."""
        before, now = min(int(self.num_rounds), round_idx), round_idx + 1  # another fit counts from zero again
        self.merge_is_due = merge_every is not None and now // merge_every > before // merge_every
        self.num_rounds.fill_(now)


def new_adapter(server: nn.Module, layer: AdaptedLayer, rank: int, seed: int, steps: Sequence[str]) -> Adapter:
    """What the server holds of a layer before the first round: B zero and A drawn, or the factors that it brings."""
    if layer.brings_factors:
        adapter = Adapter(None, *(server.get_parameter(layer.parts[part]).detach().clone() for part in "BA"))
    else:
        weight = server.get_parameter(layer.weight).detach()
        b = weight.new_zeros(layer.out_features, rank)
        adapter = Adapter(weight.clone(), b, drawn_rows(layer, rank, weight, seed))
    for part in steps:
        adapter.get_parameter(part).requires_grad_(True)
    return adapter


@torch.no_grad()
def adopt(server: nn.Module, layer: AdaptedLayer, adapter: Adapter) -> None:
    """Start from what the server's module holds of a layer: its weight, or the factors it brings."""
    if adapter.base is None:
        load_tensors(adapter, {part: server.get_parameter(name).detach() for part, name in layer.factors.items()})
    else:
        adapter.base.copy_(server.get_parameter(layer.weight))


@torch.no_grad()
def write_back(server: nn.Module, layer: AdaptedLayer, adapter: Adapter) -> None:
    """Write what the server's module holds of a layer between rounds: the merged weight, or the factors it brings.

    This is done in place and block by block, so that a weight is never copied as a whole.
    """
    if adapter.base is not None:
        write_merged(layer, adapter, server.get_parameter(layer.weight))
        return
    for part, name in layer.factors.items():
        server.get_parameter(name).copy_(adapter.get_parameter(part))


@torch.no_grad()
def write_merged(layer: AdaptedLayer, adapter: Adapter, weight: Tensor) -> None:
    """Write ``W0 + s B A``, rounded once from float64, into a weight; exactly W0 where the product is zero."""
    assert adapter.base is not None
    left, right = adapter.B.double(), adapter.A.double()
    if layer.transposed:
        left, right = right.T, left.T
    count = rows_in_a_block(weight)
    parts = (torch.split(whole, count) for whole in (weight, adapter.base, left))
    for into, base, own in zip(*parts, strict=True):
        into.copy_(torch.addmm(base.double(), own, right, alpha=layer.scale))


@torch.no_grad()
def restart(adapter: Adapter, weight: Tensor, rows: Tensor) -> None:
    """Restart from a weight of `write_back`, which becomes the base bit for bit: B is zero again, A is new."""
    assert adapter.base is not None
    adapter.base.copy_(weight)
    adapter.B.zero_()
    adapter.A.copy_(rows)
