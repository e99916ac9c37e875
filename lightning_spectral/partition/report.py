"""Inspection of a split before training on it."""

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from lightning_spectral.errors import from_extra
from lightning_spectral.partition.partition import Partition
from lightning_spectral.tables import as_html

if TYPE_CHECKING:
    from matplotlib.axes import Axes


_ROWS = 10
_BARS = 100


@dataclass(frozen=True, eq=False)
class PartitionReport:
    """Sizes and class mixtures of the clients; ``print`` it or :meth:`plot` it.

    Attributes:
        counts: Examples per client, int64, shape ``(num_clients,)``.
        histogram: Examples per client and class, int64, shape ``(num_clients, num_classes)``; ``None`` without labels.
        classes: Label of each column of ``histogram``, ascending, shape ``(num_classes,)``; ``None`` without labels.

    Example:
        >>> partition = Partition.from_lists([[0, 1], [2, 3, 4]])
        >>> print(report(partition, torch.tensor([0, 1, 1, 1, 2])))
        2 clients, 5 examples; 2 / 2.5 / 3 examples per client (min / median / max)
        of 3 classes, a client has 2.0 on average, 2.0 above a 5 % share
        client  examples  classes
             0         2  0: 1, 1: 1
             1         3  1: 2, 2: 1
    """

    counts: Tensor
    histogram: Tensor | None
    classes: Tensor | None

    def mean_classes(self, min_share: float = 0.0) -> float:
        """Number of classes with more than a given share of a client's examples, averaged over the clients.

        By default it counts the classes that are present; a client without examples has none.

        Example:
            >>> report(Partition.from_lists([[0, 1], [2]]), torch.tensor([0, 1, 1])).mean_classes()
            1.5
        """
        if self.histogram is None:
            raise ValueError("The report was made without labels; pass labels=... to `report`.")
        return float((self.histogram > min_share * self.counts[:, None]).sum(1).double().mean())

    def plot(self, path_or_ax: "str | os.PathLike[str] | Axes") -> "Axes":
        """Plot stacked bars, one per client (the first 100), a colour per class, to a file or on given axes."""
        if isinstance(path_or_ax, str | os.PathLike):
            with from_extra("examples"):
                from matplotlib.figure import Figure  # not pyplot, which would choose a backend for the process

            figure = Figure(figsize=(8, 3), layout="constrained")
            axes = self.plot(figure.subplots())
            figure.savefig(path_or_ax)
            return axes
        axes, shown = path_or_ax, self.counts[:_BARS]
        bottom, columns = torch.zeros_like(shown), [("examples", self.counts)]
        if self.histogram is not None and self.classes is not None:
            columns = list(zip(map(str, self.classes.tolist()), self.histogram.T, strict=True))
        for label, column in columns:
            axes.bar(range(len(shown)), column[:_BARS].numpy(), bottom=bottom.numpy(), width=1.0, label=label)
            bottom = bottom + column[:_BARS]
        axes.set(xlabel="client", ylabel="examples", xlim=(-0.5, len(shown) - 0.5))
        if self.histogram is not None and self.histogram.shape[1] <= 20:
            axes.legend(title="class", fontsize="x-small", loc="center left", bbox_to_anchor=(1.0, 0.5))
        return axes

    def __str__(self) -> str:
        summary, rows, hidden = self._blocks()
        lines = [f"{client:>6}  {size:>8}  {'  '.join(classes)}".rstrip() for client, size, *classes in rows]
        return "\n".join([summary, *lines, *hidden])

    def _repr_html_(self) -> str:
        summary, rows, hidden = self._blocks()
        return as_html([summary, rows, *hidden])

    def _blocks(self) -> tuple[str, list[tuple[str, ...]], list[str]]:
        """A summary, a table with its head, and how many clients it does not show."""
        sizes = self.counts.double()
        low, middle, high = sizes.min(), sizes.quantile(0.5), sizes.max()
        lines = [
            f"{len(self.counts)} clients, {int(self.counts.sum())} examples; "
            f"{low:g} / {middle:g} / {high:g} examples per client (min / median / max)"
        ]
        if self.histogram is not None:
            lines.append(
                f"of {self.histogram.shape[1]} classes, a client has {self.mean_classes():.1f} on average, "
                f"{self.mean_classes(0.05):.1f} above a 5 % share"
            )
        rows: list[tuple[str, ...]] = [("client", "examples", *["classes"] * (self.histogram is not None))]
        for client, size in enumerate(self.counts[:_ROWS].tolist()):
            rows.append((str(client), str(size), *self._mixture(client)))
        hidden = len(self.counts) - _ROWS
        return "\n".join(lines), rows, [f"... and {hidden} more clients"] * (hidden > 0)

    def _mixture(self, client: int) -> list[str]:
        """The client's classes in one entry, the most frequent first; none without labels."""
        if self.histogram is None or self.classes is None:
            return []
        counts, columns = self.histogram[client].sort(descending=True, stable=True)
        present = [f"{self.classes[k]}: {n}" for n, k in zip(counts.tolist(), columns, strict=True) if n]
        return [", ".join(present[:6]) + (", ..." if len(present) > 6 else "")]


def report(partition: Partition, labels: Tensor | None = None) -> PartitionReport:
    """Count each client's examples, by class if labels are given.

    Args:
        partition: The split.
        labels: Class of each example of the whole data set, integers, shape ``(num_examples,)``.

    Example:
        >>> report(Partition.from_lists([[0, 1], [2]])).counts
        tensor([2, 1])
    """
    if labels is None:
        return PartitionReport(partition.sizes, None, None)
    num_needed = int(partition.indices.max()) + 1 if partition.num_assigned else 0
    if labels.ndim != 1 or len(labels) < num_needed:
        raise ValueError(
            f"`labels` must hold one class index per example (at least {num_needed}), got shape {tuple(labels.shape)}."
        )
    values, inverse = np.unique(labels.cpu().numpy(), return_inverse=True)
    client = torch.arange(partition.num_clients).repeat_interleave(partition.sizes)
    cell = client * len(values) + torch.from_numpy(inverse)[partition.indices]
    histogram = cell.bincount(minlength=partition.num_clients * len(values)).view(partition.num_clients, -1)
    return PartitionReport(partition.sizes, histogram, torch.from_numpy(values))
