"""The cost to a client of each capacity, for any algorithm."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn
from torch.optim import Optimizer

from lightning_spectral.algorithms.base import Algorithm
from lightning_spectral.algorithms.counted import Counted, check_both
from lightning_spectral.algorithms.fed_avg import FedAvg
from lightning_spectral.arguments import Number, each
from lightning_spectral.nn.cost.cost import required_example, whole_cost
from lightning_spectral.nn.cost.table import CostTable
from lightning_spectral.nn.plan.trace import Example
from lightning_spectral.protocol.buffer_rules import buffer_rules

CAPACITY = Number(above=0)


def cost_table(
    module: nn.Module,
    algorithm: Algorithm,
    capacities: Sequence[float],
    example_input: Example = None,
    *,
    optimizer: Optimizer | None = None,
) -> CostTable:
    """The cost of each capacity of any algorithm to a client, before any training.

    Two rounds are opened on a copy of the module. What the server sends, what the client holds and what it sends back
    are counted, as is one forward pass of the client's model. If the rounds differ, the larger cost counts.

    Activations and multiplications are those of ``example_input``, so give a batch like those that clients train on,
    and a module whose layers are in the mode in which they train. Kept values are those that autograd saves. What a
    kernel saves differs between devices, so count on the device used for training.

    Args:
        module: Any module; it is not changed.
        algorithm: The algorithm with the run's options; its own capacities make no difference.
        capacities: Keep ratios in ``(0, 1]``, or what else the algorithm's clients differ by: ranks of `LoRA`,
            compressions of `Zampling`. Where every client trains the whole model, only 1.
        example_input: One input, a tuple of them, or a dictionary of keyword arguments, on the module's device;
            ``None`` for the module's ``example_input_array``.
        optimizer: The optimizer with which clients train, over the module's parameters. With it, the memory of a local
            step is counted too: one step is taken, and the optimizer's state is what it makes.

    Raises:
        TypeError: If ``algorithm`` is no algorithm.
        ValueError: If there is no example, the algorithm refuses a capacity or the module, or clients cannot have such
            an optimizer.

    Note:
        Multiplications of normalisations, activations and other elementwise operations are not counted, as in
        `torch.utils.flop_counter`. Backward takes about twice as many as forward. Sub-models that draw a width for each
        step cost at most this much. With ``LoRA(merge_every=k)``, the adapted weights travel again in one of k rounds.

    Example:
        >>> import torch
        >>> from lightning_spectral.algorithms import SpectralSharding
        >>> mlp = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
        >>> table = cost_table(mlp, SpectralSharding(), [0.1, 0.5], torch.zeros(32, 64))
        >>> print(table)
        keep ratio  parameters     MACs           kept values    kept bytes       down            up
        full        85.0 k         2.70 M         16.4 k         64.0 KiB         332 KiB         332 KiB
        0.1         32.8 k (39%)   1.03 M (38%)   23.9 k (146%)  93.2 KiB (146%)  128 KiB (39%)   128 KiB (39%)
        0.5         85.0 k (100%)  2.70 M (100%)  53.2 k (325%)  208 KiB (325%)   333 KiB (100%)  332 KiB (100%)
        >>> table.at[0.1].parameters
        32778
        >>> adam = torch.optim.Adam(mlp.parameters())
        >>> cost_table(mlp, SpectralSharding(), [0.1], torch.zeros(32, 64), optimizer=adam).at[0.1].memory_bytes
        796416
    """
    check_both(module, algorithm)
    capacities = each("capacities", capacities, CAPACITY)
    example = required_example(module, example_input)
    counted = Counted(module, algorithm, example, optimizer)
    costs = counted.at(capacities, example)  # first, because it says what is wrong with the algorithm
    full = whole_cost(module, example, buffer_rules(module, getattr(algorithm, "buffers", None)))
    if optimizer is not None:
        full = full.with_memory(Counted(module, FedAvg(), example, optimizer).at([1.0], example)[1.0])
    return CostTable(full, costs, counted.capacity)


def round_bytes(module: nn.Module, algorithm: Algorithm, keep_ratios: Sequence[float]) -> dict[float, int]:
    """Bytes that a client of each of an algorithm's own keep ratios gets and sends in a round, without frozen ones.

    Args:
        module: Any module; it is not changed.
        algorithm: The algorithm with the run's options.
        keep_ratios: Some of its keep ratios.

    Example:
        >>> from lightning_spectral.algorithms import SpectralSharding
        >>> mlp = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 2))
        >>> round_bytes(mlp, SpectralSharding(keep_ratio={0.25: 0.5, 1.0: 0.5}), [0.25, 1.0])
        {0.25: 2592, 1.0: 5712}
    """
    counted = Counted(module, algorithm, None)
    return {r: cost.round_bytes for r, cost in counted.of_own(keep_ratios).items()}
