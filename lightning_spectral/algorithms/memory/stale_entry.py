"""What the server keeps of one client's update: all of it, or its leading singular terms."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from lightning_spectral.functional.spectra import singular_terms, weight_to_matrix

Tensors = Mapping[str, Tensor]


@torch.no_grad()
def update_of(before: Tensors, after: Tensors) -> dict[str, Tensor]:
    """The change of each tensor of ``before``, in its own type but at least in single precision."""
    wide = {name: torch.promote_types(tensor.dtype, torch.float32) for name, tensor in before.items()}
    return {name: after[name].to(wide[name]) - tensor.to(wide[name]) for name, tensor in before.items()}


@torch.no_grad()
def compress(update: Tensors, num_terms: int | None) -> dict[str, Tensor]:
    """Compress a finite update for the server's store.

    Tensors of two dimensions or more, seen as matrices of shape ``(c_out, c_in k_1 ...)``, are stored as the factors u,
    shape ``(c_out, num_terms)``, and v of their leading singular terms. The others, those whose terms would be no
    smaller, and all of them if ``num_terms`` is ``None``, stay whole, under their own names.

    Example:
        >>> entry = compress({"weight": torch.ones(4, 3), "bias": torch.ones(4)}, num_terms=1)
        >>> {name: tuple(tensor.shape) for name, tensor in entry.items()}
        {'weight:u': (4, 1), 'weight:v': (1, 3), 'bias': (4,)}
    """
    entry: dict[str, Tensor] = {}
    for name, change in update.items():
        if num_terms is None or not _saves(change, num_terms):
            entry[name] = change
        else:
            _, u, v = singular_terms(change)
            entry[f"{name}:u"], entry[f"{name}:v"] = u[:, :num_terms], v[:num_terms]
    return entry


@torch.no_grad()
def restore(entry: Tensors, like: Tensors) -> dict[str, Tensor]:
    """Restore the update that an entry of `compress` stands for, in float64 and bit for bit the same every time.

    Names, shapes and device are those of ``like``; the entry may be on another device.
    """

    def wide(name: str, tensor: Tensor) -> Tensor:
        return entry[name].to(tensor.device).double()

    return {
        name: wide(name, tensor)
        if name in entry
        else (wide(f"{name}:u", tensor) @ wide(f"{name}:v", tensor)).view(tensor.shape)
        for name, tensor in like.items()
    }


def _saves(tensor: Tensor, num_terms: int) -> bool:
    return tensor.ndim >= 2 and num_terms * sum(weight_to_matrix(tensor).shape) < tensor.numel()
