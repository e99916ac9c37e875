"""The cost of each compression of Zampling, as a table to print and log."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import MappingProxyType

from torch import nn

from lightning_spectral.arguments import as_patterns, each
from lightning_spectral.nn.cost.costs import required_example
from lightning_spectral.nn.cost.counted_pass import count_pass
from lightning_spectral.nn.cost.rows import CostRows, show_bytes, show_count
from lightning_spectral.nn.cost.zampling_costs import ZamplingCost, zampling_costs_of
from lightning_spectral.nn.plan.trace import Example
from lightning_spectral.nn.zampling.compressed import COMPRESSION, DOWNLINK_BITS, Compression
from lightning_spectral.protocol.exchange import copy_module


class ZamplingCostTable(CostRows[ZamplingCost]):
    """The cost of `Zampling` to a client, whole and at each compression; ``print`` shows it as a table.

    Attributes:
        full: The whole model, as `FedAvg` trains it.
        at: Maps compressions to costs, in the order given.
    """

    title = "compression"
    columns = MappingProxyType(
        {
            "parameters": ("parameters", show_count),
            "macs": ("MACs", show_count),
            "matrix_macs": ("MACs with Q", show_count),
            "matrix_bytes": ("bytes of Q", show_bytes),
            "downlink_bytes": ("down", show_bytes),
            "uplink_bytes": ("up", show_bytes),
            "frozen_bytes": ("down once", show_bytes),
        }
    )


def zampling_cost_table(
    module: nn.Module,
    compressions: Sequence[float] = (8, 32, 128),
    example_input: Example = None,
    *,
    degree: int | None = 10,
    downlink_bits: int | None = None,
    exclude: Sequence[str] = (),
    include: Sequence[str] = (),
    keep_buffers: Sequence[str] = (),
) -> ZamplingCostTable:
    """The cost of each compression of `Zampling` to a client, before any training.

    The forward pass is that of the whole model, since sampled weights have the same shapes; it is counted once, on a
    copy. Each local step adds a product with Q and one with its transpose. Formulas give the rest.

    Args:
        module: Any module; it is not changed.
        compressions: Numbers of weights for each probability, at least 1.
        example_input: As in `cost_table`.
        degree: As for `Zampling`, like the following arguments.
        downlink_bits: Bits of a probability on its way down; ``None`` for 32, a float.
        exclude: Patterns of parameter names that are sent whole.
        include: Patterns of additional parameters to compress.
        keep_buffers: Patterns of buffers that are sent down but not up, as are all buffers that cannot be averaged.

    Note:
        ``matrix_bytes`` covers all of Q; the part beyond the ``memory`` of `Zampling` is not kept but drawn again. An
        accelerator keeps the transpose as well.

    Example:
        >>> import torch
        >>> mlp = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
        >>> print(zampling_cost_table(mlp, [8, 64], torch.zeros(32, 64)))
        compression  parameters    MACs           MACs with Q  bytes of Q  down            up
        full         85.0 k        2.70 M         0            0 B         332 KiB         332 KiB
        8            10.6 k (13%)  2.70 M (100%)  1.70 M       6.49 MiB    41.5 KiB (13%)  1.30 KiB (0.4%)
        64           1.33 k (2%)   2.70 M (100%)  1.70 M       6.49 MiB    5.19 KiB (2%)   167 B (0.05%)
    """
    downlink_bits = DOWNLINK_BITS("downlink_bits", downlink_bits)
    factors = each("compressions", compressions, COMPRESSION["compression"])
    keep_buffers = as_patterns("keep_buffers", keep_buffers)
    whole = Compression(1, degree, exclude=exclude, include=include)
    weights = whole.weights_of(module)
    probs = {factor: replace(whole, factor=factor).matrix(weights, seed=0).num_columns for factor in factors}
    macs = count_pass(copy_module(module), required_example(module, example_input)).macs
    costs = zampling_costs_of(module, whole, downlink_bits=downlink_bits, keep_buffers=keep_buffers, macs=macs)
    return ZamplingCostTable(costs.full, {factor: costs.at(num_probs) for factor, num_probs in probs.items()})
