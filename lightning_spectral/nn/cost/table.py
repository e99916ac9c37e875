"""Costs beside that of the whole model: to print, plot and log, or as numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from lightning_spectral.extras import from_extra
from lightning_spectral.nn.cost.cost import Cost
from lightning_spectral.nn.plan.text_table import aligned

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def show_count(number: float) -> str:
    """A number with a decimal unit: 11_173_962 is ``'11.2 M'``."""
    return _with_unit(number, 1000, ("", " k", " M", " G", " T", " P"))


def show_bytes(number: float) -> str:
    """A number of bytes with a binary unit: 5 * 2**20 is ``'5.00 MiB'``."""
    return _with_unit(number, 1024, (" B", " KiB", " MiB", " GiB", " TiB", " PiB"))


COLUMNS: Mapping[str, tuple[str, Callable[[float], str]]] = MappingProxyType(
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

    Attributes:
        full: The whole model, as `FedAvg` trains it.
        at: Maps capacities to costs, in the order given.
        capacity: What clients differ by: a keep ratio, a rank, a compression.
    """

    full: Cost
    at: Mapping[float, Cost]
    capacity: str = "keep ratio"

    def __str__(self) -> str:
        rows = [("full", *(show(getattr(self.full, name)) for name, (_, show) in self._shown.items()))]
        rows += [(f"{capacity:g}", *self._cells(cost)) for capacity, cost in self.at.items()]
        return "\n".join(aligned([(self.capacity, *(title for title, _ in self._shown.values())), *rows]))

    @property
    def _shown(self) -> Mapping[str, tuple[str, Callable[[float], str]]]:
        costs = (self.full, *self.at.values())
        hidden = {name for name in RARE if not any(getattr(cost, name) for cost in costs)}
        return {name: column for name, column in COLUMNS.items() if name not in hidden}

    def _cells(self, cost: Cost) -> list[str]:
        shown = {name: show(getattr(cost, name)) for name, (_, show) in self._shown.items()}
        return [f"{s} ({_percent(self.share(n, cost))})" if getattr(self.full, n) else s for n, s in shown.items()]

    def share(self, name: str, cost: Cost) -> float:
        """One field of a cost as a share of the whole model's."""
        return float(getattr(cost, name) / max(1, getattr(self.full, name)))

    def as_dict(self) -> dict[str, dict[str, int]]:
        """Map ``"full"`` and the capacities to the fields of their costs."""
        named = {"full": self.full, **{f"{capacity:g}": cost for capacity, cost in self.at.items()}}
        return {name: asdict(cost) for name, cost in named.items()}

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
            from matplotlib.figure import Figure

        figure = Figure(figsize=(6.0, 3.5), layout="constrained")
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


def _with_unit(number: float, base: int, units: Sequence[str]) -> str:
    power = 0
    while number >= base and power < len(units) - 1:
        number, power = number / base, power + 1
    digits = 0 if power == 0 or number >= 100 else 1 if number >= 10 else 2
    return f"{number:.{digits}f}{units[power]}"
