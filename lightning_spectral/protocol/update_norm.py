"""The norm of an update, which samplers that reduce its variance use."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

Tensors = Mapping[str, Tensor]


@torch.no_grad()
def update_norm(sent: Tensors, returned: Tensors, expected: Tensors | None = None) -> float:
    """Euclidean norm of what came back minus what was sent, over the tensors that were sent both ways.

    Args:
        sent: The tensors that a device was sent, by name.
        returned: The tensors that it sent back.
        expected: The change that the server expects, which is subtracted; ``None`` for none. Tensors without an entry
            are expected to stay unchanged.

    Returns:
        The norm, in units of the weights.

    Example:
        >>> sent, returned = {"w": torch.zeros(2), "steps": torch.tensor(3)}, {"w": torch.tensor([3.0, 4.0])}
        >>> update_norm(sent, returned), update_norm(sent, returned, expected={"w": torch.tensor([3.0, 0.0])})
        (5.0, 4.0)
    """
    squares = [
        (returned[name] - before - (expected or {}).get(name, 0.0)).double().square().sum()
        for name, before in sent.items()
        if name in returned and before.is_floating_point() and before.shape == returned[name].shape
    ]
    return math.sqrt(float(torch.stack(squares).sum())) if squares else 0.0
