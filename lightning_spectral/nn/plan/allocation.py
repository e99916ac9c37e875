"""Where the bytes of a sub-model go: more terms for layers in which they are worth most, at the same cost in all."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn

from lightning_spectral.functional.spectra import KEEP_RATIO
from lightning_spectral.nn.layers.terms import WeightBlock
from lightning_spectral.nn.plan.module_plan import LayerChoices, LayerPlan
from lightning_spectral.nn.plan.planner import plan_layers
from lightning_spectral.nn.trace import Example
from lightning_spectral.protocol.kept_state import trying


def allocate_terms(
    module: nn.Module,
    loss: Callable[[nn.Module], Tensor],
    keep_ratio: float,
    example_input: Example = None,
    choices: LayerChoices = LayerChoices(),
) -> LayerChoices:
    """Choose `LayerChoices.ratio_factors` by the gradient of a loss: which layers get more terms, and which fewer.

    A term that a layer gets is worth the energy of its gradient that one more singular term holds, for each value that
    clients are sent. Each layer gets one term, and the others go one by one where they are worth most, until all layers
    together cost what they would at equal ratios.

    Args:
        module: The user's module, with the weights from which training begins; it is restored.
        loss: Returns the loss of the module on a few hundred examples, such as public ones.
        keep_ratio: That of the clients; of the smallest ones, if they differ.
        example_input: As in `validate`.
        choices: All other choices.

    Returns:
        These choices, with a factor for each sharded layer.

    Raises:
        ValueError: If the module cannot be sharded as chosen, or the ratio is outside (0, 1].

    Example:
        >>> net = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 2))
        >>> def loss(net):  # one layer starves: its gradient vanishes
        ...     return net[3](net[2](net[0](torch.eye(8)) + 0.0 * net[1](torch.ones(16)))).square().mean()
        >>> choices = allocate_terms(net, loss, keep_ratio=0.25)
        >>> {name: block.num_terms(0.25) for name, block in plan_layers(net, choices=choices).blocks.items()}
        {'1': 1, '2': 7}
    """
    keep_ratio = KEEP_RATIO("keep_ratio", keep_ratio)
    plan = plan_layers(module, example_input, replace(choices, ratio_factors={})).check()
    weights = {name: module.get_parameter(name) for name in plan.sharded_weights}
    with trying(module), torch.enable_grad():
        found = torch.autograd.grad(loss(module), list(weights.values()), allow_unused=True)
    gradients = {n: torch.zeros_like(w) if g is None else g for (n, w), g in zip(weights.items(), found, strict=True)}
    ladders = {name: _steps(layer, gradients) for name, layer in plan.sharded.items()}
    budget = sum(_cost(block, block.num_terms(keep_ratio)) for block in plan.blocks.values())
    held = dict.fromkeys(ladders, 0)
    queue = [(-float("inf"), name) for name in ladders]  # one step for each layer, whatever it is worth
    while queue:
        _, name = heapq.heappop(queue)
        cost = ladders[name][held[name]][1]
        if held[name] > 0 and cost > budget:
            continue
        held[name], budget = held[name] + 1, budget - cost
        if held[name] < len(ladders[name]):
            heapq.heappush(queue, (-ladders[name][held[name]][2], name))
    factors = {name: ladders[name][steps - 1][0] / keep_ratio for name, steps in held.items()}
    return replace(choices, ratio_factors=factors)


def _steps(layer: LayerPlan, gradients: dict[str, Tensor]) -> list[tuple[float, int, float]]:
    """The shares of terms that a layer may hold, with what each costs more than the one before, and gains per value."""
    largest = max(layer.blocks, key=lambda block: block.num_singular)
    matrices = [block.matrix(gradients[block.parameter]).double() for block in layer.blocks]
    energies = [torch.linalg.svdvals(matrix).square().cumsum(0) for matrix in matrices]
    steps, before = list[tuple[float, int, float]](), (0, 0.0)
    for count in range(largest.granularity, largest.num_singular + largest.granularity, largest.granularity):
        share = min(1.0, count / largest.num_singular)
        counts = [block.num_terms(share) for block in layer.blocks]
        cost = sum(_cost(block, n) for block, n in zip(layer.blocks, counts, strict=True))
        energy = sum(float(of_block[n - 1]) for of_block, n in zip(energies, counts, strict=True))
        steps.append((share, cost - before[0], (energy - before[1]) / (cost - before[0])))
        before = cost, energy
    return steps


def _cost(block: WeightBlock, num_terms: int) -> int:
    """Values of the vectors of some terms."""
    return num_terms * sum(block.shape)
