"""The cost of a client's turn, counted on the sub-model and the records of a round."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from torch.optim import Optimizer

from lightning_spectral.algorithms.base import ServerHalf
from lightning_spectral.algorithms.step_memory import step_memory, widest_step
from lightning_spectral.client.forms import Forms
from lightning_spectral.client.local_optimizer import LocalOptimizer, options_of
from lightning_spectral.nn.cost.cost import Cost, held_cost
from lightning_spectral.nn.plan.trace import Example
from lightning_spectral.protocol.cohort import Cohort
from lightning_spectral.protocol.records import num_bytes
from lightning_spectral.protocol.work_unit import WorkUnit


def turn_costs(
    half: ServerHalf,
    keep_ratios: Sequence[float],
    example: Example,
    round_idx: int = 0,
    moving: Collection[str] = (),
    optimizer: Optimizer | None = None,
) -> list[Cost]:
    """Open a round with one client of each keep ratio; count what it is sent, holds and sends back, and one pass.

    Without an example, no pass is counted; with an optimizer, so is the memory of a local step. Frozen
    tensors that change between rounds, and so travel in each, are named in ``moving``.
    """
    units = {r: WorkUnit(client_id, coefficient=1.0) for client_id, r in enumerate(keep_ratios)}
    shares = {unit.key: 1.0 / len(units) for unit in units.values()}
    opened = half.open(Cohort(0, round_idx, {r: (unit,) for r, unit in units.items()}, shares=shares))
    side, once = half.device_half, half.frozen_tensors().keys() - set(moving)
    besides = half.cost_besides
    costs = []
    names = {id(parameter): name for name, parameter in half.server.named_parameters()}
    forms = Forms(half.server, side.take_form, () if optimizer is None else (optimizer,))
    for unit in units.values():
        download = replace(opened.send(unit)[0], round_idx=round_idx)  # tells the device what it trains
        frozen = num_bytes({name: tensor for name, tensor in download.tensors.items() if name in once})
        with forms.client(download.capacity) as client:
            side.load(client, download)
            if example is not None and (draw := widest_step(side, client, download).before_forward):
                draw()  # weights that are drawn for a step have a gradient only in it
            held = held_cost(client, example)
            sent = Cost(
                downlink_bytes=download.num_bytes - frozen,
                uplink_bytes=side.collect(client, download).num_bytes,
                frozen_bytes=frozen,
            )
            step = Cost()
            if optimizer is not None:  # last, because it changes the client
                options = options_of(optimizer)
                local = LocalOptimizer(optimizer, names, client, side.origin, side.overrides)
                local.start_client(options)
                step = step_memory(side, client, download, optimizer, example)
        costs.append(held + sent + besides + step)
    return costs


def turn_cost(
    half: ServerHalf, keep_ratio: float, example: Example, round_idx: int = 0, moving: Collection[str] = ()
) -> Cost:
    """The cost of the only client of a round; see `turn_costs`."""
    return turn_costs(half, [keep_ratio], example, round_idx, moving)[0]
