"""Costs beside that of the whole model: to print, plot and log, or as numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeAlias

from lightning_spectral.extras import from_extra
from lightning_spectral.nn.cost.cost import MEMORY, Cost
from lightning_spectral.nn.cost.units import show_bytes, show_count
from lightning_spectral.tables import Block, as_html, as_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure


Column: TypeAlias = tuple[str, Callable[[float], str]]  # its title, and how its numbers are shown
COLUMNS: Mapping[str, Column] = MappingProxyType(
    {
        "parameters": ("parameters", show_count),
        "macs": ("MACs", show_count),
        "step_macs": ("MACs per step", show_count),
        "kept_values": ("kept values", show_count),
        "kept_bytes": ("kept bytes", show_bytes),
        "held_bytes": ("held besides", show_bytes),
        "downlink_bytes": ("down", show_bytes),
        "uplink_bytes": ("up", show_bytes),
        "frozen_bytes": ("down once", show_bytes),
    }
)
# In a table of its own, if a step of an optimizer was counted; all but the first add up to the first.
MEMORY_COLUMNS: Mapping[str, Column] = MappingProxyType(
    {
        "memory_bytes": ("memory", show_bytes),
        "weight_bytes": ("weights", show_bytes),
        "gradient_bytes": ("gradients", show_bytes),
        "optimizer_bytes": ("optimizer", show_bytes),
        "activation_bytes": ("activations", show_bytes),
        "download_bytes": ("download", show_bytes),
        "held_bytes": ("held besides", show_bytes),
    }
)
RARE = ("step_macs", "held_bytes", "frozen_bytes")  # columns that are shown only where something is in them
# Titles, and line styles that remain distinguishable where lines overlap.
LINES: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "kept_bytes": ("kept bytes", "-s"),
        "parameters": ("parameters", "-o"),
        "macs": ("MACs", "--x"),
        "round_bytes": ("down and up", ":+"),
    }
)


@dataclass(frozen=True)
class CostTable:
    """The cost of an algorithm to a client, for the whole model and at each capacity; ``print`` shows it as a table.

    Where an optimizer was given, a second table shows the memory of training and its parts.

    Attributes:
        full: The whole model, as `FedAvg` trains it.
        at: Maps capacities to costs, in the order given.
        capacity: What clients differ by: a keep ratio, a rank, a compression.
    """

    full: Cost
    at: Mapping[float, Cost]
    capacity: str = "keep ratio"

    def __str__(self) -> str:
        return as_text(self._blocks())

    def _repr_html_(self) -> str:
        return as_html(self._blocks())

    def _blocks(self) -> list[Block]:
        """The cells of the costs and, if a step was counted, of the memory of training, with their titles."""
        columns = [COLUMNS, MEMORY_COLUMNS] if self.full.memory_bytes else [COLUMNS]
        return [self._cells(self._shown(each)) for each in columns]

    def _shown(self, columns: Mapping[str, Column]) -> Mapping[str, Column]:
        costs = (self.full, *self.at.values())
        hidden = {name for name in RARE if not any(getattr(cost, name) for cost in costs)}
        return {name: column for name, column in columns.items() if name not in hidden}

    def _cells(self, columns: Mapping[str, Column]) -> list[Sequence[str]]:
        rows = [("full", *(show(getattr(self.full, name)) for name, (_, show) in columns.items()))]
        for capacity, cost in self.at.items():
            rows.append((f"{capacity:g}", *(self._cell(name, show, cost) for name, (_, show) in columns.items())))
        return [(self.capacity, *(title for title, _ in columns.values())), *rows]

    def _cell(self, name: str, show: Callable[[float], str], cost: Cost) -> str:
        shown = show(getattr(cost, name))
        return f"{shown} ({_percent(self.share(name, cost))})" if getattr(self.full, name) else shown

    def share(self, name: str, cost: Cost) -> float:
        """One field of a cost as a share of the whole model's."""
        return float(getattr(cost, name) / max(1, getattr(self.full, name)))

    def as_dict(self) -> dict[str, dict[str, int]]:
        """Map ``"full"`` and the capacities to the fields of their costs."""
        named = {"full": self.full, **{f"{capacity:g}": cost for capacity, cost in self.at.items()}}
        return {name: self._numbers(cost) for name, cost in named.items()}

    def _numbers(self, cost: Cost) -> dict[str, int]:
        numbers = asdict(cost)
        if self.full.memory_bytes:
            return {**numbers, "memory_bytes": cost.memory_bytes}
        return {name: number for name, number in numbers.items() if name not in MEMORY}

    def log(self, logger: Any) -> None:
        """Log every number as a metric such as ``cost/0.2/macs``; a `WandbLogger` gets the table too."""
        rows = self.as_dict()
        logger.log_metrics({f"cost/{row}/{name}": n for row, costs in rows.items() for name, n in costs.items()})
        if hasattr(logger, "log_table"):  # of Lightning's own loggers, only wandb's
            data = [[row, *costs.values()] for row, costs in rows.items()]
            logger.log_table("cost", columns=[self.capacity, *rows["full"]], data=data)

    def plot(self) -> Figure:
        """Plot each cost as a share of the whole model's; needs matplotlib (the ``examples`` extra)."""
        with from_extra("examples"):
            from lightning_spectral.pictures import Picture

        figure = Picture(figsize=(6.0, 3.5), layout="constrained")
        axes = figure.add_subplot(xlabel=self.capacity, ylabel="share of the whole model's")
        axes.axhline(1.0, color="grey", linewidth=0.8)
        capacities = sorted(self.at)
        for name, (title, look) in LINES.items():
            axes.plot(capacities, [self.share(name, self.at[each]) for each in capacities], look, label=title)
        axes.set_ylim(bottom=0.0)
        axes.grid(alpha=0.3)
        figure.legend(loc="outside right upper")
        return figure


def _percent(share: float) -> str:
    return f"{share:.0%}" if share >= 0.01 or share == 0.0 else f"{100 * share:.1g}%"
