"""Decide, before any training, which layers of a module are sharded."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from types import MappingProxyType

from torch import nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.lazy import LazyModuleMixin

from lightning_spectral.nn.conv import SpectralShardedConv2d
from lightning_spectral.nn.linear import SpectralShardedLinear
from lightning_spectral.nn.report import LayerReport, LayerTreatment

SHARDED_LAYERS: Mapping[type[nn.Module], type[SpectralShardedLinear] | type[SpectralShardedConv2d]] = MappingProxyType(
    {nn.Linear: SpectralShardedLinear, nn.Conv2d: SpectralShardedConv2d}
)


def plan_layers(
    module: nn.Module, *, exclude: Sequence[str] = (), keep_first_and_last_dense: bool = True
) -> LayerReport:
    """Decide the treatment of every layer of ``module`` that has parameters.

    Args:
        module: The user's module; it is only read.
        exclude: Shell-style patterns of dotted layer names that stay dense, e.g. ``"head"`` or ``"blocks.*.proj"``.
        keep_first_and_last_dense: Keep the first and the last affine layer, in order of registration, dense
            (Korzhenkov & Louizos 2024, section 4.1).

    Raises:
        ValueError: If a pattern matches no layer, a layer is lazy and has no weight yet, a layer to shard shares its
            weight with another layer, or no layer is left to shard.
    """
    layers = list(_layers(module))
    _check_lazy(layers)
    _check_patterns(exclude, [name for name, _ in layers])
    ends = _first_and_last_affine(layers) if keep_first_and_last_dense else {}
    shared = _shared_weights(module)
    report = LayerReport(tuple(_treat(name, layer, exclude, ends) for name, layer in layers))
    _check_ties(report, shared)
    if not report.sharded_names:
        raise ValueError(
            "No layer of this module can be sharded; the first and the last affine layer stay dense unless "
            f"`keep_first_and_last_dense=False`, and `exclude` takes layers out. Every layer and the reason:\n{report}"
        )
    return report


def validate(module: nn.Module, *, exclude: Sequence[str] = (), keep_first_and_last_dense: bool = True) -> LayerReport:
    """Print which layers would be sharded, which stay dense and why; nothing is changed.

    Args:
        module: The user's module.
        exclude: As in `replace_layers`.
        keep_first_and_last_dense: As in `replace_layers`.

    Returns:
        The same as a `LayerReport`.

    Raises:
        ValueError: As `plan_layers`.

    Example:
        >>> mlp = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 2))
        >>> report = validate(mlp)
        layer  type    weight  N   treatment  reason
        0      Linear  16x8    8   dense      first affine layer
        2      Linear  16x16   16  sharded    affine
        4      Linear  2x16    2   dense      last affine layer
    """
    report = plan_layers(module, exclude=exclude, keep_first_and_last_dense=keep_first_and_last_dense)
    print(report)
    return report


def _layers(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, layer in module.named_modules():
        if next(layer.parameters(recurse=False), None) is not None:
            yield name, layer


def _treat(name: str, layer: nn.Module, exclude: Sequence[str], ends: dict[str, str]) -> LayerTreatment:
    weight = dict(layer.named_parameters(recurse=False)).get("weight")
    shape = None if weight is None else tuple(weight.shape)
    terms = min(weight.flatten(1).shape) if weight is not None and isinstance(layer, nn.Linear | _ConvNd) else None
    reason = _reason_to_stay_dense(name, layer, weight, terms, exclude, ends)
    return LayerTreatment(name, type(layer).__name__, shape, terms, reason is None, reason or "affine")


def _reason_to_stay_dense(
    name: str,
    layer: nn.Module,
    weight: nn.Parameter | None,
    num_singular: int | None,
    exclude: Sequence[str],
    ends: dict[str, str],
) -> str | None:
    if not isinstance(layer, nn.Linear | _ConvNd):
        return "not a linear layer or convolution"
    if any(fnmatchcase(name, pattern) for pattern in exclude):
        return "excluded by name"
    if name in ends:
        return ends[name]
    if type(layer) not in SHARDED_LAYERS:
        return f"{type(layer).__name__} is not supported"
    if weight is None:
        return "its weight is computed, not a plain parameter"
    if getattr(layer, "groups", 1) != 1:
        return "more than one group"
    if not weight.requires_grad:
        return "frozen"
    return "a single term" if num_singular == 1 else None


def _first_and_last_affine(layers: Sequence[tuple[str, nn.Module]]) -> dict[str, str]:
    affine = [name for name, layer in layers if isinstance(layer, nn.Linear | _ConvNd)]
    return {affine[-1]: "last affine layer", affine[0]: "first affine layer"} if affine else {}


def _check_lazy(layers: Sequence[tuple[str, nn.Module]]) -> None:
    lazy = [name for name, layer in layers if isinstance(layer, LazyModuleMixin)]
    if lazy:
        raise ValueError(f"Lazy layers have no weight yet: {', '.join(lazy)}; run one forward pass first.")


def _check_patterns(exclude: Sequence[str], names: Sequence[str]) -> None:
    if isinstance(exclude, str):
        raise ValueError(
            f"`exclude` is a sequence of patterns, got the string {exclude!r}; write exclude=({exclude!r},)."
        )
    for pattern in exclude:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ValueError(f"`exclude` pattern {pattern!r} matches no layer; the layers are: {', '.join(names)}.")


def _shared_weights(module: nn.Module) -> dict[str, list[str]]:
    """For each layer name, the other layers that hold the same weight."""
    holders: dict[int, list[str]] = defaultdict(list)
    for name, layer in _layers(module):
        for parameter in layer.parameters(recurse=False):
            holders[id(parameter)].append(name)
    return {name: names for names in holders.values() if len(names) > 1 for name in names}


def _check_ties(report: LayerReport, shared: Mapping[str, Sequence[str]]) -> None:
    tied = [" and ".join(map(repr, shared[name])) for name in report.sharded_names if name in shared]
    if tied:
        raise ValueError(
            f"Layers that share a weight cannot be sharded apart: {'; '.join(dict.fromkeys(tied))}. "
            "Exclude them by name (`exclude=`) to keep them dense, or untie them."
        )
