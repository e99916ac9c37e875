"""The plan of a module, made from a user's choices or given."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from lightning_spectral.errors import check_is
from lightning_spectral.nn.plan.choices import LayerChoices
from lightning_spectral.nn.plan.module_plan import ModulePlan
from lightning_spectral.nn.plan.planner import plan_layers
from lightning_spectral.nn.plan.trace import Example
from lightning_spectral.nn.plan.untraced import REMEDY, difference_from_a_run


def validate(
    module: nn.Module, example_input: Example = None, layers: LayerChoices | ModulePlan = LayerChoices()
) -> ModulePlan:
    """Print how clients hold every layer and buffer, and why, with all problems at once; nothing is changed.

    Args:
        module: The user's module.
        example_input: One input, a tuple of them, or a dictionary of keyword arguments, for one forward pass that
            shows which layers run and in which order; ``None`` for the module's ``example_input_array``, as in
            Lightning, or for no pass if it has none.
        layers: Choices that differ from the defaults; or a plan of this module, to print it again.

    Returns:
        The printed plan, including its problems. Pass it to `SpectralSharding`, `cost_table` and others as ``layers``,
        and they follow it. Otherwise a run makes its own plan, which knows no example but the module's
        ``example_input_array``; where that plan is another, a printed note says so.

    Raises:
        ValueError: If ``layers`` is the plan of another module, or there is an example but no ``forward``.

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

    Args:
        module: The user's module; it is only read.
        layers: Choices, or the plan that `validate` returned.
        example_input: As in `validate`; a given plan needs none.
        missing_rank: As in `plan_layers`; a given plan needs none.

    Raises:
        ValueError: If `validate` shows problems, which the message lists, or if ``layers`` is the plan of another
            module.
        TypeError: If ``layers`` is something else.

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
