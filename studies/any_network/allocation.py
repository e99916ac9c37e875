"""Where the bytes of a sub-model go: more terms for some layers, fewer for others, at the cost of equal ratios."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping

import torch
from tasks import divided
from torch import Tensor, nn

import lightning_spectral as ls

NUM_IMAGES = 400  # of the clients, for a gradient


def weights_of(module: nn.Module) -> dict[str, Tensor]:
    """Return the weights as they are, by name."""
    return {name: parameter.detach() for name, parameter in module.named_parameters()}


def gradients_of(module: nn.Module) -> dict[str, Tensor]:
    """Return the gradient on some images, by name."""
    images, labels = divided("MNIST", seed=0)[0][:NUM_IMAGES]
    parameters = dict(module.named_parameters())
    loss = nn.functional.cross_entropy(module(images), labels)
    return dict(zip(parameters, torch.autograd.grad(loss, list(parameters.values())), strict=True))


def greedy(module: nn.Module, keep_ratio: float, tensors: Mapping[str, Tensor], relative: bool) -> dict[str, float]:
    """Return factors on the keep ratio, by layer: terms are given to the layer that gains most energy for its bytes.

    Args:
        module: The server's module.
        keep_ratio: All layers together cost at most what they cost at this ratio.
        tensors: What the spectra are of, by the names of the weights.
        relative: Whether energy is a share of the layer's own.
    """
    plan = ls.nn.plan_layers(module)
    costs, gains = {}, {}
    for name, layer in plan.sharded.items():
        spectra = torch.stack(
            [torch.linalg.svdvals(block.matrix(tensors[block.parameter])).square() for block in layer.blocks]
        ).sum(0)
        costs[name] = sum(sum(block.shape) for block in layer.blocks)
        gains[name] = (spectra / spectra.sum() if relative else spectra) / costs[name]
    budget = sum(layer.blocks[0].num_terms(keep_ratio) * costs[name] for name, layer in plan.sharded.items())
    held = dict.fromkeys(costs, 1)
    budget -= sum(costs.values())
    queue = [(-float(gain[1]), name) for name, gain in gains.items() if len(gain) > 1]
    heapq.heapify(queue)
    while queue:
        _, name = heapq.heappop(queue)
        if costs[name] > budget:
            continue
        held[name], budget = held[name] + 1, budget - costs[name]
        if held[name] < len(gains[name]):
            heapq.heappush(queue, (-float(gains[name][held[name]]), name))
    return {name: n / (keep_ratio * len(gains[name])) for name, n in held.items()}


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


ALLOCATIONS: Mapping[str, Callable[[nn.Module, float], dict[str, float]]] = {
    "by spectrum": lambda module, ratio: greedy(module, ratio, weights_of(module), relative=True),
    "by gradient": lambda module, ratio: greedy(module, ratio, gradients_of(module), relative=False),
    "attention thrice": by_pattern,
}


def allocated(kind: str) -> Callable[[float | Mapping[float, float], nn.Module], ls.Algorithm]:
    """Spectral sharding whose layers have the factors that one of these functions finds."""

    def make(ratios: float | Mapping[float, float], module: nn.Module) -> ls.Algorithm:
        smallest = min(ratios) if isinstance(ratios, Mapping) else ratios
        factors = ALLOCATIONS[kind](module, smallest)
        return ls.SpectralSharding(keep_ratio=ratios, layers=ls.LayerChoices(ratio_factors=factors))

    return make
