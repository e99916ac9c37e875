"""The contract of a sharded layer, in executable form."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from lightning_spectral.functional.factors import absorb, factorize
from lightning_spectral.nn.conv import SpectralShardedConv2d
from lightning_spectral.nn.linear import SpectralShardedLinear

__all__ = ["check_sharded_layer"]

ShardedType = type[SpectralShardedLinear] | type[SpectralShardedConv2d]


def check_sharded_layer(kind: ShardedType, dense: nn.Linear | nn.Conv2d, x: Tensor) -> None:
    """Check that a sharded layer stands for a dense one.

    With all terms it computes the same outputs, input gradients and bias gradients; with some it is the truncated
    singular value decomposition; loading other terms changes values, never parameters.

    Args:
        kind: The sharded class.
        dense: The dense layer, in float64.
        x: An input for it, in float64.

    Raises:
        AssertionError: With the promise that is broken.

    Example:
        >>> linear = nn.Linear(5, 3, dtype=torch.float64)
        >>> check_sharded_layer(SpectralShardedLinear, linear, torch.randn(2, 5, dtype=torch.float64))
    """
    num_singular = min(dense.weight.flatten(1).shape)
    _check_full(kind.from_dense(dense, num_singular), dense, x)  # type: ignore[arg-type]
    for num_terms in {1, (num_singular + 1) // 2, num_singular}:
        _check_truncated(kind.from_dense(dense, num_terms), dense, x, num_terms)  # type: ignore[arg-type]
        _check_loading(kind.like(dense, num_terms), dense, num_terms)  # type: ignore[arg-type]


def _check_full(sharded: nn.Module, dense: nn.Module, x: Tensor) -> None:
    for name, ours, theirs in zip(
        ("output", "input gradient", "bias gradient"), _run(sharded, x), _run(dense, x), strict=True
    ):
        if theirs is not None:
            assert ours is not None, f"{name} is missing"
            assert torch.allclose(ours, theirs, rtol=1e-10, atol=1e-10), f"{name} differs"


def _run(layer: nn.Module, x: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
    layer.zero_grad()
    x = x.clone().requires_grad_()
    output = layer(x)
    assert isinstance(output, Tensor)
    (output * torch.linspace(-1, 1, output.numel(), dtype=x.dtype).view_as(output)).sum().backward()  # type: ignore[no-untyped-call]
    bias = layer.bias
    return output, x.grad, bias.grad if isinstance(bias, Tensor) else None


def _check_truncated(
    sharded: SpectralShardedLinear | SpectralShardedConv2d, dense: nn.Linear | nn.Conv2d, x: Tensor, num_terms: int
) -> None:
    u, s, vh = torch.linalg.svd(dense.weight.detach().flatten(1), full_matrices=False)
    best = ((u[:, :num_terms] * s[:num_terms]) @ vh[:num_terms]).view_as(dense.weight)
    assert torch.allclose(sharded.weight, best, rtol=1e-10, atol=1e-10), f"{num_terms} terms are not the largest"
    rows, columns = dense.weight.flatten(1).shape
    trainable = sum(p.numel() for p in sharded.parameters()) - (0 if dense.bias is None else rows)
    assert trainable == num_terms * (rows + columns), f"{trainable} trainable values for {num_terms} terms"
    with torch.no_grad():
        expected = _with_weight(dense, sharded.weight)(x)
        assert torch.allclose(sharded(x), expected, rtol=1e-10, atol=1e-10), "`forward` does not apply `weight`"


def _with_weight(dense: nn.Linear | nn.Conv2d, weight: Tensor) -> nn.Module:
    twin = copy.deepcopy(dense)
    twin.weight.data.copy_(weight)
    return twin


def _check_loading(
    sharded: SpectralShardedLinear | SpectralShardedConv2d, dense: nn.Linear | nn.Conv2d, num_terms: int
) -> None:
    parameters = [id(p) for p in sharded.parameters()]
    u, v = absorb(factorize(dense.weight), dense.weight.dtype)
    omega = torch.linspace(1, 3, num_terms, dtype=u.dtype)
    sharded.load_terms(u[:, -num_terms:], v[-num_terms:], omega)
    assert [id(p) for p in sharded.parameters()] == parameters, "loading terms must keep the parameters"
    expected = ((u[:, -num_terms:] * omega) @ v[-num_terms:]).view_as(dense.weight)
    assert torch.allclose(sharded.weight, expected, rtol=1e-10, atol=1e-10), "the loaded terms are not the weight"
