"""The norm of an update, which samplers use, and a bound on it: a first answer to devices that nobody trusts."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lightning_spectral.algorithms.base import Algorithm
from lightning_spectral.arguments import Number, check_fields
from lightning_spectral.protocol.records import Download, Tensors, Upload


@torch.no_grad()
def update_norm(sent: Tensors, returned: Tensors, expected: Tensors | None = None) -> float:
    """Euclidean norm of what came back minus what was sent, over the tensors that were sent both ways.

    Args:
        sent: The tensors that a device was sent, by name.
        returned: The tensors that it sent back.
        expected: The change that the server expects, which is subtracted; ``None`` for none. Tensors without an entry
            are expected to stay unchanged.

    Returns:
        The norm, in units of the weights.

    Example:
        >>> sent, returned = {"w": torch.zeros(2), "steps": torch.tensor(3)}, {"w": torch.tensor([3.0, 4.0])}
        >>> update_norm(sent, returned), update_norm(sent, returned, expected={"w": torch.tensor([3.0, 0.0])})
        (5.0, 4.0)
    """
    squares = [
        (returned[name] - before - (expected or {}).get(name, 0.0)).double().square().sum()
        for name, before in sent.items()
        if name in returned and before.is_floating_point() and before.shape == returned[name].shape
    ]
    return math.sqrt(float(torch.stack(squares).sum())) if squares else 0.0


@dataclass(frozen=True)
class MaxUpdateNorm:
    r"""Shortens a client's update whose norm is larger than a bound, at the server and before it is summed.

    The update becomes :math:`\Delta \min(1, b / \|\Delta\|)`, with the norm over all tensors that travel both ways: for
    sharded layers over the change of the factors, not of their product. Each round counts the clients whose update was
    shortened, as ``fl/clients_bounded``. A device that sends plausible values within the bound still changes the
    average by as much as its weight allows; and where terms are averaged over those who hold them, the only holder of a
    term decides it alone, whatever its weight.

    Args:
        norm: The bound b, in units of the weights, positive.

    Example:
        >>> from lightning_spectral.protocol.records import WorkUnit
        >>> download = Download(WorkUnit(3), 1.0, {"w": torch.zeros(2)})
        >>> upload = Upload(WorkUnit(3), {"w": torch.tensor([3.0, 4.0])})
        >>> MaxUpdateNorm(1.0).applied(download, upload).tensors
        {'w': tensor([0.6000, 0.8000])}
        >>> MaxUpdateNorm(5.0).applied(download, upload) is upload
        True
    """

    norm: float

    def __post_init__(self) -> None:
        check_fields(self, norm=Number(above=0))

    def check(self, algorithm: Algorithm) -> None:
        """Raise ``ValueError`` if an algorithm's uploads are no new values of what was sent."""
        if not algorithm.updates_have_norms:
            raise ValueError(
                f"MaxUpdateNorm needs update norms, which {type(algorithm).__name__} does not provide; leave it out."
            )

    @torch.no_grad()
    def applied(self, download: Download, upload: Upload) -> Upload:
        """An upload whose values are finite, shortened if that is needed; otherwise the same object."""
        norm = update_norm(download.tensors, upload.tensors)
        if norm <= self.norm:
            return upload
        return replace(upload, tensors=_shortened(download.tensors, upload.tensors, self.norm / norm))


def _shortened(sent: Tensors, returned: Tensors, factor: float) -> dict[str, Tensor]:
    both = {n for n, t in sent.items() if n in returned and t.is_floating_point() and t.shape == returned[n].shape}
    return {n: sent[n].lerp(t, factor) if n in both else t for n, t in returned.items()}
