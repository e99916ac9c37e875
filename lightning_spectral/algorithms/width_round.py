"""One open round of sub-models by width: what each client is sent, and where its changes are added."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from lightning_spectral.algorithms.width_averages import arrange, by_width, first_entries
from lightning_spectral.nn.width.plan import WidthPlan
from lightning_spectral.nn.width.sub_model import take
from lightning_spectral.protocol.cohort import Cohort
from lightning_spectral.protocol.exchange import travelling_tensors
from lightning_spectral.protocol.records import Receipt, Upload
from lightning_spectral.sums.entry_mean import MeanEntryChange, without_rows

Tensors = Mapping[str, Tensor]


@dataclass(frozen=True, eq=False)
class WidthRound:
    """One open round.

    Attributes:
        cohort: The clients that take part.
        plan: Which channels belong together.
        tensors: All tensors of the server's module, by name.
        mean: Running mean of the clients' changes.
        averages: The running averages of each width that has its own on the server, by name.
        names: Names of the averages that are kept for each width; a width without its own uses the module's first
            entries.
    """

    cohort: Cohort
    plan: WidthPlan
    tensors: Tensors
    mean: MeanEntryChange
    averages: Mapping[float, Tensors]
    names: tuple[str, ...]

    def parts(self, indices: Mapping[str, Sequence[Tensor]], keep_ratio: float) -> dict[str, Tensor]:
        """The entries of every tensor that a client holds, with the averages of its own width if that has some."""
        cut = {name: take(tensor, indices.get(name, ())) for name, tensor in self.tensors.items()}
        return {**cut, **self.averages.get(keep_ratio, {})}

    def narrower_averages(self, widths: Iterable[float]) -> dict[str, Tensor]:
        """Each width's own averages, for the narrower widths that a client may draw; empty if widths share them."""
        return by_width({width: self._averages_at(width) for width in widths}) if self.names else {}

    def _averages_at(self, width: float) -> Tensors:
        return self.averages.get(width) or first_entries(self.tensors, self.plan, self.names, width)

    def add(self, receipt: Receipt, upload: Upload) -> None:
        """Add a client's change to the entries that it held and trained, weighted by its coefficient."""
        tensors, positions, largest = upload.tensors, self.plan.positions(receipt.drawn), upload.largest
        if self.averages:
            held = arrange(upload, positions, self.names, receipt.capacity, list(self.averages))
            tensors, positions, largest = held
        if upload.untrained_rows:
            tensors, positions = without_rows(tensors, positions, upload.untrained_rows)
        self.mean.add(tensors, positions, receipt.unit.coefficient, largest)


def open_width_round(
    server: nn.Module,
    plan: WidthPlan,
    cohort: Cohort,
    averaged: Tensors,
    averages: Mapping[float, Tensors],
    names: tuple[str, ...],
) -> WidthRound:
    """Open a round.

    Args:
        server: The server's module.
        plan: Which channels belong together.
        cohort: The clients that take part.
        averaged: The tensors of the module that clients send back.
        averages: The running averages of each width that has its own.
        names: Names of the averages that are kept for each width.
    """
    own = by_width(averages)
    buffers = {name for name, _ in server.named_buffers() if name in averaged} | own.keys()
    mean = MeanEntryChange({**averaged, **own}, cohort.total, cohort.absolute, always_divided=buffers)
    return WidthRound(cohort, plan, travelling_tensors(server), mean, averages, names)
