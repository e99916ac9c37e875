"""How large an update is: what samplers that reduce its variance go by."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

Tensors = Mapping[str, Tensor]


@torch.no_grad()
def update_norm(sent: Tensors, returned: Tensors, expected: Tensors | None = None) -> float:
    """Euclidean norm of what came back minus what was sent, over the tensors that travelled both ways.

    Args:
        sent: What a device was sent, by name.
        returned: What it sent back.
        expected: A change that the server reckons with, which is subtracted; ``None`` for none. Tensors without an
            entry are expected to stay as they are.

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
