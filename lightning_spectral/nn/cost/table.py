"""The cost of each keep ratio, as a table to print, plot and log."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING

from torch import nn

from lightning_spectral.arguments import each
from lightning_spectral.extras import from_extra
from lightning_spectral.functional.factors import KEEP_RATIO
from lightning_spectral.nn.cost.block_costs import Cost
from lightning_spectral.nn.cost.costs import costs_of
from lightning_spectral.nn.cost.rows import Columns, CostRows, show_bytes, show_count
from lightning_spectral.nn.plan.choices import LayerChoices
from lightning_spectral.nn.plan.module_plan import ModulePlan
from lightning_spectral.nn.plan.trace import Example

if TYPE_CHECKING:
    from matplotlib.figure import Figure


COLUMNS: Columns = MappingProxyType(
    {
        "parameters": ("parameters", show_count),
        "macs": ("MACs", show_count),
        "kept_values": ("kept values", show_count),
        "kept_bytes": ("kept bytes", show_bytes),
        "downlink_bytes": ("down", show_bytes),
        "uplink_bytes": ("up", show_bytes),
        "frozen_bytes": ("down once", show_bytes),
    }
)
# Titles, and line styles that remain distinguishable where lines overlap.
LINES: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "kept_bytes": ("kept bytes", "-s"),
        "parameters": ("parameters", "-o"),
        "macs": ("MACs", "--x"),
        "round_bytes": ("down and up", ":+"),
    }
)


class CostTable(CostRows[Cost]):
    """The cost of a client's model, whole and at each keep ratio; ``print`` shows it as a table.

    Attributes:
        full: The whole model, as `FedAvg` trains it.
        at: Maps keep ratios to the costs of sub-models, in the order given.
    """

    title = "keep ratio"
    columns = COLUMNS

    def plot(self) -> Figure:
        """Plot each cost as a share of the whole model's; needs matplotlib (the ``examples`` extra)."""
        with from_extra("examples"):
            from matplotlib.figure import Figure

        figure = Figure(figsize=(6.0, 3.5), layout="constrained")
        axes = figure.add_subplot(xlabel="keep ratio", ylabel="share of the whole model's")
        axes.axhline(1.0, color="grey", linewidth=0.8)
        ratios = sorted(self.at)
        for name, (title, look) in LINES.items():
            axes.plot(ratios, [self.share(name, self.at[ratio]) for ratio in ratios], look, label=title)
        axes.set_ylim(bottom=0.0)
        axes.grid(alpha=0.3)
        figure.legend(loc="outside right upper")
        return figure


def cost_table(
    module: nn.Module,
    keep_ratios: Sequence[float] = (0.2, 0.4, 0.6, 0.8),
    example_input: Example = None,
    layers: LayerChoices | ModulePlan = LayerChoices(),
) -> CostTable:
    """The cost of each keep ratio to a client, before any training.

    Two forward passes are counted on a copy, of the whole model and of its smallest sub-model; formulas give the rest.
    Activations and multiplications are those of one pass of ``example_input``, so give a batch like those that clients
    train on, and a module whose layers are in the mode in which they train. Kept values are those that autograd saves.
    What a kernel saves differs between devices, so count on the device used for training.

    Args:
        module: Any module; it is not changed.
        keep_ratios: Shares of the singular terms, each in ``(0, 1]``.
        example_input: One input, a tuple of them, or a dictionary of keyword arguments, on the module's device;
            ``None`` for the module's ``example_input_array``, as in Lightning.
        layers: Choices, or the plan that `validate` returned. Buffers that keep the server's value are sent down but
            not up.

    Note:
        The multiplications of normalisations, activations and other elementwise operations are not counted, as in
        `torch.utils.flop_counter`. Backward takes about twice as many as forward, whole or sharded.

    Example:
        >>> import torch
        >>> mlp = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
        >>> table = cost_table(mlp, [0.1, 0.5], torch.zeros(32, 64))
        >>> print(table)
        keep ratio  parameters     MACs           kept values    kept bytes       down            up
        full        85.0 k         2.70 M         16.4 k         64.0 KiB         332 KiB         332 KiB
        0.1         32.8 k (39%)   1.03 M (38%)   23.9 k (146%)  93.2 KiB (146%)  128 KiB (39%)   128 KiB (39%)
        0.5         85.0 k (100%)  2.70 M (100%)  53.2 k (325%)  208 KiB (325%)   333 KiB (100%)  332 KiB (100%)
        >>> table.at[0.1].parameters
        32778
    """
    ratios = each("keep_ratios", keep_ratios, KEEP_RATIO)
    costs = costs_of(module, example_input, layers)
    return CostTable(costs.full, {keep_ratio: costs.at(keep_ratio) for keep_ratio in ratios})
