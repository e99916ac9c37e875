"""The matrices of a module that are factorised, the cost of each, and errors that name the layer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn

from lightning_spectral.nn.plan.module_plan import ModulePlan

NamedMatrix = tuple[str, Tensor]


def sharded_matrices(module: nn.Module, plan: ModulePlan) -> list[NamedMatrix]:
    """The sharded matrices of a module, by the names of the plan's blocks and in their order, detached."""
    return [(name, b.matrix(module.get_parameter(b.parameter).detach())) for name, b in plan.blocks.items()]


@contextmanager
def naming_layer(name: str) -> Iterator[None]:
    """Name the layer in errors about its weight."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"Layer {name!r} cannot be factorised: {error}") from error


def decomposition_cost(named_matrix: NamedMatrix) -> float:
    """Number of multiplications of a singular value decomposition, up to a constant factor.

    Example:
        >>> import torch
        >>> decomposition_cost(("net.0", torch.ones(2, 3)))
        12.0
    """
    rows, columns = named_matrix[1].shape
    return float(rows * columns * min(rows, columns))
