"""Input checks shared by the sampling mathematics; each error names the rule, the value and the remedy."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.utils._pytree import tree_leaves

from lightning_spectral.arguments import Number, Whole

COHORT_SIZE = Number(at_least=1)  # any real number, e.g. Kish's effective number of clients


def has_values(tensor: Tensor) -> bool:
    """Whether a tensor has values, and not only a size: neither fake tensors nor those on the meta device have any.

    Example:
        >>> has_values(torch.zeros(2)), has_values(torch.zeros(2, device="meta"))
        (True, False)
    """
    return not tensor.is_meta and not isinstance(tensor, FakeTensor)


def all_names(module: nn.Module) -> dict[str, tuple[str, ...]]:
    """All names of each parameter and buffer, by the first of them; those of tied layers have several.

    Example:
        >>> net = nn.ModuleDict({"embed": nn.Embedding(4, 2), "head": nn.Linear(2, 4, bias=False)})
        >>> net["head"].weight = net["embed"].weight
        >>> all_names(net)
        {'embed.weight': ('embed.weight', 'head.weight')}
    """
    found: dict[int, list[str]] = {}
    for named in (module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False)):
        for name, tensor in named:
            found.setdefault(id(tensor), []).append(name)
    return {names[0]: tuple(names) for names in found.values()}


def named_by_any(module: nn.Module, matches: Callable[[str], bool]) -> tuple[str, ...]:
    """First names of the parameters and buffers of which any name matches, in order.

    Example:
        >>> net = nn.ModuleDict({"embed": nn.Embedding(4, 2), "head": nn.Linear(2, 4)})
        >>> net["head"].weight = net["embed"].weight
        >>> named_by_any(net, lambda name: name.startswith("head"))
        ('embed.weight', 'head.bias')
    """
    return tuple(first for first, names in all_names(module).items() if any(map(matches, names)))


def as_magnitudes(values: Tensor, name: str) -> Tensor:
    """Check a vector of sizes or singular values; return it in float64, on its own device."""
    if values.ndim != 1 or values.numel() == 0:
        raise ValueError(f"`{name}` must have shape (N,) with N >= 1, got shape {tuple(values.shape)}.")
    if not values.is_floating_point():
        raise ValueError(f"`{name}` must be a floating-point tensor, got {values.dtype}; call .double() on it.")
    smallest, largest = (float(extreme) for extreme in values.detach().aminmax())  # NaN if any value is
    if not (smallest >= 0 and largest < math.inf):
        _refuse_first(name, "finite and non-negative", values, ~(torch.isfinite(values) & (values >= 0)))
    return values.detach().double()


def check_num_terms(num_terms: int, num_total: int) -> None:
    """Check that ``num_terms`` of ``num_total`` terms can be drawn."""
    Whole()("num_terms", num_terms)
    if not 1 <= num_terms <= num_total:
        raise ValueError(f"`num_terms` must be in [1, N={num_total}], got {num_terms}.")


def check_num_samples(num_samples: int) -> None:
    """Check the number of independent draws."""
    Whole(at_least=1)("num_samples", num_samples)


def as_probabilities(values: Tensor, name: str) -> Tensor:
    """Check a vector of probabilities; return it in float64 on the CPU, where the fits run."""
    probs = as_magnitudes(values, name).cpu()
    if (probs > 1).any():
        _refuse_first(name, "in [0, 1]", probs, probs > 1)
    return probs


def as_inclusion_probs(inclusion_probs: Tensor) -> tuple[Tensor, int]:
    """Check the inclusion probabilities of a fixed-size design, and find its sample size n.

    Their sum must be n within 1e-6 n, a tolerance for float32 input.
    """
    probs = as_probabilities(inclusion_probs, "inclusion_probs")
    total = float(probs.sum())
    num_terms = round(total)
    if num_terms < 1 or abs(total - num_terms) > 1e-6 * num_terms:
        raise ValueError(f"`inclusion_probs` must sum to a whole number of terms, at least 1, got the sum {total:.9g}.")
    return probs, num_terms


def _refuse_first(name: str, rule: str, values: Tensor, wrong: Tensor) -> None:
    index = int(wrong.nonzero()[0])
    raise ValueError(f"`{name}` must be {rule}, got {values[index].item()} at index {index}.")


def shapes_of(tensors: Any) -> str:
    """Types and shapes of the tensors in a nested structure, such as a batch; empty if there are none.

    Example:
        >>> shapes_of([torch.zeros(4, 6), {"label": torch.zeros(4, dtype=torch.int64)}])
        'float32 (4, 6), int64 (4,)'
    """
    found = [leaf for leaf in tree_leaves(tensors) if isinstance(leaf, Tensor)]
    return ", ".join(f"{str(one.dtype).removeprefix('torch.')} {tuple(one.shape)}" for one in found)
