"""Bounds on updates: how far a single client may move the server."""

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any, ClassVar

import torch

from lightning_spectral.algorithms.filter import Arrival, Filter, Fit, ServerEnd
from lightning_spectral.arguments import Number, check_fields
from lightning_spectral.filters.own import NORM
from lightning_spectral.protocol.exchange import both_ways, norm_of, update_norm, wide
from lightning_spectral.protocol.records import ClientOutcome, Download, Upload

BOUNDED = "bounded"  # a figure of arrivals: 1 if the update was shortened


class UpdateBound(Filter):
    r"""Shortens a client's update whose norm is larger than a bound, at the server and before it is summed.

    The update becomes :math:`\Delta \min(1, b / \|\Delta\|)`, with the norm over all tensors that are sent both ways:
    for sharded layers over the change of the factors, not of their product. Each round counts the clients whose update
    was shortened, as ``fl/clients_bounded``. Where terms are averaged over those who hold them, the only holder of a
    term decides it alone, whatever its weight.

    Example:
        >>> from lightning_spectral.filters import MaxUpdateNorm
        >>> isinstance(MaxUpdateNorm(2.0), UpdateBound)  # FederatedModule(..., filters=[MaxUpdateNorm(2.0)])
        True
    """

    reads_single: ClassVar[bool] = True
    needs: ClassVar[Sequence[str]] = ("new_values",)

    @property
    def name(self) -> str:
        return UpdateBound.__name__  # a federation has one

    @abstractmethod
    def limit(self, sent: Callable[[], float], usual: float) -> float:
        """The bound b, in units of the weights.

        Args:
            sent: Returns the norm of what the client was sent, or of as many ones as it sends back if that is larger.
            usual: Median norm of the updates of an earlier round; NaN if there is none.
        """

    @torch.no_grad()
    def shortened(self, download: Download, upload: Upload, norm: float, usual: float) -> Upload:
        """An upload whose values are finite, shortened if its ``norm`` demands it; otherwise the same object."""
        returned, both = upload.tensors, dict(both_ways(download.tensors, upload.tensors))
        weights = [tensor for tensor in download.tensors.values() if tensor.is_floating_point()]
        count = sum(tensor.numel() for tensor in both.values())
        limit = self.limit(lambda: max(norm_of(weights), math.sqrt(count)), usual)
        if norm <= limit:
            return upload
        moved = {n: wide(own).lerp(returned[n].to(wide(own)), limit / norm).to(own) for n, own in both.items()}
        return replace(upload, tensors={**returned, **moved})

    def server(self, fit: Fit) -> "BoundEnd":
        return BoundEnd(self)


@dataclass(eq=False)
class BoundEnd(ServerEnd):
    """Shortens updates, and remembers which norm is usual."""

    bound: UpdateBound
    usual: float = field(default=math.nan, init=False)  # in the last round in which clients changed anything

    def arrive(self, arrival: Arrival) -> Arrival:
        sent, upload, figures = arrival.sent, arrival.upload, arrival.figures
        norm = figures[NORM] if NORM in figures else update_norm(sent.tensors, upload.tensors)
        shortened = self.bound.shortened(sent, upload, norm, self.usual)
        figures = {**figures, NORM: norm, BOUNDED: float(shortened is not upload)}
        return replace(arrival, upload=shortened, figures=figures)

    def close(self, outcomes: Sequence[ClientOutcome]) -> Mapping[str, float]:
        if norms := [norm for outcome in outcomes if (norm := outcome.update_norm) > 0.0]:
            self.usual = median(norms) if len(norms) > 2 else min(norms)  # of two, one may lie
        return {"clients_bounded": math.fsum(outcome.figures.get(BOUNDED, 0.0) for outcome in outcomes)}

    def state_dict(self) -> dict[str, Any]:
        return {} if math.isnan(self.usual) else {"usual": self.usual}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self.usual = state_dict["usual"]


@dataclass(frozen=True)
class MaxUpdateNorm(UpdateBound):
    """Shortens updates whose norm is larger than a number; see `UpdateBound`.

    Args:
        norm: The bound, in units of the weights, positive.

    Example:
        >>> from lightning_spectral.protocol.records import WorkUnit
        >>> download = Download(WorkUnit(3), 1.0, {"w": torch.zeros(2)})
        >>> upload = Upload(WorkUnit(3), {"w": torch.tensor([3.0, 4.0])})
        >>> MaxUpdateNorm(1.0).shortened(download, upload, norm=5.0, usual=math.nan).tensors
        {'w': tensor([0.6000, 0.8000])}
        >>> MaxUpdateNorm(5.0).shortened(download, upload, norm=5.0, usual=math.nan) is upload
        True
    """

    norm: float

    def __post_init__(self) -> None:
        check_fields(self, norm=Number(above=0))

    def limit(self, sent: Callable[[], float], usual: float) -> float:
        return self.norm


@dataclass(frozen=True)
class UsualUpdateNorm(UpdateBound):
    """Shortens updates that are many times as long as is usual; see `UpdateBound`.

    What is usual is the median norm of the updates of the last round in which clients changed anything, which no
    minority of them can move far; of two updates, it is the smaller norm. Until there is one, a client changes what it
    is sent by at most its norm, or the norm of as many ones if that is larger.

    Args:
        times: The bound, in units of the median norm, positive.

    Example:
        >>> bound = UsualUpdateNorm(times=10.0)
        >>> bound.limit(lambda: 3.0, usual=0.2), bound.limit(lambda: 3.0, usual=math.nan)
        (2.0, 3.0)
    """

    times: float = 10.0

    def __post_init__(self) -> None:
        check_fields(self, times=Number(above=0))

    def limit(self, sent: Callable[[], float], usual: float) -> float:
        return sent() if math.isnan(usual) else self.times * usual
