"""The contract of a sharded layer, in executable form."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_spectral.nn.layers.sharded import ShardedLayer
from lightning_spectral.nn.layers.terms import WeightBlock, assemble, by_parameter

TOLERANCE = 1e-10  # rounding of a decomposition in float64


def check_sharded_layer(layer_type: type[ShardedLayer], dense: nn.Module, *inputs: Any, num_parts: int = 1) -> None:
    """Check that a sharded layer is equivalent to a dense one, in training mode and in evaluation mode.

    With all terms, it must compute the same outputs, input gradients and bias gradients, and the gradients of the
    factors must follow from that of the dense weight by the chain rule. With some terms, it must be the truncated
    singular value decomposition of every block. Loading other terms must change the values of the parameters, never the
    parameter objects.

    Args:
        layer_type: The sharded class.
        dense: The dense layer, in float64 and without dropout.
        inputs: Arguments for its forward pass, in float64.
        num_parts: Number of layers that a packed linear layer combines.

    Example:
        >>> from lightning_spectral.nn import SpectralShardedLinear
        >>> linear = nn.Linear(5, 3, dtype=torch.float64)
        >>> check_sharded_layer(SpectralShardedLinear, linear, torch.randn(2, 5, dtype=torch.float64))
    """
    blocks = layer_type.blocks_of(dense, num_parts)
    full = [block.num_singular for block in blocks]
    for training in (True, False):
        dense.train(training)
        _check_full(layer_type.from_dense(copy.deepcopy(dense), full).train(training), dense, blocks, inputs)
    for num_terms in ([1] * len(full), [(n + 1) // 2 for n in full], full):
        _check_truncated(layer_type.from_dense(copy.deepcopy(dense), num_terms), dense, blocks, inputs, num_terms)
        _check_loading(layer_type.like(copy.deepcopy(dense), num_terms), dense, blocks)


def _check_full(sharded: ShardedLayer, dense: nn.Module, blocks: Sequence[WeightBlock], inputs: Any) -> None:
    ours, theirs = _run(sharded, inputs), _run(dense, inputs)
    for what, mine, its in zip(("output", "input gradient"), ours, theirs, strict=True):
        assert len(mine) == len(its), f"{what} is missing"
        for a, b in zip(mine, its, strict=True):
            assert _same(a, b), f"{what} differs"
    own = dict(sharded.named_parameters())
    weights = {block.parameter for block in blocks}
    for name, parameter in dense.named_parameters():
        if name not in weights:
            assert name in own, f"{name} is missing"
            assert _same(own[name].grad, parameter.grad), f"gradient of {name} differs"
    for block in blocks:
        gradient = dense.get_parameter(block.parameter).grad
        assert gradient is not None
        terms, dw = sharded.terms(block), block.matrix(gradient)
        assert _same(terms.u.grad, (dw @ terms.v.T) * terms.omega), f"gradient of u differs in {block.name!r}"
        assert _same(terms.v.grad, (terms.u * terms.omega).T @ dw), f"gradient of v differs in {block.name!r}"


def _same(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    return torch.allclose(a, b, rtol=TOLERANCE, atol=TOLERANCE)


def _run(layer: nn.Module, inputs: Sequence[Any]) -> tuple[list[Tensor], list[Tensor]]:
    """Outputs, and gradients of the floating-point inputs, of a fixed loss."""
    layer.zero_grad()
    leaves = [x.clone().requires_grad_() if _is_float(x) else x for x in inputs]
    outputs = _tensors(layer(*leaves))
    loss = sum((torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out) * out).sum() for out in outputs)
    assert isinstance(loss, Tensor)
    loss.backward()  # type: ignore[no-untyped-call]
    return outputs, [x.grad for x in leaves if _is_float(x)]


def _is_float(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()


def _tensors(output: Any) -> list[Tensor]:
    """The floating-point tensors in the output of a layer."""
    if isinstance(output, Tensor):
        return [output] if output.is_floating_point() else []
    return [tensor for part in output for tensor in _tensors(part)] if isinstance(output, tuple) else []


def _check_truncated(
    sharded: ShardedLayer, dense: nn.Module, blocks: Sequence[WeightBlock], inputs: Any, num_terms: Sequence[int]
) -> None:
    twin = copy.deepcopy(dense).eval()
    wanted = dict(zip((block.name for block in blocks), num_terms, strict=True))
    for name, parts in by_parameter(blocks):
        weight = twin.get_parameter(name)
        largest = []
        for part in parts:
            u, s, vh = torch.linalg.svd(part.matrix(weight.detach()), full_matrices=False)
            n = wanted[part.name]
            largest.append((u[:, :n] * s[:n]) @ vh[:n])
        best = assemble(parts, largest, weight)
        effective = sharded.effective_weights(dense)[name]
        assert _same(effective, best), f"{wanted} terms are not the largest of {name}"
        weight.data.copy_(best)
    trainable = sum(p.numel() for block in blocks for p in sharded.terms(block).parameters(recurse=False))
    own = sum(n * sum(block.shape) for n, block in zip(num_terms, blocks, strict=True))
    bias = sum(p.numel() for name, p in sharded.terms(blocks[0]).named_parameters(recurse=False) if name == "bias")
    assert trainable == own + bias, f"{trainable} trainable values for {num_terms} terms"
    with torch.no_grad():
        for mine, its in zip(_tensors(sharded.eval()(*inputs)), _tensors(twin(*inputs)), strict=True):
            assert _same(mine, its), "`forward` does not apply the effective weight"


def _check_loading(sharded: ShardedLayer, dense: nn.Module, blocks: Sequence[WeightBlock]) -> None:
    parameters = [id(p) for p in sharded.parameters()]
    expected = {}
    for i, block in enumerate(blocks, start=1):
        terms = sharded.terms(block)
        u = torch.linspace(-1, i, terms.u.numel(), dtype=terms.u.dtype).view_as(terms.u)
        v = torch.linspace(-i, 2, terms.v.numel(), dtype=terms.v.dtype).view_as(terms.v)
        omega = torch.linspace(1, 3, terms.num_terms, dtype=u.dtype)
        terms.load_terms(u, v, omega)
        expected[block.name] = (u * omega) @ v
    assert [id(p) for p in sharded.parameters()] == parameters, "loading terms must keep the parameters"
    for name, parts in by_parameter(blocks):
        loaded = assemble(parts, [expected[part.name] for part in parts], dense.get_parameter(name))
        effective = sharded.effective_weights(dense)[name]
        assert _same(effective, loaded), "the loaded terms are not the weight"
