"""Which tensors of a module travel, what a device keeps of those sent once, how values return and how far they move."""

from __future__ import annotations

import copy
import hashlib
import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_spectral.protocol.buffer_rules import BufferRules, averaged_parameters, buffer_rules, unit_vectors
from lightning_spectral.protocol.records import Download, Tensors


def travelling_tensors(module: nn.Module, without: Collection[str] = ()) -> dict[str, Tensor]:
    """Parameters and buffers by name, as detached views: all the values that a copy of the module needs.

    Example:
        >>> sorted(travelling_tensors(nn.BatchNorm1d(2), without={"bias"}))
        ['num_batches_tracked', 'running_mean', 'running_var', 'weight']
    """
    return {name: tensor.detach() for name, tensor in named_state(module).items() if name not in without}


def returned_tensors(
    module: nn.Module, without: Collection[str] = (), buffers: BufferRules | None = None
) -> dict[str, Tensor]:
    """The part of `travelling_tensors` that clients send back.

    These are the trainable parameters, other `averaged_parameters`, and buffers unless they keep the server's value;
    of all of them, those that do not stay with clients.

    Args:
        module: The server's module.
        without: Names of tensors to leave out.
        buffers: The rules of the run; ``None`` for those of a run that starts now, without rules of the user's.
    """
    rules = buffer_rules(module) if buffers is None else buffers
    trainable = {name for name, parameter in module.named_parameters() if parameter.requires_grad}
    returned = (trainable | averaged_parameters(module) | rules.returned) - rules.stays
    return {name: tensor for name, tensor in travelling_tensors(module, without).items() if name in returned}


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
    others, unit = named_state(server), set(unit_vectors(server))
    for name, change in changes:
        if name in parameters:
            parameters[name].grad = torch.empty_like(parameters[name]).copy_(change).neg_()
        else:
            others[name].add_(change.to(others[name].dtype))
        if name in unit:
            others[name].copy_(F.normalize(others[name], dim=0))
        del change  # free it before the next one is computed


def buffer_shapes(module: nn.Module) -> dict[str, tuple[int, ...]]:
    """Shape of every persistent buffer of a module, by name, to be compared by `check_same_buffers`.

    Others never leave a client, and the server's are put back, whatever becomes of them in between.
    """
    return {
        f"{path}.{name}" if path else name: tuple(buffer.shape)
        for path, part in module.named_modules()
        for name, buffer in part._buffers.items()
        if buffer is not None and name not in part._non_persistent_buffers_set
    }


def check_same_buffers(module: nn.Module, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Check that a client's training has kept the names and shapes of all buffers, as the server's module has them.

    Args:
        module: The client's module, after training.
        shapes: `buffer_shapes` of it before training.

    Raises:
        ValueError: If a buffer has appeared, gone or changed its shape. The message names all of them.
    """
    if (found := buffer_shapes(module)) == dict(shapes):
        return
    was, now = ({name: f"of shape {shape}" for name, shape in those.items()} for those in (shapes, found))
    changed = [
        f"`{name}` was {was.get(name, 'no tensor')} and is {now.get(name, 'no tensor')}"
        for name in {**shapes, **found}
        if shapes.get(name) != found.get(name)
    ]
    raise ValueError(
        f"Training has changed buffers that the server cannot follow: {'; '.join(changed)}. Register such a buffer "
        "with a tensor of its final size, or keep it in an attribute that is not a buffer."
    )


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


def wide(tensor: Tensor) -> Tensor:
    """A tensor in at least single precision, in which small changes count."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


@dataclass(eq=False)
class KeptTensors:
    """The frozen tensors of earlier downloads, by name, each with the digest it was sent with.

    In the server's own process, downloads are complete, and the tensors kept here are the server's own.
    """

    tensors: dict[str, tuple[str, Tensor]] = field(default_factory=dict, init=False, repr=False)

    def missing(self, download: Download) -> tuple[str, ...]:
        """Names of the tensors that were not sent, and which are not here or have another value."""
        absent = sorted(download.held - download.tensors.keys())
        return tuple(name for name in absent if self.tensors.get(name, ("",))[0] != download.frozen.get(name))

    def complete(self, download: Download) -> Download:
        """Keep the frozen tensors that were sent, and add those that were not, of which none may be `missing`."""
        arrived = {name: download.tensors[name] for name in download.frozen if name in download.tensors}
        self.tensors.update({name: (download.frozen[name], tensor) for name, tensor in arrived.items()})
        kept = {name: self.tensors[name][1] for name in download.held - arrived.keys()}
        return replace(download, tensors={**download.tensors, **kept})


def frozen_parameters(module: nn.Module) -> dict[str, Tensor]:
    """The parameters of a module that do not require a gradient and are not averaged, by name.

    Example:
        >>> sorted(frozen_parameters(nn.Linear(2, 2).requires_grad_(False)))
        ['bias', 'weight']
    """
    averaged = averaged_parameters(module)
    return {n: p.detach() for n, p in module.named_parameters() if not p.requires_grad and n not in averaged}


def digest(tensor: Tensor) -> str:
    """A digest of a tensor's type, shape and values; equal digests mean equal bits.

    Example:
        >>> digest(torch.zeros(2)) == digest(torch.zeros(2)), digest(torch.zeros(2)) == digest(-torch.zeros(2))
        (True, False)
    """
    hashed = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
    values = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    # a contiguous tensor may have any stride along dimensions of length 0 or 1, which torch cannot view as bytes
    hashed.update(values.as_strided((values.numel(),), (1,)).view(torch.uint8).numpy().data)
    return hashed.hexdigest()


@torch.no_grad()
def update_norm(sent: Tensors, returned: Tensors, expected: Tensors | None = None) -> float:
    """Euclidean norm of what came back minus what was sent, over the tensors that were sent both ways.

    It is in units of the weights. The change that the server expects of some tensors is subtracted.

    Example:
        >>> sent, returned = {"w": torch.zeros(2), "steps": torch.tensor(3)}, {"w": torch.tensor([3.0, 4.0])}
        >>> update_norm(sent, returned), update_norm(sent, returned, expected={"w": torch.tensor([3.0, 0.0])})
        (5.0, 4.0)
    """
    return norm_of(
        wide(returned[name]) - wide(before) - (expected or {}).get(name, 0.0)
        for name, before in both_ways(sent, returned)
    )


def norm_of(tensors: Iterable[Tensor]) -> float:
    """Euclidean norm of all values together."""
    squares = [tensor.double().square().sum() for tensor in tensors]
    return math.sqrt(float(torch.stack(squares).sum())) if squares else 0.0


def both_ways(sent: Tensors, returned: Tensors) -> Iterator[tuple[str, Tensor]]:
    """Those of the tensors sent that came back in the same shape, and that can be changed in part."""
    for name, before in sent.items():
        if name in returned and before.is_floating_point() and before.shape == returned[name].shape:
            yield name, before
