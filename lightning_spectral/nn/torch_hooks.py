"""Hooks of torch that compute weights or act on their gradients."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from torch.nn.utils.parametrizations import _WeightNorm
from torch.nn.utils.parametrize import ParametrizationList
from torch.nn.utils.weight_norm import WeightNorm


def has_gradient_hook(tensor: Tensor) -> bool:
    """Whether there are hooks on a tensor's gradient.

    Example:
        >>> weight = nn.Linear(2, 1).weight
        >>> handle = weight.register_hook(abs)
        >>> has_gradient_hook(weight)
        True
    """
    return bool(tensor._backward_hooks) or bool(getattr(tensor, "_post_accumulate_grad_hooks", None))


def weight_hooks(layer: nn.Module) -> list[Any]:
    """The hooks of ``torch.nn.utils``, such as that of its `weight_norm`, that compute a weight before every pass."""
    hooks = layer._forward_pre_hooks.values()
    return [hook for hook in hooks if type(hook).__module__.startswith("torch.nn.utils.")]


def normalised_weights(module: nn.Module) -> Iterator[str]:
    """Names of the parameters of torch's weight norms: directions, which cannot be zero, and their lengths.

    Example:
        >>> sorted(normalised_weights(nn.utils.parametrizations.weight_norm(nn.Linear(2, 2))))
        ['parametrizations.weight.original0', 'parametrizations.weight.original1']
    """
    for path, part in module.named_modules():
        own = {
            f"{hook.name}{end}" for hook in weight_hooks(part) if isinstance(hook, WeightNorm) for end in ("_g", "_v")
        }
        if isinstance(part, ParametrizationList) and any(isinstance(step, _WeightNorm) for step in part):
            own = {name for name, _ in part.named_parameters()}
        yield from (f"{path}.{name}" if path else name for name in own)
