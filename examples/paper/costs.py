"""Tables of the costs of sub-models. Costs are counted, so nothing is trained."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from build import MODELS
from settings import Settings
from setups import SHORTCUTS
from tables import row_of

import lightning_spectral as ls
from lightning_spectral.nn.cost import show_count

COUNTED = {"parameters": "parameters", "macs": "MACs", "kept_values": "memory, values"}


@dataclass(frozen=True)
class Costs:
    """A table of costs, read from ``grids/<name>.yaml``.

    Attributes:
        name: Name of the file.
        title: What the table shows.
        source: The paper, and the place in it.
        model: Name of the model.
        classes: Number of classes.
        inputs: Shape of a batch.
        keep_ratios: The columns after that of the whole model.
        paper: The paper's rows, as printed.
    """

    name: str
    title: str
    source: str
    model: str
    classes: int
    inputs: Sequence[int]
    keep_ratios: Sequence[float]
    paper: Mapping[str, Sequence[str]]

    @classmethod
    def read(cls, name: str, text: Mapping[str, Any], scale: str) -> Costs:
        """Read the table at a scale."""
        own = text["costs"][scale]
        return cls(name, text["title"], text["source"], **own, keep_ratios=text["keep_ratios"], paper=text["paper"])

    def runs(self, seed: int) -> Iterator[Settings]:
        """Return no runs, since nothing is trained."""
        return iter(())

    def markdown(self) -> str:
        """Return the table in Markdown: our rows, then the paper's."""
        batch = torch.zeros(*self.inputs)
        model = MODELS[self.model](self.classes, batch.shape[1:])
        costs = [ls.cost_table(model, ls.SpectralSharding(), [ratio], batch) for ratio in self.keep_ratios]
        cut = [
            ls.cost_table(model, ls.SpectralSharding(exclude=SHORTCUTS, output_ratio=ratio), [ratio], batch)
            for ratio in self.keep_ratios
        ]
        head = [row_of("", "whole", *map(str, self.keep_ratios)), row_of(*["---"] * (2 + len(self.keep_ratios)))]
        ours = [
            row_of(f"{whose}, {label}", *cells(tables, name))
            for whose, tables in (("ours", costs), ("ours with outputs cut", cut))
            for name, label in COUNTED.items()
        ]
        theirs = [row_of(label, *map(str, cells)) for label, cells in self.paper.items()]
        return f"{self.title}. {self.source}\n\n" + "\n".join([*head, *ours, *theirs]) + "\n"


def cells(tables: Sequence[ls.nn.CostTable], name: str) -> Iterator[str]:
    """Yield one cost: of the whole model, then at the keep ratio of each table."""
    yield show_count(getattr(tables[0].full, name))
    for table in tables:
        (cost,) = table.at.values()
        yield f"{show_count(getattr(cost, name))} ({table.share(name, cost):.0%})"
