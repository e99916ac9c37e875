"""Decide, before any training, which layers of a module are sharded."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin

from lightning_spectral.nn.layers.blocks import WeightBlock
from lightning_spectral.nn.plan.layer_types import ShardedType, is_affine, refusal, sharded_type
from lightning_spectral.nn.plan.problems import Choices, problems_of
from lightning_spectral.nn.plan.report import BufferTreatment, LayerReport, LayerTreatment
from lightning_spectral.nn.plan.trace import Example, example_of, execution_order
from lightning_spectral.protocol.exchange import buffer_policies


def plan_layers(
    module: nn.Module,
    example_input: Example = None,
    *,
    exclude: Sequence[str] = (),
    split: Mapping[str, int] | None = None,
    keep_first_and_last_dense: bool = True,
    keep_buffers: Sequence[str] = (),
) -> LayerReport:
    """Decide the treatment of every layer of ``module`` that has parameters, and say all that is wrong at once.

    Args:
        module: The user's module; it is only read.
        example_input: One input, a tuple of them, or a dictionary of keyword arguments, for one forward pass that
            shows which layers run and in which order; ``None`` for Lightning's ``example_input_array`` of the module,
            or no pass.
        exclude: Shell-style patterns of dotted layer names that stay dense, e.g. ``"head"`` or ``"blocks.*.proj"``.
        split: From a pattern of layer names to the number of linear layers packed into each, e.g. ``{"*.qkv": 3}``.
        keep_first_and_last_dense: Keep the first and the last layer dense (Korzhenkov & Louizos 2024, section 4.1), in
            order of execution where a pass was traced, else of registration. An embedding before the first affine
            layer is the first layer.
        keep_buffers: Patterns of buffer names that keep the server's value; other finite floating-point ones are
            averaged.
    """
    example = example_of(module) if example_input is None else example_input
    order = None if example is None else execution_order(module, example)
    layers = _in_order(dict(_layers(module)), order)
    choices = Choices(exclude, split or {})
    planner = _Planner(choices, order, _ends(layers, order) if keep_first_and_last_dense else {}, _ties(module))
    treatments = tuple(planner.treat(name, layer) for name, layer in layers.items())
    buffers = tuple(BufferTreatment(*entry) for entry in buffer_policies(module, keep_buffers))
    return LayerReport(treatments, buffers, tuple(problems_of(module, layers, treatments, choices)))


def check_undecided(exclude: Sequence[str], split: Mapping[str, int] | None, keep_first_and_last_dense: bool) -> None:
    """Raise ``ValueError`` if choices come along with a plan, which has made them."""
    if exclude or split or not keep_first_and_last_dense:
        raise ValueError(
            "`plan` has decided the treatment of every layer: give `exclude`, `split` and "
            "`keep_first_and_last_dense` to `validate`, which makes it."
        )


def validate(
    module: nn.Module,
    example_input: Example = None,
    *,
    exclude: Sequence[str] = (),
    split: Mapping[str, int] | None = None,
    keep_first_and_last_dense: bool = True,
    keep_buffers: Sequence[str] = (),
) -> LayerReport:
    """Print what happens to every layer and buffer, why, and every problem at once; nothing is changed.

    Args:
        module: The user's module.
        example_input: As in `plan_layers`: one forward pass shows the order of execution, and what never runs.
        exclude: As in `plan_layers`.
        split: As in `plan_layers`.
        keep_first_and_last_dense: As in `plan_layers`.
        keep_buffers: As in `plan_layers`.

    Returns:
        The same as a `LayerReport`; give it to `SpectralSharding` as ``plan`` to fix exactly this treatment.

    Example:
        >>> import torch
        >>> mlp = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 2))
        >>> report = validate(mlp, torch.zeros(1, 8))
        layer  type    weight  N   in forward  treatment  reason
        0      Linear  16x8    8   yes         dense      first layer
        2      Linear  16x16   16  yes         sharded    affine
        4      Linear  2x16    2   yes         dense      last layer
    """
    report = plan_layers(
        module,
        example_input,
        exclude=exclude,
        split=split,
        keep_first_and_last_dense=keep_first_and_last_dense,
        keep_buffers=keep_buffers,
    )
    print(report)
    return report


@dataclass(frozen=True)
class _Planner:
    """What the treatment of one layer depends on."""

    choices: Choices
    order: tuple[str, ...] | None
    ends: Mapping[str, str]
    ties: Mapping[str, Sequence[str]]

    def treat(self, name: str, layer: nn.Module) -> LayerTreatment:
        parts = self.choices.num_parts(name)
        reason = self._reason_to_stay_dense(name, layer)
        kind = None if reason else sharded_type(layer, parts)
        in_forward = None if self.order is None else name in self.order
        blocks = tuple(block.within(name) for block in _blocks(layer, parts))
        what = "affine" if parts == 1 else f"affine, {parts} parts"
        return LayerTreatment(name, type(layer).__name__, _shapes(layer), blocks, kind, reason or what, in_forward)

    def _reason_to_stay_dense(self, name: str, layer: nn.Module) -> str | None:
        if not name:
            return "the whole module: wrap it in another"
        if isinstance(layer, LazyModuleMixin):
            return "lazy: no weight yet"
        if not is_affine(layer):
            return "not an affine layer"
        if self.choices.excludes(name):
            return "excluded by name"
        if name in self.ends:
            return self.ends[name]
        if name in self.ties:
            return f"shares its weight with {' and '.join(map(repr, self.ties[name]))}"
        if reason := refusal(layer):
            return reason
        weights = {block.parameter for block in _blocks(layer, 1)}
        if not all(layer.get_parameter(weight).requires_grad for weight in weights):
            return "frozen"
        if self.order is not None and name not in self.order:
            return "not in the forward pass"
        return None


def _layers(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, layer in module.named_modules():
        if next(layer.parameters(recurse=False), None) is not None:
            yield name, layer


def _in_order(layers: dict[str, nn.Module], order: Sequence[str] | None) -> dict[str, nn.Module]:
    """Executed layers first, in order of their first call; then those that never ran."""
    ran = [name for name in order or () if name in layers]
    return {name: layers[name] for name in dict.fromkeys([*ran, *layers])}


def _ends(layers: Mapping[str, nn.Module], order: Sequence[str] | None) -> dict[str, str]:
    names = [name for name in layers if order is None or name in order]
    weighted = [name for name in names if is_affine(layers[name]) or isinstance(layers[name], nn.Embedding)]
    affine = [name for name in weighted if is_affine(layers[name])]
    first = {weighted[0]: "first layer"} if affine and weighted[0] == affine[0] else {}
    return {affine[-1]: "last layer", **first} if affine else {}


def _ties(module: nn.Module) -> dict[str, list[str]]:
    """For each layer name, the other layers that hold one of its parameters."""
    holders: dict[int, list[str]] = defaultdict(list)
    for name, layer in _layers(module):
        for parameter in layer.parameters(recurse=False):
            holders[id(parameter)].append(name)
    return {name: [n for n in names if n != name] for names in holders.values() if len(names) > 1 for name in names}


def _blocks(layer: nn.Module, num_parts: int) -> tuple[WeightBlock, ...]:
    kind: ShardedType | None = sharded_type(layer, num_parts) if is_affine(layer) else None
    if kind is None or isinstance(layer, LazyModuleMixin) or refusal(layer):
        return ()
    try:
        return kind.blocks_of(layer, num_parts)
    except ValueError:  # the split does not divide the rows: one of the problems
        return kind.blocks_of(layer, 1)


def _shapes(layer: nn.Module) -> tuple[tuple[int, ...], ...]:
    weights = (p for name, p in layer.named_parameters(recurse=False) if "bias" not in name)
    return () if isinstance(layer, LazyModuleMixin) else tuple(tuple(weight.shape) for weight in weights)
