"""The memory of a client's local step, counted in one step that is taken."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from lightning_spectral.client.side import ClientSide, StepActions
from lightning_spectral.nn.cost.cost import Cost
from lightning_spectral.nn.cost.live import LiveBytes
from lightning_spectral.nn.plan.trace import Example, as_input, run_example
from lightning_spectral.protocol.records import Download


def widest_step(side: ClientSide, client: nn.Module, download: Download) -> StepActions:
    """What an algorithm does in a local step, in the largest one where it draws a width for each."""
    actions = side.start(client, download)
    return StepActions() if actions is None or actions.after_forward is not None else actions


def step_memory(
    side: ClientSide, client: nn.Module, download: Download, optimizer: Optimizer, example: Example
) -> Cost:
    """Take a local step like those after the first, in the order of the local loop, and count what is alive.

    The gradients of the step before are alive until the backward pass begins, and the optimizer's state is there. The
    loss is the output, if that has a single number; otherwise all outputs get a gradient, as from a loss.
    """
    example = as_input(client, example)
    with LiveBytes() as live:
        actions = widest_step(side, client, download)
        trained = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
        for parameter in trained:
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()  # which makes its state
        if actions.before_forward is not None:
            actions.before_forward()
        output = run_example(client, example)
        optimizer.zero_grad()
        _backward(output, client)
        if actions.before_step is not None:
            actions.before_step(optimizer)
        optimizer.step()
    gradients, state = _num_bytes(trained), _num_bytes(_tensors(optimizer.state.values()))
    batch = _num_bytes(_tensors([example]))
    return Cost(
        weight_bytes=_num_bytes([*client.parameters(), *client.buffers()]),
        gradient_bytes=gradients,
        optimizer_bytes=state,
        activation_bytes=live.most + batch - gradients - state,
    )


def _backward(output: Any, client: nn.Module) -> None:
    ends = [tensor for tensor in _tensors([output]) if tensor.requires_grad]
    if not ends:
        raise ValueError(
            f"The memory of a step is counted in a backward pass, and nothing that {type(client).__name__} returns for "
            "the example needs a gradient; let its `forward` return what the loss is computed from."
        )
    losses = [tensor for tensor in ends if tensor.dim() == 0] or ends
    torch.autograd.backward(losses, [torch.ones_like(tensor) for tensor in losses])


def _tensors(trees: Iterable[Any]) -> list[Tensor]:
    return [leaf for tree in trees for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _num_bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
