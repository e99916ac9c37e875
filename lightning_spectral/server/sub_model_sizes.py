"""Sizes of sub-models and of their downloads and uploads, which a virtual clock needs."""

from __future__ import annotations

from typing import NamedTuple

from lightning_spectral.algorithms.base import Round, ServerHalf
from lightning_spectral.protocol.work_unit import WorkUnit


class SubModelSize(NamedTuple):
    """The size of the sub-models of one keep ratio, which all of its clients share.

    Attributes:
        num_parameters: Number of values in its parameters.
        downlink_bytes: Bytes sent to a client.
        uplink_bytes: Bytes that it sends back.
    """

    num_parameters: int = 0
    downlink_bytes: int = 0
    uplink_bytes: int = 0


class SubModelSizes:
    """Measures the sub-model size of each keep ratio once, on a temporary sub-model."""

    def __init__(self) -> None:
        self._sizes: dict[float, SubModelSize] = {}

    def of(self, half: ServerHalf, opened: Round, unit: WorkUnit, keep_ratio: float) -> SubModelSize:
        """The size of a unit's sub-model, in a round that the algorithm has opened."""
        if keep_ratio not in self._sizes:
            download, _ = opened.send(unit)
            side = half.device_half
            client = side.build(half.server, download.capacity)
            num_parameters = sum(parameter.numel() for parameter in client.parameters())
            uplink_bytes = side.collect(client, download).num_bytes
            self._sizes[keep_ratio] = SubModelSize(num_parameters, download.num_bytes, uplink_bytes)
        return self._sizes[keep_ratio]
