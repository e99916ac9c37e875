"""Says where a run that traces no forward pass plans otherwise than what a user was shown for an example."""

from __future__ import annotations

from torch import nn

from lightning_spectral.nn.plan.choices import LayerChoices
from lightning_spectral.nn.plan.module_plan import ModulePlan
from lightning_spectral.nn.plan.planner import plan_layers
from lightning_spectral.nn.plan.trace import Example, example_of

REMEDY = "Give the run this plan, SpectralSharding(layers=plan), or set the module's `example_input_array`."
ENDS = ("first layer", "last layer")


def difference_from_a_run(
    module: nn.Module, plan: ModulePlan, layers: LayerChoices | ModulePlan, example_input: Example
) -> str:
    """A sentence on the layers that a run would hold otherwise, because it does not know the example; else empty.

    Args:
        module: The user's module.
        plan: The plan made with the example.
        layers: What it was made from. A run that is given a plan follows it.
        example_input: The example that was given; ``None`` for the module's own, which a run uses too.
    """
    if isinstance(layers, ModulePlan) or example_input is None or example_of(module) is not None:
        return ""
    untraced = {layer.name: layer.sharded for layer in plan_layers(module, choices=layers).layers}
    other = [layer.name for layer in plan.layers if layer.sharded is not untraced[layer.name]]
    sharded = ", ".join(name for name in other if untraced[name] is not None)
    dense = ", ".join(name for name in other if untraced[name] is None)
    held = " and ".join([f"shard {sharded}"] * bool(sharded) + [f"keep {dense} dense"] * bool(dense))
    return held and f"{type(module).__name__} has no `example_input_array`, so a run traces no pass and would {held}."


def untraced_ends(server: nn.Module, plan: ModulePlan) -> str:
    """A sentence for a run whose plan was made without a forward pass, on what was assumed instead; else empty."""
    if example_of(server) is not None or any(layer.in_forward is not None for layer in plan.layers):
        return ""
    ends = ", ".join(layer.name for layer in plan.layers if layer.reason in ENDS)
    dense = f"; first and last, and so dense: {ends}" if ends else ""
    return (
        f"{type(server).__name__} has no `example_input_array`, so its layers were planned without a forward pass, as "
        f"if all of them ran, in the order of registration{dense}."
    )
