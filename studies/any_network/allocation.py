"""Where the bytes of a sub-model go: more terms for some layers, fewer for others, at the cost of equal ratios."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from tasks import divided
from torch import Tensor, nn

import lightning_spectral as ls

NUM_IMAGES = 400  # of the clients, for a gradient


def by_gradient(module: nn.Module, keep_ratio: float) -> Mapping[str, float]:
    """Return the package's factors, from the gradient on some images."""
    images, labels = divided("MNIST", seed=0)[0][:NUM_IMAGES]
    choices = ls.nn.allocate_terms(module, lambda net: nn.functional.cross_entropy(net(images), labels), keep_ratio)
    return choices.ratio_factors


def by_spectrum(module: nn.Module, keep_ratio: float) -> Mapping[str, float]:
    """Return the package's factors, from the weights in place of a gradient, as shares of each one's own energy."""
    names = ls.nn.plan_layers(module).sharded_weights

    def norms(net: nn.Module) -> Tensor:  # the gradient of each is the weight, divided by its norm
        return torch.stack([net.get_parameter(name).norm() for name in names]).sum()

    return ls.nn.allocate_terms(module, norms, keep_ratio).ratio_factors


def by_pattern(module: nn.Module, keep_ratio: float) -> dict[str, float]:
    """Return factors that give attention three times as many terms as the rest, at the cost of equal ratios."""
    plan = ls.nn.plan_layers(module)
    if not any("attn" in name for name in plan.sharded):
        return {}

    def cost(share: float) -> float:
        choices = ls.LayerChoices(ratio_factors={"*attn*": 3 * share, "*": share})
        return sum(
            sum(block.shape) * block.num_terms(keep_ratio)
            for block in ls.nn.plan_layers(module, choices=choices).blocks.values()
        )

    limit = sum(sum(block.shape) * block.num_terms(keep_ratio) for block in plan.blocks.values())
    share = max(step / 100 for step in range(1, 101) if step == 1 or cost(step / 100) <= limit)
    return {"*attn*": 3 * share, "*": share}


ALLOCATIONS: Mapping[str, Callable[[nn.Module, float], Mapping[str, float]]] = {
    "by spectrum": by_spectrum,
    "by gradient": by_gradient,
    "attention thrice": by_pattern,
}


def allocated(kind: str) -> Callable[[float | Sequence[float], nn.Module], ls.Algorithm]:
    """Spectral sharding whose layers have the factors that one of these functions finds."""

    def make(ratios: float | Sequence[float], module: nn.Module) -> ls.Algorithm:
        smallest = min(ratios) if isinstance(ratios, Sequence) else ratios
        factors = ALLOCATIONS[kind](module, smallest)
        return ls.SpectralSharding(keep_ratio=ratios, layers=ls.LayerChoices(ratio_factors=factors))

    return make
