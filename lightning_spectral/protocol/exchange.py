"""Reads named tensors from a module, writes them back, and applies an average to the server's module."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.nn.utils.spectral_norm import SpectralNorm

from lightning_spectral.arguments import check_matches, matches_any
from lightning_spectral.protocol.averaged_parameters import averaged_parameters

Tensors = Mapping[str, Tensor]
AVERAGED = "averaged"
NORMALISED = "averaged, then scaled to norm 1"
RETURNED = (AVERAGED, NORMALISED)


def travelling_tensors(module: nn.Module, without: Collection[str] = ()) -> dict[str, Tensor]:
    """Parameters and buffers by name, as detached views: all the values that a copy of the module needs.

    Example:
        >>> sorted(travelling_tensors(nn.BatchNorm1d(2), without={"bias"}))
        ['num_batches_tracked', 'running_mean', 'running_var', 'weight']
    """
    return {name: tensor.detach() for name, tensor in named_state(module).items() if name not in without}


def averaged_tensors(
    module: nn.Module, without: Collection[str] = (), keep_buffers: Sequence[str] = ()
) -> dict[str, Tensor]:
    """The part of `travelling_tensors` that clients send back and that is averaged.

    These are the trainable parameters, other `averaged_parameters`, and floating-point buffers such as BatchNorm's
    running statistics. Integer buffers (``num_batches_tracked``), buffers with infinite entries (attention masks) and
    non-persistent buffers, which no checkpoint would hold, keep the server's value, as do those that match a pattern of
    ``keep_buffers``.
    """
    trainable = {name for name, parameter in module.named_parameters() if parameter.requires_grad}
    trainable |= averaged_parameters(module)
    moving = {name for name, _, policy in buffer_policies(module, keep_buffers) if policy in RETURNED}
    return {name: t for name, t in travelling_tensors(module, without).items() if name in trainable | moving}


def copy_module(module: nn.Module) -> Any:
    """Deep-copy a module, without the Trainer that it may be attached to; for results that are modules of their own.

    Tensors that its last pass has left in attributes are copied without their gradient functions.
    """
    left = (value for part in module.modules() for value in vars(part).values())
    memo: dict[int, Any] = {id(v): v.detach().clone() for v in left if isinstance(v, Tensor) and not v.is_leaf}
    if (trainer := getattr(module, "_trainer", None)) is not None:
        memo[id(trainer)] = None
    return copy.deepcopy(module, memo)


@torch.no_grad()
def load_tensors(module: nn.Module, tensors: Tensors) -> None:
    """Copy named tensors into a module's own, in place."""
    own = named_state(module)
    if tensors:
        torch._foreach_copy_([own[name] for name in tensors], list(tensors.values()))


def select_tensors(module: nn.Module, names: Collection[str]) -> dict[str, Tensor]:
    """Detached views of a module's parameters and buffers with the given names."""
    own = named_state(module)
    return {name: own[name].detach() for name in names}


@torch.no_grad()
def apply_mean_change(server: nn.Module, changes: Iterable[tuple[str, Tensor]]) -> None:
    """Turn averaged changes into pseudo-gradients of trained parameters, and add all others directly.

    Args:
        server: The server's module; each trained parameter gets ``grad = -change``, so that plain SGD with learning
            rate 1 lands on the clients' weighted mean.
        changes: Names of parameters and buffers with their mean changes, read one at a time.
    """
    parameters = {name: p for name, p in server.named_parameters() if p.requires_grad}
    others, unit = named_state(server), set(_unit_vectors(server))
    for name, change in changes:
        if name in parameters:
            parameters[name].grad = torch.empty_like(parameters[name]).copy_(change).neg_()
        else:
            others[name].add_(change.to(others[name].dtype))
        if name in unit:
            others[name].copy_(F.normalize(others[name], dim=0))
        del change  # free it before the next one is computed


def buffer_policies(module: nn.Module, keep_buffers: Sequence[str] = ()) -> Iterator[tuple[str, tuple[int, ...], str]]:
    """Yield each buffer's name, its shape and what a federated run does with it.

    Example:
        >>> [(name, policy) for name, _, policy in buffer_policies(nn.BatchNorm1d(2))][1:]
        [('running_var', 'averaged'), ('num_batches_tracked', "the server's: not a floating-point number")]
    """
    persistent, unit = module.state_dict(keep_vars=True).keys(), set(_unit_vectors(module))
    for name, buffer in module.named_buffers():
        if buffer.layout != torch.strided:
            raise ValueError(
                f"Sparse buffers cannot be sent to clients: `{name}` is {buffer.layout}; register `{name}` as "
                f"`.to_dense()` and call `.to_sparse()` where it is used, or keep it in an attribute that is no buffer."
            )
        kept = matches_any(name, keep_buffers)
        policy = "the server's: as asked" if kept else _policy(buffer, name in persistent)
        yield name, tuple(buffer.shape), NORMALISED if policy == AVERAGED and name in unit else policy


def kept_buffers(module: nn.Module, keep_buffers: Sequence[str] = ()) -> tuple[str, ...]:
    """Names of the buffers that keep the server's value.

    Raises:
        ValueError: If a pattern of ``keep_buffers`` matches no buffer.

    Example:
        >>> kept_buffers(nn.BatchNorm1d(2), ["running_mean"])
        ('running_mean', 'num_batches_tracked')
    """
    check_matches("keep_buffers", keep_buffers, (name for name, _ in module.named_buffers()), "buffer")
    return tuple(name for name, _, policy in buffer_policies(module, keep_buffers) if policy not in RETURNED)


def _policy(buffer: Tensor, persistent: bool) -> str:
    if not buffer.is_floating_point():
        return "the server's: not a floating-point number"
    if not persistent:
        return "the server's: no checkpoint holds it"
    return AVERAGED if bool(torch.isfinite(buffer).all()) else "the server's: it has infinite entries"


def _unit_vectors(module: nn.Module) -> Iterator[str]:
    """Names of the buffers that hold the singular vectors of both of torch's spectral norms.

    The mean of unit vectors is shorter than 1, and the estimated norm of the weight would shrink with it.
    """
    for path, part in module.named_modules():
        names = [hook.name for hook in part._forward_pre_hooks.values() if isinstance(hook, SpectralNorm)]
        if isinstance(part, _SpectralNorm):
            names.append("")
        for name, vector in itertools.product(names, ("_u", "_v")):
            yield f"{path}.{name}{vector}" if path else f"{name}{vector}"


def named_state(module: nn.Module) -> dict[str, Tensor]:
    """Parameters once each, tied ones under their first name, and buffers likewise.

    Equal to ``{**dict(module.named_parameters()), **dict(module.named_buffers())}``, but takes a third of the time: it
    is called twice in every client's turn.
    """
    parameters: dict[str, Tensor] = {}
    buffers: dict[str, Tensor] = {}
    seen: set[int] = set()
    for path, part in module.named_modules():
        prefix = f"{path}." if path else ""
        for own, found in ((part._parameters, parameters), (part._buffers, buffers)):
            for name, tensor in own.items():
                if tensor is not None and id(tensor) not in seen:
                    seen.add(id(tensor))
                    found[prefix + name] = tensor
    return {**parameters, **buffers}
