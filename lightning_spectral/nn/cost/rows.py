"""Rows of costs beside the cost of the whole model, to print, to log, or as numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from lightning_spectral.nn.plan.text_table import aligned

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

C = TypeVar("C", bound="DataclassInstance")
Columns = Mapping[str, tuple[str, Callable[[float], str]]]


@dataclass(frozen=True)
class CostRows(Generic[C]):
    """The cost of the whole model, and of each value of an option; ``print`` shows them as a table.

    Attributes:
        full: The whole model, as `FedAvg` trains it.
        at: Maps values of the option to costs, in the order given.
    """

    full: C
    at: Mapping[float, C]

    title: ClassVar[str]
    columns: ClassVar[Columns]

    def __str__(self) -> str:
        rows = [("full", *(show(getattr(self.full, name)) for name, (_, show) in self._shown.items()))]
        rows += [(f"{option:g}", *self._cells(cost)) for option, cost in self.at.items()]
        return "\n".join(aligned([(self.title, *(title for title, _ in self._shown.values())), *rows]))

    @property
    def _shown(self) -> Columns:
        """All columns, without that of frozen parameters if there are none."""
        hidden = (
            ()
            if any(getattr(cost, "frozen_bytes", 0) for cost in (self.full, *self.at.values()))
            else ("frozen_bytes",)
        )
        return {name: column for name, column in self.columns.items() if name not in hidden}

    def _cells(self, cost: C) -> list[str]:
        """Numbers with their shares of the whole model's, where that is not zero."""
        shown = {name: show(getattr(cost, name)) for name, (_, show) in self._shown.items()}
        return [f"{s} ({_percent(self.share(n, cost))})" if getattr(self.full, n) else s for n, s in shown.items()]

    def share(self, name: str, cost: C) -> float:
        """One field of a cost as a share of the whole model's."""
        return float(getattr(cost, name) / max(1, getattr(self.full, name)))

    def as_dict(self) -> dict[str, dict[str, int]]:
        """Map ``"full"`` and the values of the option to the fields of their costs."""
        named = {"full": self.full, **{f"{option:g}": cost for option, cost in self.at.items()}}
        return {name: asdict(cost) for name, cost in named.items()}

    def log(self, logger: Any) -> None:
        """Log every number as a metric such as ``cost/0.2/macs``; a `WandbLogger` gets the table too."""
        rows = self.as_dict()
        logger.log_metrics({f"cost/{row}/{name}": n for row, costs in rows.items() for name, n in costs.items()})
        if hasattr(logger, "log_table"):  # of Lightning's own loggers, only wandb's
            data = [[row, *costs.values()] for row, costs in rows.items()]
            logger.log_table("cost", columns=[self.title, *rows["full"]], data=data)


def show_count(number: float) -> str:
    """A number with a decimal unit.

    Example:
        >>> show_count(11_173_962)
        '11.2 M'
    """
    return _with_unit(number, 1000, ("", " k", " M", " G", " T", " P"))


def show_bytes(number: float) -> str:
    """A number of bytes with a binary unit.

    Example:
        >>> show_bytes(5 * 2**20)
        '5.00 MiB'
    """
    return _with_unit(number, 1024, (" B", " KiB", " MiB", " GiB", " TiB", " PiB"))


def _percent(share: float) -> str:
    return f"{share:.0%}" if share >= 0.01 or share == 0.0 else f"{100 * share:.1g}%"


def _with_unit(number: float, base: int, units: Sequence[str]) -> str:
    """A number with three digits and the largest unit that fits."""
    power = 0
    while number >= base and power < len(units) - 1:
        number, power = number / base, power + 1
    digits = 0 if power == 0 or number >= 100 else 1 if number >= 10 else 2
    return f"{number:.{digits}f}{units[power]}"
