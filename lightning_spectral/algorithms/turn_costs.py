"""The cost of a client's turn, computed with the functions that a round uses."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from lightning_spectral.algorithms.base import ServerHalf
from lightning_spectral.nn.cost.block_costs import Cost
from lightning_spectral.nn.cost.costs import passed
from lightning_spectral.nn.cost.counted_pass import CountedPass, count_pass
from lightning_spectral.nn.plan.trace import Example
from lightning_spectral.protocol.cohort import Cohort
from lightning_spectral.protocol.records import num_bytes
from lightning_spectral.protocol.work_unit import WorkUnit

NOTHING = CountedPass(0, 0, 0, ())


def turn_cost(
    half: ServerHalf,
    keep_ratio: float,
    example: Example,
    round_idx: int = 0,
    moving: Collection[str] = (),
) -> Cost:
    """Open a round for one client, and count what it is sent, holds and sends back, and one forward pass.

    Args:
        half: The algorithm, bound to a copy of the user's module.
        keep_ratio: The client's keep ratio.
        example: Input of the pass; ``None`` to count none.
        round_idx: Communication round, from 0.
        moving: Names of frozen tensors that change between rounds, and travel in each.
    """
    unit = WorkUnit(0, coefficient=1.0)
    opened = half.open(Cohort(0, round_idx, {keep_ratio: (unit,)}, shares={unit.key: 1.0}))
    download, _ = opened.send(unit)
    download = replace(download, round_idx=round_idx)  # tells the device what it trains
    side = half.device_half
    client = side.build(half.server, download.capacity)
    side.load(client, download)
    counted = NOTHING if example is None else count_pass(client, example)
    once = half.frozen_tensors().keys() - set(moving)
    frozen = num_bytes({name: tensor for name, tensor in download.tensors.items() if name in once})
    return passed(counted) + Cost(
        parameters=sum(parameter.numel() for parameter in client.parameters()),
        downlink_bytes=download.num_bytes - frozen,
        uplink_bytes=side.collect(client, download).num_bytes,
        frozen_bytes=frozen,
    )
