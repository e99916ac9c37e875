"""The cost of each keep ratio, as a table to print, plot and log."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from torch import nn

from lightning_spectral.nn.cost.block_costs import Cost
from lightning_spectral.nn.cost.costs import costs_of
from lightning_spectral.nn.plan.choices import LayerChoices
from lightning_spectral.nn.plan.module_plan import ModulePlan
from lightning_spectral.nn.plan.text_table import aligned
from lightning_spectral.nn.plan.trace import Example

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class CostTable:
    """The cost of a client's model, whole and at each keep ratio; ``print`` shows it as a table.

    Attributes:
        full: The whole model, as `FedAvg` trains it.
        at: From keep ratios to the cost of sub-models, in the order in which they were asked for.
    """

    full: Cost
    at: Mapping[float, Cost]

    def __str__(self) -> str:
        rows = [("full", *(show(getattr(self.full, name)) for name, (_, show) in COLUMNS.items()))]
        rows += [(f"{keep_ratio:g}", *self._cells(cost)) for keep_ratio, cost in self.at.items()]
        return "\n".join(aligned([("keep ratio", *(title for title, _ in COLUMNS.values())), *rows]))

    def _cells(self, cost: Cost) -> list[str]:
        return [f"{show(getattr(cost, name))} ({self._share(name, cost):.0%})" for name, (_, show) in COLUMNS.items()]

    def _share(self, name: str, cost: Cost) -> float:
        return float(getattr(cost, name) / max(1, getattr(self.full, name)))

    def as_dict(self) -> dict[str, dict[str, int]]:
        """From ``"full"`` and the keep ratios to the fields of their costs."""
        named = {"full": self.full, **{f"{keep_ratio:g}": cost for keep_ratio, cost in self.at.items()}}
        return {name: asdict(cost) for name, cost in named.items()}

    def log(self, logger: Any) -> None:
        """Log every number as a metric such as ``cost/0.2/macs``; a `WandbLogger` gets the table too.

        Args:
            logger: Any Lightning logger.
        """
        rows = self.as_dict()
        logger.log_metrics({f"cost/{row}/{name}": n for row, costs in rows.items() for name, n in costs.items()})
        if hasattr(logger, "log_table"):  # of Lightning's own loggers, only wandb's
            data = [[row, *costs.values()] for row, costs in rows.items()]
            logger.log_table("cost", columns=["keep ratio", *rows["full"]], data=data)

    def plot(self) -> Figure:
        """Plot each cost as a share of the whole model's; needs matplotlib (the ``examples`` extra)."""
        from matplotlib.figure import Figure

        figure = Figure(figsize=(6.0, 3.5), layout="constrained")
        axes = figure.add_subplot(xlabel="keep ratio", ylabel="share of the whole model's")
        axes.axhline(1.0, color="grey", linewidth=0.8)
        ratios = sorted(self.at)
        for name, (title, look) in LINES.items():
            axes.plot(ratios, [self._share(name, self.at[ratio]) for ratio in ratios], look, label=title)
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
    """What each keep ratio costs a client, before any training.

    Two forward passes are counted, of the whole model and of its smallest sub-model, on a copy; the rest is formulas.
    Activations and multiplications are those of one pass of ``example_input``, so give a batch as clients train on,
    and a module whose layers are in the mode in which they train. A pass keeps what autograd saves; what a kernel
    saves differs between devices, so count on the device that trains.

    Args:
        module: Any module; it is not changed.
        keep_ratios: Shares of the singular terms, each in ``(0, 1]``.
        example_input: One input, a tuple of them, or a dictionary of keyword arguments, on the module's device;
            ``None`` for Lightning's ``example_input_array`` of the module.
        layers: Choices, or the plan that `validate` returned. Buffers that keep the server's value are sent down but
            not up.

    Raises:
        ValueError: If a ratio is out of range, there is no example, ``layers`` is the plan of another module, or with
            every problem that `validate` shows.

    Note:
        The multiplications of normalisations, activations and other elementwise operations are not counted, as in
        `torch.utils.flop_counter`. Backward takes about twice those of forward, whole or sharded.

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
    costs = costs_of(module, example_input, layers)
    return CostTable(costs.full, {keep_ratio: costs.at(keep_ratio) for keep_ratio in keep_ratios})


def _count(number: float) -> str:
    return _with_unit(number, 1000, ("", " k", " M", " G", " T", " P"))


def _bytes(number: float) -> str:
    return _with_unit(number, 1024, (" B", " KiB", " MiB", " GiB", " TiB", " PiB"))


def _with_unit(number: float, base: int, units: Sequence[str]) -> str:
    """Three digits, and the largest unit below them."""
    power = 0
    while number >= base and power < len(units) - 1:
        number, power = number / base, power + 1
    digits = 0 if power == 0 or number >= 100 else 1 if number >= 10 else 2
    return f"{number:.{digits}f}{units[power]}"


COLUMNS: Mapping[str, tuple[str, Callable[[float], str]]] = MappingProxyType(
    {
        "parameters": ("parameters", _count),
        "macs": ("MACs", _count),
        "kept_values": ("kept values", _count),
        "kept_bytes": ("kept bytes", _bytes),
        "downlink_bytes": ("down", _bytes),
        "uplink_bytes": ("up", _bytes),
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
