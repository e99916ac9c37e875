"""Decide, before any training, which layers of a module are sharded, and how finely, and swap them."""

from __future__ import annotations

import heapq
import logging
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from lightning_spectral.arguments import first_match, unmatched
from lightning_spectral.client.kept_state import trying
from lightning_spectral.errors import check_is
from lightning_spectral.functional.spectra import KEEP_RATIO, num_terms_for
from lightning_spectral.nn.layers.sharded import ShardedLayer
from lightning_spectral.nn.layers.terms import WeightBlock
from lightning_spectral.nn.plan.layer_types import (
    LOW_RANK,
    ShardedType,
    is_affine,
    is_namesake,
    is_uninitialised,
    low_rank_factors,
    missing_rank,
    refusal,
    sharded_type,
    type_name,
)
from lightning_spectral.nn.plan.module_plan import BufferPlan, LayerChoices, LayerPlan, ModulePlan
from lightning_spectral.nn.trace import Example, example_of, execution_order
from lightning_spectral.protocol.buffer_rules import Rules, as_rules, buffer_policies
from lightning_spectral.protocol.exchange import copy_module

FROZEN, FIRST, LAST = "frozen", "first layer", "last layer"
REMEDY = "Give the run this plan, SpectralSharding(layers=plan), or set the module's `example_input_array`."


def plan_layers(
    module: nn.Module,
    example_input: Example = None,
    choices: LayerChoices = LayerChoices(),
    missing_rank: Mapping[str, str] | None = None,
    buffers: Rules | None = None,
) -> ModulePlan:
    """Decide how clients hold every layer of ``module`` that has parameters, and collect all problems.

    A pure function: nothing is printed, changed or raised about the module.

    Args:
        module: The user's module; it is only read.
        example_input: As in `validate`.
        choices: The user's choices.
        missing_rank: The layers that lack rank, with the reasons, as in `ModulePlan.missing_rank` of the plan with
            which training began; ``None`` to look at the weights.
        buffers: As in `validate`.

    Example:
        >>> plan = plan_layers(nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 2)))
        >>> plan.sharded_weights
        ('1.weight',)
    """
    example = example_of(module) if example_input is None else example_input
    order = None if example is None else execution_order(module, example)
    layers = {n: part for n, part in module.named_modules() if next(part.parameters(recurse=False), None) is not None}
    ran = [name for name in order or () if name in layers]
    layers = {name: layers[name] for name in dict.fromkeys([*ran, *layers])}  # in order, then those that never ran
    stays_dense = _reasons_to_stay_dense(module, layers, order, choices, missing_rank)
    plans = []
    for name, layer in layers.items():
        parts, reason = choices.num_parts(name), stays_dense[name]
        sharded = None if reason else sharded_type(layer, parts, choices.convolutions)
        factor = first_match(name, choices.ratio_factors) or 1.0
        options: dict[str, Any] = {"ratio_factor": factor, "granularity": choices.term_granularity}
        blocks = [replace(block.within(name), **options) for block in _blocks(layer, choices, parts)]
        if sharded is not None and sharded.cuts_outputs:
            held = [num_terms_for(block.shape[0], choices.output_ratio) for block in blocks]
            blocks = [
                replace(block, held_rows=None if rows == block.shape[0] else rows)
                for block, rows in zip(blocks, held, strict=True)
            ]
        what = "affine" + f", {parts} parts" * (parts > 1) + f", {factor:g} times the keep ratio" * (factor != 1)
        weights = (p for own, p in layer.named_parameters(recurse=False) if "bias" not in own)
        shapes = () if is_uninitialised(layer) else tuple(tuple(weight.shape) for weight in weights)
        in_forward = None if order is None else name in order
        plans.append(LayerPlan(name, type_name(layer), shapes, tuple(blocks), sharded, reason or what, in_forward))
    of_buffers = _policies(module, buffers or {})
    problems = _problems(layers, plans, choices)
    problems += unmatched("buffers", buffers or {}, [buffer.name for buffer in of_buffers], "buffer")
    return ModulePlan(tuple(plans), of_buffers, tuple(problems), choices)


def _policies(module: nn.Module, buffers: Rules) -> tuple[BufferPlan, ...]:
    return tuple(BufferPlan(*entry) for entry in buffer_policies(module, as_rules("buffers", buffers)))


def _blocks(layer: nn.Module, choices: LayerChoices, num_parts: int = 1) -> tuple[WeightBlock, ...]:
    sharded = sharded_type(layer, num_parts, choices.convolutions) if is_affine(layer) else None
    if sharded is None or is_uninitialised(layer) or refusal(layer):
        return ()
    try:
        return sharded.blocks_of(layer, num_parts)
    except ValueError:  # the split does not divide the rows: one of the problems
        return sharded.blocks_of(layer, 1)


def _reasons_to_stay_dense(
    module: nn.Module,
    layers: Mapping[str, nn.Module],
    order: Sequence[str] | None,
    choices: LayerChoices,
    lacking: Mapping[str, str] | None,
) -> dict[str, str | None]:
    """Why each layer is not sharded; ``None`` if it is."""
    shapes: dict[bool, dict[str, tuple[int, int]]] = {True: {}, False: {}}  # of frozen layers, of trained ones
    plain = LayerChoices()
    whole = {name: _blocks(layer, plain) for name, layer in layers.items()}
    is_frozen = {
        name: not all(layers[name].get_parameter(block.parameter).requires_grad for block in blocks)
        for name, blocks in whole.items()
    }
    for name, blocks in whole.items():
        if len(blocks) == 1:
            shapes[is_frozen[name]][name] = blocks[0].shape
    factors = low_rank_factors(module, trained=shapes[False], frozen=shapes[True])
    ends: dict[str, str] = {}
    names = [name for name in layers if (order is None or name in order) and name not in factors]
    weighted = [name for name in names if is_affine(layers[name]) or isinstance(layers[name], nn.Embedding)]
    affine = [name for name in weighted if is_affine(layers[name])]
    if affine and choices.keep_first_and_last_dense:
        ends = {affine[-1]: LAST, **({affine[0]: FIRST} if weighted[0] == affine[0] else {})}
    holders: dict[int, list[str]] = defaultdict(list)
    for name, layer in module.named_modules():
        for parameter in layer.parameters(recurse=False):
            holders[id(parameter)].append(name)
    ties = {name: names for names in holders.values() if len(names) > 1 for name in names}

    def reason(name: str, layer: nn.Module) -> str | None:
        if not name:
            return "the whole module: wrap it in another"
        if is_uninitialised(layer):
            return "lazy: no weight yet"
        if not is_affine(layer):
            return f"{type_name(layer)} is not supported" if is_namesake(layer) else "not an affine layer"
        if choices.excludes(name):
            return "excluded by name"
        if name in factors:
            return LOW_RANK
        if name in ends:
            return ends[name]
        if name in ties:
            return f"shares its weight with {' and '.join(repr(other) for other in ties[name] if other != name)}"
        if refused := refusal(layer):
            return refused
        if is_frozen[name]:
            return FROZEN
        if order is not None and name not in order:
            return "not in the forward pass"
        if lacking is not None:
            return lacking.get(name)
        return missing_rank(layer, _blocks(layer, choices, choices.num_parts(name)))

    return {name: reason(name, layer) for name, layer in layers.items()}


def _problems(layers: Mapping[str, nn.Module], plans: Sequence[LayerPlan], choices: LayerChoices) -> list[str]:
    problems = []
    if lazy := [name for name, layer in layers.items() if is_uninitialised(layer)]:
        problems.append(f"Lazy layers have no weight yet: {', '.join(lazy)}; run one forward pass first.")
    for argument in ("exclude", "split", "ratio_factors"):
        problems += unmatched(argument, getattr(choices, argument), layers, "layer")
    for name, layer in layers.items():
        parts = choices.num_parts(name)
        kind = sharded_type(layer, parts)
        try:
            if kind is not None and parts > 1:
                kind.blocks_of(layer, parts)
            elif parts > 1:
                problems.append(f"`split` is for linear layers; {name!r} is a {type(layer).__name__}.")
        except ValueError as error:
            problems.append(f"`split` of {name!r}: {error}")
    sharded = [layer for layer in plans if layer.sharded is not None]
    if not sharded and not any(layer.reason in (FROZEN, LOW_RANK) for layer in plans):
        problems.append(
            "No layer of this module can be sharded; `exclude` takes layers out, and the first and the last stay dense "
            "without layers=LayerChoices(keep_first_and_last_dense=False)."
        )
    largest = max((block.num_singular for layer in sharded for block in layer.blocks), default=math.inf)
    if 1 < largest <= choices.term_granularity:
        problems.append(
            f"`term_granularity={choices.term_granularity}` rounds up to all terms of every sharded layer, of which "
            f"the largest has N = {largest}: every client would hold them all. Lower it far below that."
        )
    return problems


def validate(
    module: nn.Module,
    example_input: Example = None,
    layers: LayerChoices | ModulePlan = LayerChoices(),
    buffers: Rules | None = None,
) -> ModulePlan:
    """Find how clients hold every layer and buffer, and why, with all problems at once; ``print`` shows it as tables.

    Args:
        module: The user's module.
        example_input: One input, a tuple of them, or a dictionary of keyword arguments, for one forward pass that shows
            which layers run and in which order; ``None`` for the module's ``example_input_array``, or for no pass if it
            has none.
        layers: Choices that differ from the defaults; or a plan of this module, to check it again.
        buffers: What becomes of buffers, as for `FederatedModule`, to show that too.

    Returns:
        The plan, including its problems. Pass it to `SpectralSharding`, `cost_table` and others as ``layers``,
        and they follow it. Otherwise a run makes its own plan, from the module's ``example_input_array`` alone; a
        note says if that plan differs.

    Example:
        >>> import torch
        >>> mlp = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 2))
        >>> print(validate(mlp, torch.zeros(1, 8)))
        layer  type    weight  N   in forward  held     reason
        0      Linear  16x8    8   yes         dense    first layer
        2      Linear  16x16   16  yes         sharded  affine
        4      Linear  2x16    2   yes         dense    last layer
    """
    plan = _plan(module, layers, example_input, buffers=buffers)
    if isinstance(layers, LayerChoices) and example_input is not None and example_of(module) is None:
        untraced = {layer.name: layer.sharded for layer in plan_layers(module, choices=layers).layers}
        other = [layer.name for layer in plan.layers if layer.sharded is not untraced[layer.name]]
        sharded = ", ".join(name for name in other if untraced[name] is not None)
        dense = ", ".join(name for name in other if untraced[name] is None)
        if held := " and ".join([f"shard {sharded}"] * bool(sharded) + [f"keep {dense} dense"] * bool(dense)):
            whose = f"{type(module).__name__} has no `example_input_array`"
            return replace(plan, note=f"NOTE: {whose}, so a run traces no pass and would {held}. {REMEDY}")
    return plan


def plan_of(
    module: nn.Module,
    layers: LayerChoices | ModulePlan = LayerChoices(),
    example_input: Example = None,
    missing_rank: Mapping[str, str] | None = None,
) -> ModulePlan:
    """A plan of ``module`` without problems: made from choices, or given and checked.

    ``ValueError`` if `validate` shows problems, which the message lists, or if ``layers`` is the plan of another
    module. A given plan needs neither ``example_input`` (as in `validate`) nor ``missing_rank`` (as in `plan_layers`).

    Example:
        >>> mlp = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 2))
        >>> plan = plan_of(mlp, LayerChoices(term_granularity=4))
        >>> plan_of(mlp, plan) is plan
        True
    """
    return _plan(module, layers, example_input, missing_rank).check()


def check_layers(layers: object) -> None:
    """Raise ``TypeError`` unless ``layers`` is a `LayerChoices` or a `ModulePlan`."""
    if not isinstance(layers, LayerChoices | ModulePlan):
        raise TypeError(
            f"`layers` must be a LayerChoices or the ModulePlan that `validate` returned, got {layers!r}; write "
            "LayerChoices(exclude=...)."
        )


def _plan(
    module: nn.Module,
    layers: LayerChoices | ModulePlan,
    example_input: Example,
    missing_rank: Mapping[str, str] | None = None,
    buffers: Rules | None = None,
) -> ModulePlan:
    check_is("module", module, nn.Module)
    check_layers(layers)
    if isinstance(layers, LayerChoices):
        return plan_layers(module, example_input, layers, missing_rank, buffers)
    layers.check_module(module)
    return layers if buffers is None else replace(layers, buffers=_policies(module, buffers))


def untraced_ends(server: nn.Module, plan: ModulePlan) -> str:
    """What a plan made without a forward pass assumes instead, in a sentence for a run's log; else empty."""
    if example_of(server) is not None or any(layer.in_forward is not None for layer in plan.layers):
        return ""
    ends = ", ".join(layer.name for layer in plan.layers if layer.reason in (FIRST, LAST))
    dense = f" Its first and last layers stay dense: {ends}." if ends else ""
    return (
        f"{type(server).__name__} has no `example_input_array`, so no forward pass was traced: the plan assumes that "
        f"all layers run, in the order in which they are registered.{dense}"
    )


_log = logging.getLogger(__name__)
ModuleT = TypeVar("ModuleT", bound=nn.Module)


def replace_layers(
    module: ModuleT,
    keep_ratio: float,
    example_input: Example = None,
    layers: LayerChoices | ModulePlan = LayerChoices(),
) -> ModuleT:
    """A copy of ``module`` whose affine layers hold the ceil(r N) largest terms of their singular value decomposition.

    Each swapped layer is logged in one line by the package's logger, at level INFO.

    Args:
        module: Any module; it is not changed.
        keep_ratio: Share r of the singular terms to hold, in ``(0, 1]``.
        example_input: As in `validate`.
        layers: As in `validate`.

    Example:
        >>> mlp = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 2))
        >>> replace_layers(mlp, keep_ratio=0.25)[1]
        SpectralShardedLinear(in_features=16, out_features=16, num_terms=4, bias=True)
    """
    keep_ratio = KEEP_RATIO("keep_ratio", keep_ratio)
    plan = plan_of(module, layers, example_input)
    copied: ModuleT = copy_module(module)
    swap_layers(copied, plan, lambda sharded, dense, num_terms: sharded.from_dense(dense, num_terms), keep_ratio)
    return copied


def swap_layers(
    module: nn.Module,
    plan: ModulePlan,
    make: Callable[[ShardedType, Any, Sequence[int]], ShardedLayer],
    keep_ratio: float,
) -> None:
    """Turn the layers to be sharded into sharded ones, in place.

    ``make`` makes the new layer from the sharded class, the dense layer and the numbers of terms of its blocks.
    """
    for name, layer in plan.sharded.items():
        assert layer.sharded is not None
        dense = module.get_submodule(name)
        sharded = make(layer.sharded, dense, [block.num_terms(keep_ratio) for block in layer.blocks])
        sharded.dense_name = name  # so that it can refuse writes to the weights that it stands for
        sharded.dense_weights = frozenset(block.parameter.removeprefix(f"{name}.") for block in layer.blocks)
        held_rows, bias = layer.blocks[0].held_rows, getattr(dense, "bias", None)
        if held_rows is not None:
            if dense._backward_hooks or dense._backward_pre_hooks:
                raise ValueError(
                    f"The layer {name!r} has a hook on its backward pass, which needs all outputs, and clients hold "
                    "only some of them; name it in `exclude`, or leave `output_ratio` out."
                )
            sharded.keep_outputs(held_rows, with_bias=bias is not None and bias.requires_grad)
        sharded.train(dense.training)
        _log.info("%s: %s -> %s", name, type(dense).__name__, sharded)
        _become(dense, sharded)
    for part in module.modules():
        if isinstance(part, nn.TransformerEncoder):  # nested tensors go to a kernel that reads dense weights
            part.use_nested_tensor = False


def _become(dense: nn.Module, sharded: nn.Module) -> None:
    """Turn a layer into its replacement, so that lists and functions that refer to the layer follow as well.

    Attributes that the user has given the layer stay, and hooks that are added to it later act on the replacement.
    """
    kind = type(sharded)
    for name, hooks in vars(sharded).items():
        if name.endswith("hooks") and ("forward" in name or "backward" in name):
            own = vars(dense).get(name, {})
            own.update(hooks)
            vars(sharded)[name] = own
    vars(sharded)["_is_full_backward_hook"] = dense._is_full_backward_hook
    for name in [name for name in vars(dense) if hasattr(kind, name) and not hasattr(nn.Module, name)]:
        delattr(dense, name)  # it would hide what the class says
    dense.__class__ = kind
    vars(dense).update(vars(sharded))


def allocate_terms(
    module: nn.Module,
    loss: Callable[[nn.Module], Tensor],
    keep_ratio: float,
    example_input: Example = None,
    choices: LayerChoices = LayerChoices(),
) -> LayerChoices:
    """Choose `LayerChoices.ratio_factors` by the gradient of a loss: which layers get more terms, and which fewer.

    A term that a layer gets is worth the energy of its gradient that one more singular term holds, for each value that
    clients are sent. Each layer gets one term, and the others go one by one where they are worth most, until all layers
    together cost what they would at equal ratios.

    Args:
        module: The user's module, with the weights from which training begins; it is restored.
        loss: Returns the loss of the module on a few hundred examples, such as public ones.
        keep_ratio: That of the clients; of the smallest ones, if they differ.
        example_input: As in `validate`.
        choices: All other choices.

    Returns:
        These choices, with a factor for each sharded layer.

    Raises:
        ValueError: If the module cannot be sharded as chosen, or the ratio is outside (0, 1].

    Example:
        >>> net = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 8))
        >>> def loss(net):  # one layer starves: its gradient vanishes
        ...     return net[3](net[2](net[0](torch.eye(8)) + 0.0 * net[1](torch.ones(16)))).square().mean()
        >>> choices = allocate_terms(net, loss, keep_ratio=0.25)
        >>> {name: block.num_terms(0.25) for name, block in plan_layers(net, choices=choices).blocks.items()}
        {'1': 1, '2': 7}
    """
    keep_ratio = KEEP_RATIO("keep_ratio", keep_ratio)
    plan = plan_layers(module, example_input, replace(choices, ratio_factors={})).check()
    weights = {name: module.get_parameter(name) for name in plan.sharded_weights}
    with trying(module), torch.enable_grad():
        found = torch.autograd.grad(loss(module), list(weights.values()), allow_unused=True)
    gradients = {n: torch.zeros_like(w) if g is None else g for (n, w), g in zip(weights.items(), found, strict=True)}
    ladders = {name: _steps(layer, gradients) for name, layer in plan.sharded.items()}
    budget = sum(block.num_terms(keep_ratio) * sum(block.shape) for block in plan.blocks.values())
    held = dict.fromkeys(ladders, 0)
    queue = [(-float("inf"), name) for name in ladders]  # one step for each layer, whatever it is worth
    while queue:
        _, name = heapq.heappop(queue)
        cost = ladders[name][held[name]][1]
        if held[name] > 0 and cost > budget:
            continue
        held[name], budget = held[name] + 1, budget - cost
        if held[name] < len(ladders[name]):
            heapq.heappush(queue, (-ladders[name][held[name]][2], name))
    factors = {name: ladders[name][steps - 1][0] / keep_ratio for name, steps in held.items()}
    return replace(choices, ratio_factors=factors)


def _steps(layer: LayerPlan, gradients: dict[str, Tensor]) -> list[tuple[float, int, float]]:
    """The shares of terms that a layer may hold, with what each costs more than the one before, and gains per value."""
    largest = max(layer.blocks, key=lambda block: block.num_singular)
    matrices = [block.matrix(gradients[block.parameter]).double() for block in layer.blocks]
    energies = [torch.linalg.svdvals(matrix).square().cumsum(0) for matrix in matrices]
    steps, before = list[tuple[float, int, float]](), (0, 0.0)
    for count in range(largest.granularity, largest.num_singular + largest.granularity, largest.granularity):
        share = min(1.0, count / largest.num_singular)
        counts = [block.num_terms(share) for block in layer.blocks]
        cost = sum(n * sum(block.shape) for n, block in zip(counts, layer.blocks, strict=True))  # values of vectors
        energy = sum(float(of_block[n - 1]) for of_block, n in zip(energies, counts, strict=True))
        steps.append((share, cost - before[0], (energy - before[1]) / (cost - before[0])))
        before = cost, energy
    return steps
