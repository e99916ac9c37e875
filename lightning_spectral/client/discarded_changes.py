"""Finds parameters that a user's code changes on a client, and whose changes are lost when its turn ends."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_spectral.protocol.exchange import Tensors


@torch.no_grad()
def discarded_changes(
    client: nn.Module, optimizers: Iterable[Optimizer], sent: Tensors, returned: Tensors
) -> tuple[str, ...]:
    """Names of the parameters that changed although no optimizer steps them, and that the server does not average.

    Args:
        client: The sub-model after training.
        optimizers: Its optimizers.
        sent: What it was loaded with.
        returned: What it sends back.

    Example:
        >>> teacher = nn.Linear(2, 1).requires_grad_(False)
        >>> sent = {name: p.clone() for name, p in teacher.named_parameters()}
        >>> _ = teacher.bias.add_(1.0)
        >>> discarded_changes(teacher, [], sent, {})
        ('bias',)
    """
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    stepped = {id(p) for group in groups for p in group["params"] if p.requires_grad}
    kept = {
        name: p
        for name, p in client.named_parameters()
        if id(p) not in stepped and name in sent and (p.requires_grad or name not in returned)
    }
    if not kept:
        return ()
    changed = torch.stack([(p != sent[name].to(p)).any() for name, p in kept.items()]).tolist()  # read at once
    return tuple(name for name, is_changed in zip(kept, changed, strict=True) if is_changed)
