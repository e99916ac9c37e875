"""What a client's training must not do, and what the first rounds note: unreached layers, changes that are lost."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import partial

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_spectral.protocol.records import Tensors

WATCHED_ROUNDS = 10  # a single client may not use every layer, e.g. an expert or one that is dropped at random
LISTED = 3  # further parameters are counted


class GradientWatch:
    """Records which parameters receive a gradient, until its ``with`` block ends.

    Args:
        parameters: The parameters to watch, by the name of the layer that each belongs to.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self.reached = dict.fromkeys(parameters, False)
        self._handles = [
            parameter.register_post_accumulate_grad_hook(partial(self._record, name))  # type: ignore[no-untyped-call]
            for name, parameter in parameters.items()
        ]

    def _record(self, name: str, parameter: Tensor) -> None:
        self.reached[name] = True

    def __enter__(self) -> GradientWatch:
        return self

    def __exit__(self, *_: object) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()

    @property
    def unreached(self) -> tuple[str, ...]:
        """Names of the layers without a gradient."""
        return tuple(name for name, reached in self.reached.items() if not reached)


def check_not_reached(replaced: Mapping[str, Tensor]) -> None:
    """Check that no gradient reached the server's parameters in whose place a client holds others."""
    if reached := [name for name, parameter in replaced.items() if parameter.grad is not None]:
        raise ValueError(
            f"A client's `training_step` uses parameters that it does not hold ({', '.join(reached)}), by a variable "
            "or a list that refers to the parameters themselves, so they would not be trained; refer to their layers, "
            "and read `layer.weight`, or keep these layers whole with `exclude`."
        )


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


def check_still_own(optimizer: Optimizer, module: nn.Module) -> None:
    """Raise ``ValueError`` if the module has lost parameters of its optimizer since this was made, e.g. in a hook."""
    if foreign := foreign_parameters(optimizer, module):
        listed = ", ".join(f"{place} of shape {tuple(parameter.shape)}" for place, parameter in foreign[:LISTED])
        raise ValueError(
            f"{type(module).__name__} no longer has what its {type(optimizer).__name__} trains ({listed}): a hook has "
            "replaced a layer or a parameter, and the new one would not be trained. Replace it before the fit, or "
            "change its values in place, with `copy_` under torch.no_grad()."
        )


def foreign_parameters(optimizer: Optimizer, module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """The trainable parameters of an optimizer that are not a module's, each with its place in the optimizer."""
    own = {id(parameter) for parameter in module.parameters()}
    return [(place, p) for place, p in placed(optimizer) if p.requires_grad and id(p) not in own]


def placed(optimizer: Optimizer) -> Iterator[tuple[str, nn.Parameter]]:
    """Every parameter of an optimizer, with its place there."""
    for index, group in enumerate(optimizer.param_groups):
        for position, parameter in enumerate(group["params"]):
            yield f"parameter {position} of group {index}", parameter
