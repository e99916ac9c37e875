"""The plan of a module, made from choices or given, and where a run without an example plans otherwise."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from lightning_spectral.errors import check_is
from lightning_spectral.nn.plan.choices import LayerChoices
from lightning_spectral.nn.plan.module_plan import ModulePlan
from lightning_spectral.nn.plan.planner import plan_layers
from lightning_spectral.nn.plan.trace import Example, example_of

REMEDY = "Give the run this plan, SpectralSharding(layers=plan), or set the module's `example_input_array`."
ENDS = ("first layer", "last layer")


def validate(
    module: nn.Module, example_input: Example = None, layers: LayerChoices | ModulePlan = LayerChoices()
) -> ModulePlan:
    """Print how clients hold every layer and buffer, and why, with all problems at once; nothing is changed.

    Args:
        module: The user's module.
        example_input: One input, a tuple of them, or a dictionary of keyword arguments, for one forward pass that shows
            which layers run and in which order; ``None`` for the module's ``example_input_array``, or for no pass if it
            has none.
        layers: Choices that differ from the defaults; or a plan of this module, to print it again.

    Returns:
        The printed plan, including its problems. Pass it to `SpectralSharding`, `cost_table` and others as ``layers``,
        and they follow it. Otherwise a run makes its own plan, which knows no example but the module's
        ``example_input_array``; where that plan is another, a printed note says so.

    Example:
        >>> import torch
        >>> mlp = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 2))
        >>> plan = validate(mlp, torch.zeros(1, 8))
        layer  type    weight  N   in forward  held     reason
        0      Linear  16x8    8   yes         dense    first layer
        2      Linear  16x16   16  yes         sharded  affine
        4      Linear  2x16    2   yes         dense    last layer
    """
    plan = _plan(module, layers, example_input)
    print(plan)
    if difference := difference_from_a_run(module, plan, layers, example_input):
        print(f"\nNOTE: {difference} {REMEDY}")
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
) -> ModulePlan:
    check_is("module", module, nn.Module)
    check_layers(layers)
    if isinstance(layers, LayerChoices):
        return plan_layers(module, example_input, layers, missing_rank)
    layers.check_module(module)
    return layers


def difference_from_a_run(
    module: nn.Module, plan: ModulePlan, layers: LayerChoices | ModulePlan, example_input: Example
) -> str:
    """The layers that a run would hold otherwise, because it does not know the example, in a sentence; else empty."""
    if isinstance(layers, ModulePlan) or example_input is None or example_of(module) is not None:
        return ""
    untraced = {layer.name: layer.sharded for layer in plan_layers(module, choices=layers).layers}
    other = [layer.name for layer in plan.layers if layer.sharded is not untraced[layer.name]]
    sharded = ", ".join(name for name in other if untraced[name] is not None)
    dense = ", ".join(name for name in other if untraced[name] is None)
    held = " and ".join([f"shard {sharded}"] * bool(sharded) + [f"keep {dense} dense"] * bool(dense))
    return held and f"{type(module).__name__} has no `example_input_array`, so a run traces no pass and would {held}."


def untraced_ends(server: nn.Module, plan: ModulePlan) -> str:
    """What a plan made without a forward pass assumes instead, in a sentence for a run's log; else empty."""
    if example_of(server) is not None or any(layer.in_forward is not None for layer in plan.layers):
        return ""
    ends = ", ".join(layer.name for layer in plan.layers if layer.reason in ENDS)
    dense = f"; first and last, and so dense: {ends}" if ends else ""
    return (
        f"{type(server).__name__} has no `example_input_array`, so its layers were planned without a forward pass, as "
        f"if all of them ran, in the order of registration{dense}."
    )
